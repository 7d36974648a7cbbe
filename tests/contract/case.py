"""What a callback promises: one Case each, in `tests/<room>/contract.py`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from uuid import uuid4

from lightning.pytorch import Callback

from tests.contract.lab import SETTINGS, Lab, Setting


@dataclass(frozen=True, kw_only=True)
class Case:
    """The promises of one callback.

    Attributes:
        callback: The class.
        arguments: An active configuration; the values given differ from the defaults.
        kind: "observer" only looks; "changer" changes what training does; "structural" changes the model itself.
        neutral: The arguments at which it is as good as absent, or None.
        why_no_neutral: The reason, where there are none.
        of_one_fit: Attributes that describe how a fit began, so that a resumed fit has its own.
        state_of_one_fit: Entries of its state that no two fits have in common.
        instances: How many make sense in one Trainer; a second one is refused where it is 1.
        second: What a second one is given that makes sense beside `arguments`, where the defaults alone do not.
        writes_to: The argument that names a place of the fit's own, where there is one.
        opens_addresses: Those of its `path_arguments` that may be an address, which fsspec opens.
        starts_equal: Whether the module computes the same with it as without it before it is trained.
        net: Arguments of `Net` with which it has what the callback changes.
        when_idle: Arguments that leave out what it does seldom and reads values for, such as saving.
        looks_between_epochs: Whether it reads values on the CPU where an epoch begins, and none in its steps.
        waits: Hook -> how often the host waits in it, in two epochs on a device that is emulated; none waits in a
            training batch after the first.
        verify: Fits in a setting and asserts that the trick did its work there.
        refuses: Setting -> words of the refusal.
    """

    callback: type[Callback]
    arguments: Mapping[str, Any]
    kind: Literal["observer", "changer", "structural"]
    neutral: Mapping[str, Any] | None
    why_no_neutral: str = ""
    of_one_fit: tuple[str, ...] = ()
    state_of_one_fit: tuple[str, ...] = ()
    instances: Literal[1, "n"]
    second: Mapping[str, Any] = field(default_factory=dict)
    writes_to: str | None = None
    opens_addresses: tuple[str, ...] = ()
    starts_equal: bool = True
    net: Mapping[str, Any] = field(default_factory=dict)
    when_idle: Mapping[str, Any] = field(default_factory=dict)
    looks_between_epochs: bool = False
    waits: Mapping[str, int] = field(default_factory=dict)
    verify: Callable[[Lab, Setting], None]
    refuses: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        assert self.refuses.keys() <= SETTINGS.keys(), "a setting's name is misspelt"
        assert (self.neutral is None) == bool(self.why_no_neutral), "a neutral setting, or the reason why there is none"

    def make(self, **changed: Any) -> Callback:
        own = {self.writes_to: f"{self.arguments[self.writes_to]}/{uuid4().hex}"} if self.writes_to else {}
        return self.callback(**{**self.arguments, **own, **changed})

    def requires(self, argument: str) -> bool:
        return inspect.signature(self.callback).parameters[argument].default is inspect.Parameter.empty

    def make_idle(self) -> Callback:
        return self.make(**self.when_idle)

    def make_neutral(self) -> Callback | None:
        return None if self.neutral is None else self.callback(**self.neutral)
