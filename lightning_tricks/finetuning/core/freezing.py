"""Freezing and unfreezing of parameters by pattern or by a schedule, and of the normalisation that they belong to."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks._shared.checks import check_count, did_you_mean
from lightning_tricks._shared.modules import names_of_parameters
from lightning_tricks._shared.patterns import Pattern, as_patterns
from lightning_tricks._shared.text import counted, list_names
from lightning_tricks._torch_compat.modules import has_forward_pre_hook, remove_forward_pre_hook


@dataclass(frozen=True)
class ParameterCount:
    """A number of parameter tensors and of the values in them; those that are tied count once.

    Attributes:
        tensors: The number of tensors.
        values: The number of values; parameters that are not initialized have none yet.
    """

    tensors: int
    values: int

    @classmethod
    def of(cls, parameters: Iterable[Tensor]) -> ParameterCount:
        """Count parameters."""
        sizes = [0 if is_lazy(parameter) else parameter.numel() for parameter in dict.fromkeys(parameters)]
        return cls(len(sizes), sum(sizes))

    def __str__(self) -> str:
        return f"{self.values:,} values in {counted(self.tensors, 'tensor')}"


@dataclass(frozen=True)
class TrainableSummary:
    """How much of a model trains. Printed, it is one line, and one for each child.

    Attributes:
        trainable: The parameters that require a gradient.
        total: All parameters.
        children: Name of a child -> its own summary; parameters of the model itself have the name "".
    """

    trainable: ParameterCount
    total: ParameterCount
    children: dict[str, TrainableSummary]

    def __str__(self) -> str:
        share = 100 * self.trainable.values / max(1, self.total.values)
        line = (
            f"trainable: {self.trainable.values:,} of {self.total.values:,} values ({share:.2f} %) "
            f"in {self.trainable.tensors:,} of {self.total.tensors:,} tensors"
        )
        return "\n".join([line, *(f"  {name or '(itself)'}: {child}" for name, child in self.children.items())])


def freeze_(module: nn.Module, *patterns: str, norm: bool = True) -> ParameterCount:
    """Freeze the parameters with names that match one of the patterns, and clear their gradients.

    An optimizer does not change a parameter without a gradient, whatever its momentum and weight decay.

    Args:
        module: The module.
        patterns: Globs over qualified names (`backbone.*`) or, with the prefix `re:`, regular expressions. None means
            all parameters.
        norm: Whether normalization with running statistics, such as BatchNorm, stays in evaluation mode, with its
            statistics unchanged, while its parameters are frozen, even after `train()`, until `unfreeze_`. Convert to
            SyncBatchNorm before, as this makes new modules.

    Returns:
        The number of parameters that match; a tied parameter matches by any of its names and counts once.

    Raises:
        ValueError: If a pattern matches no parameter.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
        >>> print(freeze_(model, "0.*", "1.*"))
        15 values in 4 tensors
        >>> model.train()[1].weight.requires_grad
        False
    """
    matched = match_parameters(module, patterns or ("*",))
    for parameter in matched:
        parameter.requires_grad_(False)
        parameter.grad = None
    if norm:
        hold_norms_(module, frozen_norms(module))
    return ParameterCount.of(matched)


def unfreeze_(module: nn.Module, *patterns: str) -> ParameterCount:
    """Unfreeze the parameters with names that match one of the patterns, and the normalization that `freeze_` froze.

    Args:
        module: The module.
        patterns: As in `freeze_`.

    Returns:
        The number of parameters that match, without those that hold whole numbers, which cannot be trained.

    Raises:
        ValueError: If a pattern matches no parameter.

    Examples:
        >>> model = nn.Linear(2, 3).requires_grad_(False)
        >>> unfreeze_(model, "bias")
        ParameterCount(tensors=1, values=3)
    """
    matched = [parameter for parameter in match_parameters(module, patterns or ("*",)) if can_train(parameter)]
    for parameter in matched:
        parameter.requires_grad_(True)
    release_norms_(module, set(held_norms(module)) - set(frozen_norms(module)))
    return ParameterCount.of(matched)


def trainable_summary(model: nn.Module) -> TrainableSummary:
    """Count the trainable parameters of a model, in total and for each child.

    Args:
        model: The model. Parameters that children share count in each of them, and once in the total.

    Returns:
        The counts.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 3).requires_grad_(False), nn.Linear(3, 1))
        >>> print(trainable_summary(model))
        trainable: 4 of 13 values (30.77 %) in 2 of 4 tensors
          0: trainable: 0 of 9 values (0.00 %) in 0 of 2 tensors
          1: trainable: 4 of 4 values (100.00 %) in 2 of 2 tensors
    """
    parts = {"": list(model.parameters(recurse=False))}
    parts |= {name: list(child.parameters()) for name, child in model.named_children()}
    children = {name: _summary(parameters) for name, parameters in parts.items() if parameters}
    return _summary(model.parameters(), children)


def _summary(parameters: Iterable[Tensor], children: dict[str, TrainableSummary] | None = None) -> TrainableSummary:
    parameters = list(parameters)
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    return TrainableSummary(ParameterCount.of(trainable), ParameterCount.of(parameters), children or {})


def can_train(parameter: Tensor) -> bool:
    """Whether a parameter can require a gradient: quantized ones, which hold whole numbers, cannot."""
    return parameter.is_floating_point() or parameter.is_complex()


def match_parameters(module: nn.Module, patterns: Iterable[str]) -> list[nn.Parameter]:
    """Return the parameters, each once, of which a name matches one of the patterns.

    Raises:
        ValueError: If a pattern matches no parameter.
    """
    names = names_of_parameters(module)
    matched: dict[nn.Parameter, None] = {}
    for text in patterns:
        matched |= dict.fromkeys(match_pattern(text, names))
    return [parameter for parameter in names if parameter in matched]


def match_pattern(text: str, names: dict[nn.Parameter, list[str]], argument: str = "pattern") -> list[nn.Parameter]:
    """Return the parameters that a pattern matches by one of their names.

    Args:
        text: The pattern.
        names: The result of `names_of_parameters`.
        argument: What the pattern belongs to, for the error message.

    Raises:
        ValueError: If it matches none; the message suggests a similar one.
    """
    pattern = Pattern(text)
    matched = [parameter for parameter, own in names.items() if any(map(pattern.matches, own))]
    if not matched:
        known = [name for own in names.values() for name in own]
        parts = dict.fromkeys(f"{name[: dot.start()]}.*" for name in known for dot in re.finditer("[.]", name))
        raise ValueError(
            f"{argument} {text!r} matches none of the {len(names):,} parameters of the model."
            f"{did_you_mean(text, [*parts, *known])}"
        )
    return matched


def _requires_grad(parameter: Tensor) -> bool:
    return parameter.requires_grad


def frozen_norms(model: nn.Module, trains: Callable[[nn.Parameter], bool] = _requires_grad) -> list[str]:
    """Return the names of the normalisation with running statistics whose parameters are frozen.

    These are the modules with a buffer `running_mean` or `running_var`: BatchNorm and SyncBatchNorm of torch and timm,
    InstanceNorm with `track_running_stats`, and others of their kind. One is frozen if its own parameters are; without
    any, if all parameters of the nearest module around it that has some are.

    Args:
        model: The model.
        trains: Whether a parameter trains.
    """
    return [name for name, module, around in _norms(model) if _is_frozen(module, around, trains)]


def hold_norms_(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Keep normalisation in evaluation mode, so that `train()` does not wake it, until `release_norms_`.

    Args:
        model: The model. A hook on each such module is all that is changed beside the modes, and copies have it too.
        names: Their qualified names.

    Returns:
        The names of those that were not held before.
    """
    chosen = set(names)
    new = [(n, m) for n, m, _ in _norms(model) if n in chosen and not has_forward_pre_hook(m, _stay_in_eval_mode)]
    for _, module in new:
        module.register_forward_pre_hook(_stay_in_eval_mode)
        module.eval()
    return [name for name, _ in new]


