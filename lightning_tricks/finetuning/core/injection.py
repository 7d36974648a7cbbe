"""The common part of adding parameters to a model: which layers get them, which are frozen, and the report."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from lightning_tricks._shared.added_parameters import AddedParameters, added_modules
from lightning_tricks._shared.checks import did_you_mean
from lightning_tricks._shared.modules import names_of_modules
from lightning_tricks._shared.patterns import Pattern, as_patterns
from lightning_tricks._shared.text import list_names
from lightning_tricks.finetuning.core.adapter_coverage import is_compiled
from lightning_tricks.finetuning.core.class_extension import class_below, extend, is_extensible

T = TypeVar("T", bound=AddedParameters)

DEFAULT_MODULES_TO_SAVE = ("head",)


@dataclass(frozen=True)
class InjectionReport:
    """A report on the parameters that were added to a model.

    Attributes:
        what: The kind of parameters.
        layers: Qualified name of each module, or weight, that got parameters -> the class of the layer.
        saved: The names of the modules that are trained in full; all names of one module are joined by " = ".
        added: The number of values that were added.
        trainable: The number of values that are trained, including `saved`.
        total: The number of values in the model.
        remark: A sentence on anything unusual.
    """

    what: str
    layers: dict[str, str]
    saved: tuple[str, ...]
    added: int
    trainable: int
    total: int
    remark: str = ""

    @classmethod
    def of(
        cls,
        model: nn.Module,
        what: str,
        layers: Mapping[str, nn.Module],
        added: Iterable[nn.Parameter],
        saved: Iterable[str],
        remark: str = "",
    ) -> InjectionReport:
        """Count the parameters `added` to a model, in layers that are given by name."""
        parameters = list(model.parameters())
        return cls(
            what,
            {name: kind_of_layer(module) for name, module in layers.items()},
            tuple(saved),
            sum(parameter.numel() for parameter in dict.fromkeys(added)),
            sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            sum(parameter.numel() for parameter in parameters),
            remark,
        )

    def __str__(self) -> str:
        counted = ", ".join(f"{count} {kind}" for kind, count in Counter(self.layers.values()).items())
        saved = f", with all of {list_names(self.saved)}" if self.saved else ""
        return (
            f"{self.what} in {counted} add {self.added:,} values; {self.trainable:,} of {self.total:,} values "
            f"({self.trainable / self.total:.2%}) are trained{saved}. {self.remark}"
        ).rstrip()


class Injection(ABC):
    """Parameters that settings add to a model: a plan, whose errors come before anything is changed.

    Args:
        model: The model.
        settings: The settings, of `settings_type`.

    Attributes:
        names: The modules of the model with all their qualified names: one of several names is one module.
        modules: The modules by their first name.
        saved: Those that are trained whole.
        rest: Those that may get parameters.
        targets: Those that get them.
    """

    settings_type: ClassVar[type[Any]]  # a dataclass with target_modules, exclude, modules_to_save and others
    part: ClassVar[type[AddedParameters]]  # the module that holds the parameters of a target
    noun: ClassVar[str]
    otherwise: ClassVar[str]  # how those that a model has already may differ
    remedy: ClassVar[str] = "build the model again"
    may_be_the_model: ClassVar[bool] = False  # whether the model itself may be a target

    def __init__(self, model: nn.Module, settings: Any) -> None:
        self.model, self.settings = model, settings
        self.names = names_of_modules(model)
        self.modules = {own[0]: part for part, own in self.names.items() if own[0] or self.may_be_the_model}
        if tuple(settings.modules_to_save) == DEFAULT_MODULES_TO_SAVE:  # which a model need not have
            self.saved = self._heads()
        else:
            self.saved = self.select("modules_to_save", settings.modules_to_save, self.modules)
        excluded = self.select("exclude", settings.exclude, self.modules)
        out = {inner for part in (*excluded.values(), *self.saved.values()) for inner in part.modules()}
        self.rest = {name: part for name, part in self.modules.items() if part not in out}
        self.targets = self.choose_targets()
        check_targets(self.targets)

    @abstractmethod
    def choose_targets(self) -> dict[str, nn.Module]:
        """Return the modules that get parameters.

        Raises:
            ValueError: If there is none, or one cannot have any.
        """

    @abstractmethod
    def put(self, generator: torch.Generator) -> None:
        """Add the parameters; the model is frozen already."""

    @abstractmethod
    def planned(self) -> dict[int, Any]:
        """Return the ids of the parts in the planned places, and the settings that they would have."""

    @abstractmethod
    def settings_of(self, part: Any) -> Any:
        """Return the settings of a part that the model has, as `planned` does."""

    @abstractmethod
    def report(self) -> InjectionReport:
        """Return a report on the parameters that the model has."""

    @classmethod
    def add(cls, model: nn.Module, settings: Any, generator: torch.Generator | None = None) -> InjectionReport:
        """Freeze a model, add the parameters, by default with the default settings, and return a report on them.

        Raises:
            ValueError: If that is impossible, or the model has such parameters already; nothing is changed then.
        """
        if parts_of(model, cls.part):
            raise ValueError(
                f"{type(model).__name__} has {cls.noun} already, which a second call would reset: {cls.remedy}."
            )
        injection = cls(model, settings or cls.settings_type())
        freeze_base(model, injection.saved.values())
        injection.put(generator or seeded_generator())
        return injection.report()

    @classmethod
    def ensure(cls, model: nn.Module, settings: Any) -> InjectionReport:
        """Add the parameters to a model, unless it has them, and return a report on them.

        Raises:
            ValueError: As `add`, or if they were added with other settings.
        """
        present = parts_of(model, cls.part)
        if not present:
            return cls.add(model, settings)
        injection = cls(model, settings)
        if {id(part): injection.settings_of(part) for part in present} != injection.planned():
            raise ValueError(f"{type(model).__name__} has {cls.noun} already, {cls.otherwise}: {cls.remedy}.")
        return injection.report()

    @classmethod
    def names_in(cls, model: nn.Module) -> list[str]:
        """Return the names of the modules of a model that have such parameters."""
        return [name.rpartition(".")[0] for name, part in added_modules(model) if isinstance(part, cls.part)]

    def _heads(self) -> dict[str, nn.Module]:
        """Return the modules called `head`, without those that are all that a pattern of `target_modules` matches."""
        heads = self.matching("re:(^|[.])head$", self.modules)
        for pattern in as_patterns("target_modules", self.settings.target_modules):
            matched = set(self.matching(pattern.text, self.modules).values())
            meant = {name: head for name, head in heads.items() if not matched.isdisjoint(head.modules())}
            if matched <= {inner for head in meant.values() for inner in head.modules()}:
                heads = {name: head for name, head in heads.items() if name not in meant}
        return heads

    def matching(self, given: str | Sequence[str], modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
        """Return those of some modules one of whose names a pattern matches."""
        patterns = as_patterns("pattern", given)
        return {
            name: part
            for name, part in modules.items()
            if any(pattern.matches(own) for pattern in patterns for own in self.names[part])
        }

    def select(
        self,
        argument: str,
        given: str | Sequence[str],
        modules: Mapping[str, nn.Module],
        suits: Callable[[nn.Module], bool] = lambda module: True,
        what: str = "modules",
    ) -> dict[str, nn.Module]:
        """Return those of some modules that suit and that a pattern matches.

        Args:
            argument: The name of the argument with the patterns, for errors.
            given: Its value.
            modules: The modules by their first name.
            suits: Whether a module can be taken; a pattern may match others as well.
            what: The modules that suit, in words and in the plural, for errors.

        Raises:
            ValueError: If a pattern matches none that suits.
        """
        found: set[str] = set()
        for pattern in as_patterns(argument, given):
            matched = self.matching(pattern.text, modules)
            suitable = {name for name, module in matched.items() if suits(module)}
            if not suitable:
                known = [name for module in modules.values() for name in self.names[module]]
                raise ValueError(f"{argument}: {_no_match(pattern, matched, known, what)}")
            found |= suitable
        return {name: module for name, module in modules.items() if name in found}

    def trained_whole(self) -> list[str]:
        """Return the names of the modules all of whose parameters are trained."""
        whole = [part for part in self.saved.values() if all(weight.requires_grad for weight in part.parameters())]
        return [" = ".join(self.names[part]) for part in whole]


def kind_of_layer(module: nn.Module) -> str:
    """Return the name of a layer's class, or of the public one of torch that it extends within torch."""
    classes = class_below(module).__mro__
    public = (cls for cls in classes if getattr(nn, cls.__name__, None) is cls)
    own = classes[0] if not classes[0].__module__.startswith("torch.nn") else next(public)
    return own.__name__


