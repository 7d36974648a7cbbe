"""What adding parameters to a model has in common: which parts stay, what is frozen, initial values, and the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor, nn

from lightning_tricks._shared.added_parameters import AddedParameters, added_modules
from lightning_tricks._shared.text import list_names
from lightning_tricks.finetuning.core.class_extension import class_below, extend
from lightning_tricks.finetuning.core.targets import as_patterns, select_modules

T = TypeVar("T", bound=AddedParameters)

DEFAULT_MODULES_TO_SAVE = ("head",)


@dataclass(frozen=True)
class InjectionReport:
    """What was added to a model.

    Attributes:
        what: What it is, in words.
        layers: Qualified name of each module, or weight, that was given parameters -> the class of the layer.
        saved: The names of the modules that are trained whole.
        added: The number of values that were added.
        trainable: The number of values that are trained, with those of `saved`.
        total: The number of values of the model.
        remark: A sentence on what is unusual.
    """

    what: str
    layers: dict[str, str]
    saved: tuple[str, ...]
    added: int
    trainable: int
    total: int
    remark: str = ""

    def __str__(self) -> str:
        counted = ", ".join(f"{count} {kind}" for kind, count in Counter(self.layers.values()).items())
        saved = f", with all of {list_names(self.saved)}" if self.saved else ""
        return (
            f"{self.what} in {counted} add {self.added:,} values; {self.trainable:,} of {self.total:,} values "
            f"({self.trainable / self.total:.2%}) are trained{saved}. {self.remark}"
        ).rstrip()


def make_report(
    model: nn.Module,
    what: str,
    layers: Mapping[str, nn.Module],
    added: Iterable[nn.Parameter],
    saved: Iterable[str],
    remark: str = "",
) -> InjectionReport:
    """Count what was added to a model.

    Args:
        model: The model, with what was added.
        what: What it is, in words.
        layers: What was given parameters, by name.
        added: The parameters that were added.
        saved: The names of the modules that are trained whole.
        remark: A sentence on what is unusual.
    """
    parameters = list(model.parameters())
    return InjectionReport(
        what,
        {name: kind_of_layer(module) for name, module in layers.items()},
        tuple(saved),
        sum(parameter.numel() for parameter in dict.fromkeys(added)),
        sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
        sum(parameter.numel() for parameter in parameters),
        remark,
    )


def kind_of_layer(module: nn.Module) -> str:
    """Return the name of a layer's class, or of the public one of torch that it extends within torch."""
    classes = class_below(module).__mro__
    public = (cls for cls in classes if getattr(nn, cls.__name__, None) is cls)
    own = classes[0] if not classes[0].__module__.startswith("torch.nn") else next(public)
    return own.__name__


def trained_whole(saved: Mapping[str, nn.Module]) -> tuple[str, ...]:
    """Return the names of modules all of whose parameters are trained."""
    return tuple(name for name, part in saved.items() if all(one.requires_grad for one in part.parameters()))


def parts_of(model: nn.Module, kind: type[T]) -> list[T]:
    """Return the added modules of a kind, each once."""
    return [part for _, part in added_modules(model) if isinstance(part, kind)]


def parameters_of(parts: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of several modules."""
    return [parameter for part in parts for parameter in part.parameters()]


def select_saved(given: str | Sequence[str], modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that are trained whole; a model need not have the default ones."""
    if tuple(given) == DEFAULT_MODULES_TO_SAVE:
        return {name: part for name, part in modules.items() if name.rpartition(".")[2] in DEFAULT_MODULES_TO_SAVE}
    return select_modules("modules_to_save", as_patterns("modules_to_save", given), modules)


def without_excluded(
    exclude: str | Sequence[str], saved: Iterable[str], modules: Mapping[str, nn.Module]
) -> dict[str, nn.Module]:
    """Return the modules but those that are excluded, or trained whole, and what lies in them."""
    excluded = select_modules("exclude", as_patterns("exclude", exclude), modules)
    out = tuple(f"{name}." for name in (*excluded, *saved))
    return {name: part for name, part in modules.items() if not f"{name}.".startswith(out)}


def freeze_base(model: nn.Module, saved: Iterable[nn.Module]) -> None:
    """Freeze the parameters of a model but those of some modules, and those that were added before."""
    kept = [*saved, *(part for _, part in added_modules(model))]
    trained = {id(parameter) for part in kept for parameter in part.parameters()}
    for parameter in model.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)


def generator_or_new(generator: torch.Generator | None) -> torch.Generator:
    """Return a generator, or a new one that is seeded as torch was, so that all ranks draw the same values."""
    return torch.Generator().manual_seed(torch.initial_seed()) if generator is None else generator


@torch.no_grad()
def draw_(parameter: Tensor, draw: Callable[[Tensor], object]) -> None:
    """Draw values on the CPU, so that every device gets the same, and set a parameter to them."""
    if not parameter.is_meta:
        drawn = torch.empty(parameter.shape, dtype=torch.float32)
        draw(drawn)
        parameter.copy_(drawn)


class UnfusedLayer:
    """A mixin for `nn.TransformerEncoderLayer`, which then calls its parts in evaluation mode, too.

    Otherwise it takes a fused path that only reads their weights.
    """

    @property
    def activation_relu_or_gelu(self) -> int:
        """The number for activations that the fused path does not have."""
        return 0


class UnfusedEncoder:
    """A mixin for `nn.TransformerEncoder`, which then leaves padded input as it is.

    Otherwise it makes it a nested tensor in evaluation mode, for the fused path of its layers.
    """

    @property
    def use_nested_tensor(self) -> bool:
        """Whether padded input becomes a nested tensor."""
        return False


def unfuse(model: nn.Module, targets: Iterable[nn.Module]) -> None:
    """Let each `nn.TransformerEncoder` and `nn.TransformerEncoderLayer` with a target in it call its parts."""
    wanted = {id(target) for target in targets}
    for kind, mixin in ((nn.TransformerEncoder, UnfusedEncoder), (nn.TransformerEncoderLayer, UnfusedLayer)):
        for module in model.modules():
            is_known = isinstance(module, kind) and not isinstance(module, mixin)
            if is_known and not wanted.isdisjoint(map(id, module.modules())):
                extend(module, mixin)
