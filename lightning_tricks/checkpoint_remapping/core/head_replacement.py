"""`replace_head`: a new last layer, for another number of classes."""

from __future__ import annotations

import re
from typing import Any

from torch import nn

from lightning_tricks._shared.added_parameters import added_modules
from lightning_tricks._shared.checks import check_count
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError

_WORDS = re.compile(r"(^|[._])(fc|head|heads|classifier|score|logits|last_linear|output|linear|predictor|\d+)([._]|$)")


def replace_head(model: nn.Module, num_classes: int, name: str = "auto") -> nn.Module:
    """Replace the layer that outputs a model's scores by a newly initialized, trainable one on the same device.

    Args:
        model: The model, which is modified in place; its `num_classes` and `config.num_labels` are set if present.
        num_classes: Number of scores that the new layer outputs.
        name: The qualified name of the layer, a Linear or a convolution; `"auto"` finds the last one.

    Returns:
        The new layer.

    Raises:
        CheckpointError: If the last layer is not known to be a head, several layers look like heads, or the model is
            itself a layer.
        TypeError, ValueError: If `num_classes` is not a whole number >= 1.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1000))
        >>> replace_head(model, 10)
        Linear(in_features=8, out_features=10, bias=True)
    """
    check_count("num_classes", num_classes)
    if isinstance(model, nn.Linear | nn.Conv2d):
        raise CheckpointError(
            f"the model is itself a {type(model).__name__}, with no module around: build another one."
        )
    path = _find_head(model) if name == "auto" else name
    parent_name, _, attribute = path.rpartition(".")
    parent = model.get_submodule(parent_name)
    old = model.get_submodule(path)
    if not isinstance(old, nn.Linear | nn.Conv2d):
        raise CheckpointError(
            f"{path} is a {type(old).__name__}, not a Linear or Conv2d: name={name!r} cannot be replaced."
        )
    new = _resized(old, num_classes)
    setattr(parent, attribute, new)
    classes = _outputs(old)
    if getattr(model, "num_classes", None) == classes:
        model.num_classes = num_classes  # type: ignore[assignment]
    config = getattr(model, "config", None)
    if getattr(config, "num_labels", None) == classes:
        config.num_labels = num_classes  # type: ignore[union-attr]
    return new


def _find_head(model: nn.Module) -> str:
    added = tuple(f"{name}." for name, _ in added_modules(model))  # LoRA and adapters
    layers: list[tuple[str, nn.Module]] = [
        (name, module)
        for name, module in model.named_modules()
        if list(module.parameters(recurse=False)) and not f"{name}.".startswith(added or "\0")
    ]
    candidates: list[str] = [name for name, module in layers if isinstance(module, nn.Linear | nn.Conv2d)]
    if not layers or not candidates:
        raise CheckpointError(f"{type(model).__name__} has no Linear and no convolution to replace.")
    last_name, last = layers[-1]
    if not _is_head(last_name, last):
        linear = [name for name, module in layers if isinstance(module, nn.Linear)]
        example = f", such as name={linear[-1]!r}" if linear else ""
        raise CheckpointError(
            f"the last layer, {last_name} ({type(last).__name__}), is not known to be a head: "
            f"name the layer that outputs the scores{example}."
        )
    alternatives = [
        name
        for name, module in layers[:-1]
        if _is_head(name, module) and _outputs(module) == _outputs(last) and _are_alternatives(name, last_name)
    ]
    if alternatives:
        raise CheckpointError(f"{', '.join([*alternatives, last_name])} all look like heads: replace each by its name.")
    return last_name


def _is_head(name: str, module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d) and set(module.kernel_size) != {1}:
        return False
    last = name.rpartition(".")[2]
    return isinstance(module, nn.Linear | nn.Conv2d) and bool(_WORDS.search(last) or _WORDS.search(name))


def _are_alternatives(name: str, other: str) -> bool:
    """Whether two names differ in one component alone, which is a word for a head in both."""
    pairs = [(a, b) for a, b in zip(name.split("."), other.split("."), strict=False) if a != b]
    if name.count(".") != other.count(".") or len(pairs) != 1:
        return False
    return all(_WORDS.search(part) and not part.isdecimal() for part in pairs[0])


def _outputs(module: nn.Module) -> int:
    return module.out_features if isinstance(module, nn.Linear) else module.out_channels  # type: ignore[return-value]


def _resized(old: nn.Linear | nn.Conv2d, outputs: int) -> nn.Linear | nn.Conv2d:
    options: Any = {"bias": old.bias is not None, "device": old.weight.device, "dtype": old.weight.dtype}
    new: nn.Linear | nn.Conv2d
    if isinstance(old, nn.Linear):
        new = nn.Linear(old.in_features, outputs, **options)
    else:
        for name in ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"):
            options[name] = getattr(old, name)
        new = nn.Conv2d(old.in_channels, outputs, **options)
    return new.train(old.training)