def parts_of(model: nn.Module, kind: type[T]) -> list[T]:
    """Return the added modules of a kind, each once."""
    return [part for _, part in added_modules(model) if isinstance(part, kind)]


def parameters_of(parts: Iterable[nn.Module]) -> list[nn.Parameter]:
    """Return the parameters of several modules."""
    return [parameter for part in parts for parameter in part.parameters()]


def freeze_base(model: nn.Module, saved: Iterable[nn.Module] = ()) -> None:
    """Freeze the parameters of a model, except those of some modules and those that were added before.

    What is compiled already, as a whole or in part, is compiled anew when it is called next.
    """
    if is_compiled(model):
        torch.compiler.reset()
    trained = set(map(id, parameters_of([*saved, *(part for _, part in added_modules(model))])))
    for parameter in model.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)


def seeded_generator() -> torch.Generator:
    """Return a generator that is seeded as torch was, so that all ranks draw the same values."""
    return torch.Generator().manual_seed(torch.initial_seed())


@torch.no_grad()
def draw_(parameter: Tensor, draw: Callable[[Tensor], object]) -> None:
    """Draw values on the CPU, so that every device gets the same, and set a parameter to them."""
    if not parameter.is_meta:
        drawn = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        draw(drawn)
        parameter.copy_(drawn)


