"""`replace_head`: a new last layer, for another number of classes."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise, product
from typing import Any

from torch import nn

from lightning_tricks._shared.added_parameters import added_modules
from lightning_tricks._shared.checks import check_count
from lightning_tricks._shared.modules import names_of_modules
from lightning_tricks._shared.text import counted, list_names
from lightning_tricks._torch_compat.modules import compiled_module, own_modules
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError

_WORDS = re.compile(r"(^|[._])(fc|head|heads|classifier|score|logits|last_linear|output|linear|predictor|\d+)([._]|$)")
_COUNTS = ("num_classes", "num_labels")
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_LAYERS = (nn.Linear, *_CONVOLUTIONS)

_Names = Mapping[nn.Module, Sequence[str]]


def replace_head(model: nn.Module, num_classes: int, name: str = "auto") -> nn.Module:
    """Replace the layer that outputs a model's scores by a newly initialized, trainable one on the same device.

    It is replaced under all its names. If the modules around it, or their `config`, have the old number as
    `num_classes` or `num_labels`, they get the new one. A warning names everything else that keeps the old number:
    auxiliary heads, metrics, hyper-parameters. A `config.problem_type` that no longer fits becomes None.

    Args:
        model: The model, which is modified in place.
        num_classes: Number of scores that the new layer outputs.
        name: The qualified name of the layer, a Linear or a convolution; `"auto"` finds the last one.

    Returns:
        The new layer.

    Raises:
        CheckpointError: If the last layer is not known to be a head, several layers look like heads, the head is
            compiled separately, or the model is itself a layer.
        TypeError, ValueError: If `num_classes` is not a whole number >= 1.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1000))
        >>> replace_head(model, 10)
        Linear(in_features=8, out_features=10, bias=True)
    """
    check_count("num_classes", num_classes)
    if isinstance(model, _LAYERS):
        raise CheckpointError(f"the model is itself a {type(model).__name__}, in no other module: create a new one.")
    names = names_of_modules(model)
    added = {inner for _, part in added_modules(model) for inner in part.modules()}  # LoRA and adapters
    layers = [part for part in names if list(part.parameters(recurse=False)) and part not in added]
    old = _find_head(model, layers, names) if name == "auto" else model.get_submodule(name)
    if not isinstance(old, _LAYERS):
        raise CheckpointError(
            f"{name} is a {type(old).__name__}, not a Linear or a convolution: name={name!r} cannot be replaced."
        )
    if any(compiled_module(part) is old for part in model.modules()):  # what torch.compile returned calls the old one
        raise CheckpointError(f"{names[old][0]} is compiled by itself: replace it first, and then call torch.compile.")
    new = _resized(old, num_classes)
    _replace_module(model, old, new)
    if num_classes != (classes := _outputs(old)):
        around = [part for part in names if new in part.modules()]
        said = _set_counts(around, classes, num_classes)
        others = [*_other_layers(layers, names, old), *_other_counts(names, classes)]
        if others:
            said.append(
                f"the old number of classes, {classes}, stays in {counted(len(others), 'place')}: "
                f"{list_names(others)}. Change that, too, if it is for the same classes."
            )
        if said:
            warnings.warn(f"replace_head: {' '.join(said)}", stacklevel=2)
    return new


def _find_head(model: nn.Module, layers: Sequence[nn.Module], names: _Names) -> nn.Module:
    linear = [part for part in layers if isinstance(part, nn.Linear)]
    if not linear and not any(isinstance(part, _CONVOLUTIONS) for part in layers):
        raise CheckpointError(f"{type(model).__name__} has no Linear and no convolution to replace.")
    last = layers[-1]
    rivals = list(_rivals(layers, names))
    if not any(_is_head(name, last) for name in names[last]):
        options = [*rivals, last] if rivals else linear[-1:]
        example = " or ".join(f"name={names[part][0]!r}" for part in options[-4:])
        raise CheckpointError(
            f"the last layer, {names[last][0]} ({type(last).__name__}), is not known to be a head: "
            f"name the layer that outputs the scores{f', such as {example}' if example else ''}."
        )
    if rivals:
        listed = list_names([names[part][0] for part in (*rivals, last)], most=8)
        raise CheckpointError(f"{listed} all look like heads: replace each by its name, as name={names[last][0]!r}.")
    return last


def _is_head(name: str, module: nn.Module) -> bool:
    if isinstance(module, _CONVOLUTIONS) and set(module.kernel_size) != {1}:
        return False
    last = name.rpartition(".")[2]
    return isinstance(module, _LAYERS) and bool(_WORDS.search(last) or _WORDS.search(name))


def _rivals(layers: Sequence[nn.Module], names: _Names) -> Iterator[nn.Module]:
    """Yield the layers that may be heads beside the last one, as far as names and sizes tell."""
    last, known, modules = layers[-1], set(layers), {name: part for part, own in names.items() for name in own}
    lists = [part for part in names if isinstance(part, nn.ModuleList | nn.ModuleDict) and last in part.modules()]
    entries = [[part for part in entry.modules() if part in known] for each in lists for entry in each.children()]
    ends = {held[-1] for held in entries if held}
    for part, after in pairwise(layers):
        if not isinstance(part, _LAYERS) or not isinstance(last, _LAYERS):
            continue
        is_parallel, is_alike = _inputs(part) == _inputs(last), _outputs(part) == _outputs(last)
        is_open = _outputs(part) != _inputs(after)  # what it returns does not go into the next one
        pairs = [*product(names[part], names[last])]
        apart = [_differing_words(own, other, modules) for own, other in pairs]
        parents = [(own.rpartition(".")[0], other.rpartition(".")[0]) for own, other in pairs]
        are_of_siblings = any(all(pair) and _differing_words(*pair, modules) for pair in parents)
        both_are_words = any(all(map(_WORDS.search, words)) for words in apart if words)
        if (
            (part in ends and (is_open or (is_parallel and is_alike)))
            or (both_are_words and (is_alike or (is_parallel and is_open)))
            or (any(apart) and is_parallel and is_open)
            or (are_of_siblings and is_alike and is_open)
        ):
            yield part


def _differing_words(name: str, other: str, modules: Mapping[str, nn.Module]) -> tuple[str, str] | None:
    """Return the one component in which two names differ, in both; None if there are more, or in a chain of layers."""
    mine, its = name.split("."), other.split(".")
    places = [place for place, (word, second) in enumerate(zip(mine, its, strict=False)) if word != second]
    if len(mine) != len(its) or len(places) != 1:
        return None
    around: Any = modules.get(".".join(mine[: places[0]]))
    return None if isinstance(around, nn.Sequential | nn.ModuleList) else (mine[places[0]], its[places[0]])


def _set_counts(around: Iterable[nn.Module], classes: int, num_classes: int) -> list[str]:
    """Set the number of classes in the modules around a head and their configurations; return what else has changed."""
    configs = [config for part in around if (config := getattr(part, "config", None)) is not None]
    for owner in (*around, *configs):
        for name in _count_names(owner, classes):
            with suppress(AttributeError):  # a property that cannot be set is named later
                setattr(owner, name, num_classes)
    said = []
    misfit = "regression" if classes == 1 else "single_label_classification" if num_classes == 1 else None
    for config in configs:
        if misfit is not None and getattr(config, "problem_type", None) == misfit:
            config.problem_type = None
            said.append(f"config.problem_type was {misfit!r}, and is None now: the labels decide which loss is used.")
    return said


def _count_names(owner: Any, classes: int) -> list[str]:
    """Return the attributes, or entries, of an object that hold a number of classes."""
    values = {name: owner.get(name) if isinstance(owner, Mapping) else getattr(owner, name, None) for name in _COUNTS}
    return [name for name, value in values.items() if type(value) is int and value == classes]


def _other_layers(layers: Sequence[nn.Module], names: _Names, old: nn.Module) -> Iterator[str]:
    """Yield the layers with as many outputs as a head that do not go into the next layer."""
    for part, after in zip(layers, [*layers[1:], None], strict=True):
        is_like_it = isinstance(part, _LAYERS) and part is not old and _outputs(part) == _outputs(old)
        if is_like_it and (after is None or _inputs(after) != _outputs(part)):
            yield names[part][0]


def _other_counts(names: _Names, classes: int) -> Iterator[str]:
    """Yield what still has a number of classes: attributes, hyper-parameters and configurations."""
    for part, own in names.items():
        for holder in ("", "hparams", "config"):
            owner = getattr(part, holder, None) if holder else part
            yield from (".".join(filter(None, (own[0], holder, name))) for name in _count_names(owner, classes))


def _inputs(module: nn.Module) -> int:
    """Return the number of values that a layer takes, as far as its first parameter tells."""
    for name in ("in_features", "in_channels"):
        if hasattr(module, name):
            return getattr(module, name)  # type: ignore[no-any-return]
    shape = next(module.parameters(recurse=False)).shape
    return shape[1] if len(shape) > 1 else shape.numel()


def _outputs(module: nn.Module) -> int:
    return module.out_features if isinstance(module, nn.Linear) else module.out_channels  # type: ignore[return-value]


def _resized(old: Any, outputs: int) -> nn.Module:
    options = {"bias": old.bias is not None, "device": old.weight.device, "dtype": old.weight.dtype}
    if not isinstance(old, nn.Linear):
        for name in ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"):
            options[name] = getattr(old, name)
    kind = next(kind for kind in _LAYERS if isinstance(old, kind))
    return kind(_inputs(old), outputs, **options).train(old.training)


def _replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, wherever in a model that is registered."""
    for around in list(model.modules()):
        registered = own_modules(around)
        for name in [name for name, part in registered.items() if part is old]:
            registered[name] = new