def release_norms_(model: nn.Module, names: Iterable[str]) -> None:
    """Release normalisation, which takes on the mode of the module around it.

    Args:
        model: The model.
        names: Their qualified names.
    """
    chosen = set(names)
    for name, module, around in _norms(model):
        if name in chosen:
            remove_forward_pre_hook(module, _stay_in_eval_mode)
            module.train(around[-1].training if around else True)


def held_norms(model: nn.Module) -> list[str]:
    """Return the names of the normalisation that is held."""
    return [name for name, module, _ in _norms(model) if has_forward_pre_hook(module, _stay_in_eval_mode)]


def norm_modes(model: nn.Module) -> dict[str, bool]:
    """Return the names of the normalisation whose mode is not that of the module around it, with its mode."""
    return {n: m.training for n, m, around in _norms(model) if around and m.training != around[-1].training}


def set_norm_modes_(model: nn.Module, modes: dict[str, bool]) -> None:
    """Set the modes of normalisation, given by name."""
    for name, module, _ in _norms(model):
        if name in modes:
            module.train(modes[name])


def _stay_in_eval_mode(module: nn.Module, inputs: Any) -> None:
    if module.training:  # set only if needed: compiled code depends on it
        module.eval()


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[nn.Module]]]:
    """Yield the modules with running statistics: name, module and those around it, the nearest last."""
    by_name = dict(model.named_modules())
    for name, module in by_name.items():
        if any(key in ("running_mean", "running_var") for key, _ in module.named_buffers(recurse=False)):
            parts = name.split(".") if name else []
            around = [by_name.get(".".join(parts[:depth])) for depth in range(len(parts))]
            yield name, module, [module for module in around if module is not None]