def check_selection(settings: Any) -> None:
    """Check the arguments that select modules.

    Raises:
        TypeError: If one is neither a pattern nor a list of patterns.
        ValueError: If a pattern is empty or not a regular expression, or there is none for the targets.
    """
    for name in ("target_modules", "exclude", "modules_to_save"):
        patterns = as_patterns(name, getattr(settings, name))
        if name == "target_modules" and not patterns:
            raise ValueError("target_modules must name at least one pattern, got none.")


def modules_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of a model by the first of the names that `names_of_modules` returns; the model is ""."""
    return {own[0]: part for part, own in names_of_modules(model).items()}


def _no_match(pattern: Pattern, matched: Mapping[str, nn.Module], all_modules: Sequence[str], what: str) -> str:
    if matched:
        name, module = next(iter(matched.items()))
        return (
            f"pattern {pattern.text!r} matches {len(matched)} modules, such as {name!r} ({type(module).__name__}), but "
            f"none of them are {what}."
        )
    last = [name for name in all_modules if name.rpartition(".")[2] == pattern.text]
    hint = f" Did you mean '*.{pattern.text}'?" if last else did_you_mean(pattern.text, all_modules)
    return f"pattern {pattern.text!r} matches none of the {len(all_modules)} modules.{hint}"


def check_targets(targets: Mapping[str, nn.Module]) -> None:
    """Refuse modules whose class cannot be extended.

    Raises:
        ValueError: If there is one; the message names it.
    """
    fixed = [f"{name} ({type(target).__name__})" for name, target in targets.items() if not is_extensible(target)]
    if fixed:
        raise ValueError(
            f"target_modules: the classes of {len(fixed)} layers cannot be extended, as one of their bases is "
            f"abc.ABC or has slots: {list_names(fixed)}. Leave them out by exclude, or use peft's "
            "inject_adapter_in_model."
        )


def refuse_own_forward(targets: Mapping[str, nn.Module]) -> None:
    """Refuse modules with a `forward` of their own: it would be called, and never that of the class, which is extended.

    Raises:
        ValueError: If there is one; the message names it.
    """
    own = [f"{name} ({type(target).__name__})" for name, target in targets.items() if "forward" in vars(target)]
    if own:
        raise ValueError(
            f"target_modules: what is added to {list_names(own)} would never be called, as it has its own `forward`, "
            "such as `layer.forward = torch.compile(layer.forward)`: use `layer.compile()` instead."
        )


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
