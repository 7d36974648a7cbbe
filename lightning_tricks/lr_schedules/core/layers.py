"""The layers of a model, from its stem to its head."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from torch import nn

_PLAIN = (nn.Sequential, nn.ModuleList, nn.ModuleDict)
# names of attributes and classes; not `normal_head`, `normalizing_flow` and `NormalizedLinear`
NORM = re.compile(r"(?:[nN]orm|NORM)(?:s|ali[sz](?:ation|er)s?)?(?![a-z])")


def layer_of_parameters(module: nn.Module) -> dict[str, int]:
    """Number the layers of a model from its stem, 0, to its head, for layer-wise learning rates.

    Each child of a stack is a layer; a stack is an nn.Sequential, nn.ModuleList or nn.ModuleDict with two children of
    the same class. All modules before the first stack, and between two, form one layer each; after the last, and in a
    model without one, each module with its own parameters is a layer. A normalization joins the module that it follows.
    For timm's ViTs, Mixers and ResNets these are timm's layers.

    Args:
        module: The model.

    Returns:
        Qualified name of each parameter -> its layer.

    Raises:
        ValueError: If there is only one layer.

    Examples:
        >>> net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
        >>> layer_of_parameters(net)
        {'0.weight': 0, '0.bias': 0, '2.weight': 1, '2.bias': 1}
    """
    stacked = list(_children_of_stacks(module, ""))
    names = [name for name, _ in module.named_parameters()]
    owners = [next((path for path in stacked if name.startswith(f"{path}.")), None) for name in names]
    norms = parameters_of_norms(module)
    last_stacked = max((place for place, owner in enumerate(owners) if owner), default=-1)

    layers: dict[str, int] = {}
    layer, before = -1, ""
    for place, (name, owner) in enumerate(zip(names, owners, strict=True)):
        holder = name.rpartition(".")[0]
        current = owner or ("between stacks" if place < last_stacked else holder)
        if name in norms and owner in (None, holder) and layer >= 0:
            current = before
        layer += current != before or layer < 0
        layers[name], before = layer, current
    if layer < 1:
        raise ValueError(
            f"{type(module).__name__} has only one layer: layer_decay needs several modules with parameters."
        )
    return layers


def _children_of_stacks(module: nn.Module, prefix: str) -> Iterator[str]:
    """Find the children of stacks; one that is a plain stack itself is opened."""
    for name, child in module.named_children():
        path = f"{prefix}.{name}".lstrip(".")
        if _is_stack(module) and not (type(child) in _PLAIN and _is_stack(child)):
            if _has_parameters(child):
                yield path
        else:
            yield from _children_of_stacks(child, path)


def _is_stack(module: nn.Module) -> bool:
    if not isinstance(module, _PLAIN):
        return False
    classes = Counter(type(child) for child in module.children() if _has_parameters(child))
    return any(count > 1 for count in classes.values())


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def parameters_of_norms(module: nn.Module) -> set[str]:
    """Return the parameters of modules whose class is called a norm; names like `net.1.weight` do not say so."""
    return {
        f"{path}.{name}".lstrip(".")
        for path, part in module.named_modules()
        if NORM.search(type(part).__name__)
        for name, _ in part.named_parameters(recurse=False)
    }