def _is_frozen(module: nn.Module, around: list[nn.Module], trains: Callable[[nn.Parameter], bool]) -> bool:
    own = list(module.parameters(recurse=False))
    if not own:
        own = next((found for outer in reversed(around) if (found := list(outer.parameters()))), [])
    return bool(own) and not any(map(trains, own))


def check_schedule(schedule: object) -> dict[int, tuple[str, ...]]:
    """Return a schedule with its keys as whole numbers in order, and its patterns as tuples.

    Args:
        schedule: Epoch or step -> a pattern or a list of patterns. A key may be a string of digits, as JSON has it.

    Raises:
        TypeError: If the schedule, a key or a pattern is of the wrong type.
        ValueError: If a key is negative or given twice, there is no key 0, or patterns are missing or malformed.

    Examples:
        >>> check_schedule({"5": ["layer4.*", "layer3.*"], 0: "head.*"})
        {0: ('head.*',), 5: ('layer4.*', 'layer3.*')}
    """
    if not isinstance(schedule, Mapping):
        raise TypeError(f"schedule must be a dict of patterns, got {schedule!r} ({type(schedule).__name__}).")
    checked: dict[int, tuple[str, ...]] = {}
    for key, patterns in schedule.items():
        number = int(key) if isinstance(key, str) and key.isdecimal() else key
        check_count("a key of schedule", number, minimum=0)
        if number in checked:
            raise ValueError(f"schedule has the key {number} twice: as a number and as a string.")
        checked[number] = tuple(pattern.text for pattern in as_patterns(f"schedule[{key!r}]", patterns))
        if not checked[number]:
            raise ValueError(f"schedule[{key!r}] must have at least one pattern, got {patterns!r}.")
    if 0 not in checked:
        raise ValueError(
            f"schedule must have the key 0, got {sorted(checked)}: something has to train from the start, because a "
            "loss without trainable parameters has no gradient."
        )
    return dict(sorted(checked.items()))


def check_multipliers(lr_multipliers: object) -> dict[str, float]:
    """Return the multipliers, or raise an error if they are not patterns with finite numbers > 0."""
    if lr_multipliers is None:
        return {}
    if not isinstance(lr_multipliers, Mapping):
        raise TypeError(f"lr_multipliers must be a dict of pattern -> number, got {lr_multipliers!r}.")
    as_patterns("a pattern of lr_multipliers", list(lr_multipliers))
    for pattern, value in lr_multipliers.items():
        argument = f"lr_multipliers[{pattern!r}]"
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{argument} must be a finite number > 0, got {value!r} ({type(value).__name__}).")
        if not 0 < value < math.inf:
            raise ValueError(f"{argument} must be a finite number > 0, got {value!r}.")
    return {pattern: float(value) for pattern, value in lr_multipliers.items()}


