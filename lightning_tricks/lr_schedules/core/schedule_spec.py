"""The description of a learning rate schedule, for code and for YAML, which is checked when it is made; its plot."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Literal

from lightning_tricks._shared.checks import (
    check_choice,
    check_count,
    check_not_negative,
    check_number,
    check_spec,
    suggests_argument_names,
)
from lightning_tricks._shared.extras import import_extra
from lightning_tricks.lr_schedules.core import schedules

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_DURATION = re.compile(r"\s*(\d+(?:\.\d+)?)\s*(step|epoch)s?\s*")
_DEFAULT_WARMUPS = {"warmup_cosine": 0.03, "warmup_linear": 0.03, "wsd": 0.03, "inverse_sqrt": 0.03, "one_cycle": 0.3}
_REQUIRED = object()
# The fields that each kind has beside the common ones, and their values in place of None
_FIELDS_OF_KIND: dict[str, dict[str, Any]] = {
    "warmup_cosine": {"end_factor": 0.0},
    "warmup_linear": {"end_factor": 0.0},
    "wsd": {"decay": 0.2, "end_factor": 0.0},
    "inverse_sqrt": {},
    "one_cycle": {"start_factor": 1 / 25, "end_factor": 1 / 250_000},
    "polynomial": {"power": 1.0, "end_factor": 0.0},
    "multistep": {"milestones": _REQUIRED, "gamma": 0.1},
    "step": {"step_size": _REQUIRED, "gamma": 0.1},
    "exponential": {"gamma": _REQUIRED},
    "constant": {},
}
_COMMON_FIELDS = ("warmup", "total", "interval")
_HINTS = {"exponential": ", such as 0.999 for steps or 0.95 for epochs"}
_KINDS_WITH_END = ("warmup_cosine", "warmup_linear", "wsd", "one_cycle", "polynomial")

Factor = Callable[[float], float]


class RunTooShortError(ValueError):
    """A schedule that a longer run would hold."""


@suggests_argument_names()
@dataclass(frozen=True)
class ScheduleSpec:
    """A learning rate schedule, with durations in steps, epochs or fractions of the run.

    A duration is a whole number (of `interval`s), a fraction below 1 of the whole run, or a string such as "500 steps"
    or "2 epochs". An argument that a kind does not use stays None.

    Args:
        kind: warmup_cosine, warmup_linear, wsd (warm-up, stable, decay), inverse_sqrt, one_cycle, polynomial,
            multistep, step, exponential or constant.
        warmup: Duration of the linear warm-up, which starts above 0. None means 0.03 of the run for warmup_cosine,
            warmup_linear, wsd and inverse_sqrt, 0.3 for one_cycle, and no warm-up for the other kinds.
        total: Length of the schedule, in the same units but not as a fraction; None means the length of the run.
        milestones: For multistep: increasing durations at which the rate is multiplied by `gamma`.
        gamma: For multistep and step (None means 0.1) and for exponential (required).
        interval: When the learning rate changes, and the unit of whole numbers: "step" or "epoch".
        step_size: For step: duration between two multiplications by `gamma`.
        power: For polynomial: the exponent, > 0; None means 1.
        decay: For wsd: duration of the decay at the end; None means 0.2.
        start_factor: For one_cycle: factor at the first step, in (0, 1]; None means 1/25.
        end_factor: For the kinds that decay until the end: the factor there, in [0, 1]; None means 0, and 1/250,000
            for one_cycle.
        rest: The schedule of the optimizer's `rest`, with the same `interval`; None for the same schedule. `bind`,
            `factors` and `plot_schedule` are about this schedule alone.

    Raises:
        TypeError: If a value is of the wrong type.
        ValueError: If a name is unknown, a value out of range, missing, or one that the kind does not take.

    Examples:
        >>> ScheduleSpec("multistep", milestones=[100, 140, 240], interval="epoch").gamma
        0.1
    """

    kind: str = "warmup_cosine"
    warmup: float | str | None = None
    total: int | str | None = None
    milestones: Sequence[float | str] | None = None
    gamma: float | None = None
    interval: Literal["step", "epoch"] = "step"
    step_size: float | str | None = None
    power: float | None = None
    decay: float | str | None = None
    start_factor: float | None = None
    end_factor: float | None = None
    rest: ScheduleSpec | None = None

    def __post_init__(self) -> None:
        check_choice("ScheduleSpec.kind", self.kind, _FIELDS_OF_KIND)
        check_choice("interval", self.interval, ("step", "epoch"))
        self._set_defaults({"warmup": _DEFAULT_WARMUPS.get(self.kind, 0.0), **_FIELDS_OF_KIND[self.kind]})
        for name, most in (("gamma", math.inf), ("power", math.inf), ("start_factor", 1)):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), above=0, at_most=most)
        if self.end_factor is not None and check_not_negative("end_factor", self.end_factor) > 1:
            raise ValueError(f"end_factor must be in [0, 1], got {self.end_factor!r}.")
        for name in ("warmup", "total", "step_size", "decay"):
            value = getattr(self, name)
            if value is not None:
                _check_duration(name, value, zero=name == "warmup", fraction=name != "total")
        if isinstance(self.milestones, str):
            raise TypeError(f"milestones must be a list of durations, got the string {self.milestones!r}.")
        if self.milestones is not None:
            object.__setattr__(self, "milestones", tuple(self.milestones))
        for milestone in self.milestones or ():
            _check_duration("milestones", milestone)
        if not any(isinstance(milestone, str) for milestone in self.milestones or ()):
            _check_increasing(self.milestones or ())
        object.__setattr__(self, "rest", check_spec("rest", self.rest, ScheduleSpec))
        if self.rest is not None and self.rest.interval != self.interval:
            raise ValueError(f"rest must have interval={self.interval!r} as well, got {self.rest.interval!r}.")

    @property
    def chain(self) -> list[ScheduleSpec]:
        """This schedule, its `rest`, the `rest` of that, and so on."""
        return [self, *(self.rest.chain if self.rest is not None else ())]

    @property
    def needs_total(self) -> bool:
        """Whether the schedule depends on the length of the run."""
        durations = [self.warmup, self.step_size, *(self.milestones or ())]
        return self.kind in _KINDS_WITH_END or any(isinstance(d, float | int) and 0 < d < 1 for d in durations)

    def bind(self, total: float | None, steps_after: Callable[[float], float] | None = None) -> Factor:
        """Convert durations into counts, and return the factor as a function of the completed `interval`s.

        Args:
            total: The length of the run, in `interval`s, for a spec without its own `total`; None if unknown.
            steps_after: Epochs -> optimizer steps completed by then; needed if the units are mixed.

        Raises:
            RunTooShortError: If the warm-up (and wsd's decay) is longer than the schedule, or a step of it shorter than
                one `interval`.
            ValueError: If a required length is unknown, or no run is long enough.
        """
        if self.total is not None:
            total = self._to_intervals("total", self.total, None, steps_after)
        if total is None and self.needs_total:
            raise ValueError(f'kind="{self.kind}" needs the length of the run: give ScheduleSpec(total=...).')

        def count(name: str) -> float:
            return self._to_intervals(name, getattr(self, name), total, steps_after)

        warmup, until = count("warmup"), math.inf if total is None else total
        decay = count("decay") if self.kind == "wsd" else 0
        if warmup + decay > until:
            shares = all(isinstance(d, float) for d in (self.warmup, *[self.decay] * (self.kind == "wsd")))
            raise (ValueError if shares else RunTooShortError)(
                f"warmup={self.warmup!r}{f' and decay={self.decay!r}' if self.kind == 'wsd' else ''} "
                f"are longer than the schedule: {warmup + decay:g} > {until:g} {self.interval}s."
            )
        step_size = count("step_size") if self.step_size else None
        if step_size == 0:
            raise RunTooShortError(f"step_size={self.step_size!r} is less than one {self.interval} of {until:g}.")
        milestones = [self._to_intervals("milestones", m, total, steps_after) for m in self.milestones or ()]
        _check_increasing(milestones)
        fall = {"total": until, "warmup": warmup, "end_factor": self.end_factor}
        arguments: dict[str, dict[str, Any]] = {
            "warmup_cosine": fall,
            "warmup_linear": fall,
            "wsd": {**fall, "decay": decay},
            "inverse_sqrt": {"warmup": warmup, "total": until},
            "one_cycle": {**fall, "start_factor": self.start_factor},
            "polynomial": {**fall, "power": self.power},
            "multistep": {"milestones": milestones, "gamma": self.gamma},
            "step": {"step_size": step_size, "gamma": self.gamma, "total": until},
            "exponential": {"gamma": self.gamma, "total": until},
            "constant": {},
        }
        factor: Factor = partial(getattr(schedules, self.kind), **arguments[self.kind])
        return factor if "warmup" in arguments[self.kind] or not warmup else partial(_with_warmup, factor, warmup)

    def factors(self, total_steps: int, steps_per_epoch: int | None = None) -> list[float]:
        """List the factor at each step of a run.

        Args:
            total_steps: Optimizer steps of the run, at least 1.
            steps_per_epoch: Optimizer steps of an epoch, for a spec that counts in epochs.

        Returns:
            `total_steps` + 1 factors: before the first step, ..., after the last.

        Raises:
            ValueError: If the spec does not fit into the run, or needs `steps_per_epoch`.

        Examples:
            >>> ScheduleSpec("warmup_linear", warmup="1 step").factors(4)
            [0.5, 1.0, 0.6666666666666667, 0.33333333333333337, 0.0]
        """
        check_count("total_steps", total_steps)
        steps_after = None
        if steps_per_epoch is not None:
            steps_after = partial(operator.mul, check_count("steps_per_epoch", steps_per_epoch))
        if self.interval == "step":
            factor = self.bind(total_steps, steps_after)
            return [factor(step) for step in range(total_steps + 1)]
        if steps_per_epoch is None:
            raise ValueError('interval="epoch" needs the steps of an epoch (steps_per_epoch).')
        factor = self.bind(math.ceil(total_steps / steps_per_epoch), steps_after)
        return [factor(step // steps_per_epoch) for step in range(total_steps + 1)]

    def _set_defaults(self, options: dict[str, Any]) -> None:
        """Put the kind's own values in the place of None, and refuse what it does not take."""
        takes = [*_COMMON_FIELDS, *(name for name in options if name not in _COMMON_FIELDS)]
        for part in fields(self):
            value = getattr(self, part.name)
            if value is not None and part.name not in ("kind", "rest", *takes):
                raise ValueError(f'kind="{self.kind}" has no {part.name}, got {value!r}: it takes {", ".join(takes)}.')
            if value is None and options.get(part.name) is _REQUIRED:
                raise ValueError(f'kind="{self.kind}" needs {part.name}{_HINTS.get(self.kind, "")}.')
            if value is None and part.name in options:
                object.__setattr__(self, part.name, options[part.name])

    def _to_intervals(
        self, name: str, duration: Any, total: float | None, steps_after: Callable[[float], float] | None
    ) -> float:
        """Return a duration in `interval`s."""
        if not isinstance(duration, str):
            if not 0 < duration < 1:
                return float(duration)
            if total is None:
                raise ValueError(
                    f"{name}={duration!r} is a fraction of a run whose length is unknown: give it in {self.interval}s."
                )
            share = duration * total
            return float(share if self.kind == "one_cycle" else round(share))  # torch's own cycle does not round
        amount, unit = _parse_duration(name, duration)
        if unit == self.interval:
            return amount
        if steps_after is None:
            raise ValueError(
                f"{name}={duration!r} with interval={self.interval!r} needs the steps of an epoch (steps_per_epoch)."
            )
        per_epoch = steps_after(1)
        if per_epoch == math.inf:
            raise ValueError(f"{name}={duration!r}: the training data has no length, count in {self.interval}s.")
        return steps_after(amount) if unit == "epoch" else amount / max(per_epoch, 1)


def _with_warmup(factor: Factor, warmup: float, step: float) -> float:
    return factor(step) * schedules.ramp(step, warmup)


def _check_increasing(milestones: Sequence[Any]) -> None:
    if any(later <= earlier for earlier, later in pairwise(milestones)):
        raise ValueError(f"milestones must increase, got {list(milestones)!r}.")


def _check_duration(name: str, value: object, *, zero: bool = False, fraction: bool = True) -> None:
    """Check a duration.

    Args:
        name: Name of the argument, for the error.
        value: A number, or a text such as "2 epochs".
        zero: Whether it may be 0.
        fraction: Whether it may be a share of the run.

    Raises:
        TypeError: If it is neither a number nor a text.
        ValueError: If it is out of range.
    """
    whole = "a whole number or a fraction" if fraction else "a whole number"
    must = f'{name} must be {whole} > 0, or a string such as "500 steps" or "2 epochs"'
    if isinstance(value, str):
        amount = _parse_duration(name, value)[0]
    elif isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{must}, got {value!r} ({type(value).__name__}).")
    else:
        amount = value
        if (value < 1 and value != 0 and not fraction) or (value > 1 and value % 1):
            raise ValueError(f"{must}, got {value!r}.")
    if not 0 <= amount < math.inf or (amount == 0 and not zero):
        raise ValueError(f"{must}, got {value!r}.")


def _parse_duration(name: str, duration: str) -> tuple[float, str]:
    """Return the amount and the unit, "step" or "epoch", of a duration such as "500 steps".

    Raises:
        ValueError: If the text is not a duration.
    """
    match = _DURATION.fullmatch(duration)
    if match is None:
        raise ValueError(f'{name} must be a number or a string such as "500 steps" or "2 epochs", got {duration!r}.')
    return float(match[1]), match[2]


def plot_schedule(
    spec: ScheduleSpec,
    total_steps: int,
    *,
    lr: float = 1.0,
    steps_per_epoch: int | None = None,
    ax: Axes | None = None,
    label: str | None = None,
) -> Axes:
    """Draw the learning rate of a run; needs matplotlib, the extra `reports`.

    Args:
        spec: The schedule.
        total_steps: Optimizer steps of the run, at least 1.
        lr: The base learning rate.
        steps_per_epoch: Optimizer steps of an epoch, for a spec that counts in epochs.
        ax: Axes to draw on; None makes a figure.
        label: Name of the line, `spec.kind` by default.

    Returns:
        The axes; `plot_schedule(...).figure.savefig(path)` writes the picture.

    Raises:
        ImportError: If matplotlib is missing, with the extra to install.
        ValueError: If the spec does not fit into the run.

    Examples:
        >>> plot_schedule(ScheduleSpec("wsd"), 1000).get_xlabel()
        'optimizer steps'
    """
    figure = import_extra("matplotlib.figure", "reports", "plot_schedule needs matplotlib")
    rates = [lr * factor for factor in spec.factors(total_steps, steps_per_epoch)]
    if ax is None:
        ax = figure.Figure(figsize=(7, 3), layout="constrained").subplots()
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.3)
        ax.margins(x=0)
    if not ax.get_xlabel():
        ax.set(xlabel="optimizer steps", ylabel="learning rate" if lr != 1 else "factor of the learning rate")
    ax.step(range(len(rates)), rates, where="post", label=label or spec.kind)
    ax.set_ylim(bottom=0)
    return ax
