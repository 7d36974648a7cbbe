"""Which parameters start to train when: a pure function of a schedule and of a model's parameters."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor, nn

from lightning_tricks._shared.checks import check_count
from lightning_tricks._shared.modules import names_of_parameters
from lightning_tricks._shared.patterns import as_patterns
from lightning_tricks._shared.text import list_names
from lightning_tricks.finetuning.core.freezing import ParameterCount, can_train, match_pattern


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
                line += f", {self.overlaps[key]:,} more that match train since earlier"
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
