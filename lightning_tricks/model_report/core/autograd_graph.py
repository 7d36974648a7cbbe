"""The autograd graph of one call of a model, as DOT source and as a picture."""

from __future__ import annotations

import logging
import shutil
import warnings
from pathlib import Path
from typing import Any

from torch import Tensor, nn

_log = logging.getLogger("lightning.pytorch.tricks.model_report")

DOT_NOT_INSTALLED = (
    "graph.dot was written, but not drawn: graphviz's program `dot` is not installed (on Debian: apt install graphviz)."
)


def dot_source(output: Tensor, model: nn.Module, **options: Any) -> str:
    """Return the autograd graph of a tensor as DOT source, made by torchviz's `make_dot`.

    Args:
        output: A tensor that requires a gradient.
        model: The module whose parameters are named in the graph.
        **options: Options of `make_dot`: `show_attrs`, `show_saved`, `max_attr_chars`.

    Raises:
        ImportError: If torchviz is not installed.
        TypeError: If `make_dot` has no such option.
    """
    with warnings.catch_warnings():  # torchviz compares versions with distutils
        warnings.simplefilter("ignore", DeprecationWarning)
        from torchviz import make_dot

        return str(make_dot(output, params=dict(model.named_parameters()), **options).source)


def render_graph(source: Path) -> list[Path]:
    """Draw a DOT file as SVG and as PNG in the same folder, or log that `dot` is not installed.

    Returns:
        The paths of the pictures.
    """
    if shutil.which("dot") is None:
        _log.info(DOT_NOT_INSTALLED)
        return []
    import graphviz

    return [
        Path(graphviz.render("dot", kind, outfile=source.with_suffix(f".{kind}"), filepath=source))
        for kind in ("svg", "png")
    ]