@dataclass(frozen=True)
class UnfreezingPlan:
    """When each parameter of a model starts to train. Parameters are told apart by identity, never by their values.

    Attributes:
        names: Each parameter that can train -> its first qualified name.
        starts: Parameter -> the key at which it starts to train; without those that never do.
        overlaps: Key -> the number of tensors that its patterns match and an earlier key releases.
    """

    names: dict[nn.Parameter, str]
    starts: dict[nn.Parameter, int]
    overlaps: dict[int, int]

    @cached_property
    def keys(self) -> list[int]:
        """The keys in order."""
        return sorted(set(self.starts.values()))

    def key_at(self, position: int) -> int:
        """Return the last key that is not after an epoch or step."""
        return max(key for key in self.keys if key <= position)

    def trains(self, parameter: nn.Parameter, key: int) -> bool:
        """Whether a parameter trains from a key on."""
        return parameter in self.starts and self.starts[parameter] <= key

    def released_at(self, key: int) -> list[nn.Parameter]:
        """Return the parameters that start to train at a key."""
        return [parameter for parameter, start in self.starts.items() if start == key]

    def released_after(self, key: int) -> list[nn.Parameter]:
        """Return the parameters that start to train after a key."""
        return [parameter for parameter, start in self.starts.items() if start > key]

    def lines(self, schedule: Mapping[int, Sequence[str]], unit: str) -> Iterator[str]:
        """Yield a line of text for each key: how many parameters train from then on."""
        for key in self.keys:
            released = self.released_at(key)
            line = f"from {unit} {key}: {ParameterCount.of(released)} ({list_names(schedule[key])})"
            if key in self.overlaps:
                line += f", {self.overlaps[key]:,} more that match train already"
            was_frozen = [self.names[parameter] for parameter in released if not parameter.requires_grad]
            if was_frozen:
                line += f", requires_grad was False before the fit in {len(was_frozen):,} of them"
            yield line
        never = [parameter for parameter in self.names if parameter not in self.starts]
        if never:
            yield f"never, as no pattern matches: {ParameterCount.of(never)}"


def plan_unfreezing(module: nn.Module, schedule: Mapping[int, Sequence[str]]) -> UnfreezingPlan:
    """Find at which key of a schedule each parameter of a module starts to train: the earliest that matches it.

    Args:
        module: The module. Of a tied parameter, any name may match.
        schedule: The result of `check_schedule`.

    Returns:
        The plan.

    Raises:
        ValueError: If a pattern matches nothing, or a key releases nothing new.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        >>> plan = plan_unfreezing(model, {0: ["1.*"], 4: ["*"]})
        >>> [plan.names[parameter] for parameter in plan.released_at(4)]
        ['0.weight', '0.bias']
    """
    names = names_of_parameters(module)
    starts: dict[nn.Parameter, int] = {}
    overlaps: dict[int, int] = {}
    for key, patterns in schedule.items():
        matched: dict[nn.Parameter, None] = {}
        for pattern in patterns:
            matched |= dict.fromkeys(match_pattern(pattern, names, f"schedule[{key}]: the pattern"))
        earlier = [parameter for parameter in matched if parameter in starts]
        released = [parameter for parameter in matched if parameter not in starts and can_train(parameter)]
        if not released:
            since = list_names(map(str, sorted({starts[parameter] for parameter in earlier})))
            reason = f"all of it is released earlier, at {since}" if earlier else "it holds no floating-point numbers"
            raise ValueError(f"schedule[{key}] = {list(patterns)} releases nothing: {reason}. Remove it.")
        starts |= dict.fromkeys(released, key)
        if earlier:
            overlaps[key] = len(earlier)
    return UnfreezingPlan({weight: own[0] for weight, own in names.items() if can_train(weight)}, starts, overlaps)


def multipliers_of(module: nn.Module, lr_multipliers: Mapping[str, float]) -> dict[Tensor, float]:
    """Return the multiplier of each parameter that a pattern matches.

    Raises:
        ValueError: If a pattern matches nothing, or two match one parameter.
    """
    names = names_of_parameters(module)
    chosen: dict[Tensor, str] = {}
    for pattern in lr_multipliers:
        for parameter in match_pattern(pattern, names, "lr_multipliers: the pattern"):
            if parameter in chosen:
                raise ValueError(
                    f"lr_multipliers: the patterns {chosen[parameter]!r} and {pattern!r} both match "
                    f"{names[parameter][0]!r}. Write them so that one does."
                )
            chosen[parameter] = pattern
    return {parameter: lr_multipliers[pattern] for parameter, pattern in chosen.items()}
