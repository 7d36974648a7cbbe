"""What the host waited for: each read of a value and each copy between devices, with the line that made it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

import torch

import lightning_tricks

Kind = Literal["read", "to host", "to device", "synchronize"]

_PACKAGE = f"{Path(lightning_tricks.__file__).parent}/"
_UNSEEN = (
    f"{Path(torch.__file__).parent}/",
    *(f"{Path(__file__).parent}/{name}.py" for name in ("device", "stubs", "waits")),
    "<",
)
_FRAMES = ("/contextlib.py", "/functools.py", "/copy.py", "/pickle.py")


@dataclass(frozen=True)
class Wait:
    """One read or copy.

    Attributes:
        kind: A value that is read by Python ("read"), a copy, or a call that waits for all that was queued.
        what: The operator or method.
        blocks: Whether the host waits until the device is done.
        line: The innermost line outside of torch, as "file:number".
        hook: The outermost function of the package on the stack, or "" where there is none.
        moment: What the test was doing, as it named it.
    """

    kind: Kind
    what: str
    blocks: bool
    line: str
    hook: str
    moment: str


class Waits(list[Wait]):
    moment = ""
    sync_debug_mode = "default"

    def __init__(self, arrive: Callable[[], None]) -> None:
        super().__init__()
        self._arrive = arrive

    def note(self, kind: Kind, what: str, *, blocks: bool = True) -> None:
        """Add one; if it blocks, all copies that were on their way to the host have arrived."""
        line, hook = _place()
        self.append(Wait(kind, what, blocks, line, hook, self.moment))
        if blocks:
            self._arrive()
            if self.sync_debug_mode == "error":
                raise RuntimeError(f"called a synchronizing CUDA operation ({what})")


def by_hook(waits: Iterable[Wait]) -> dict[str, int]:
    return dict(Counter(wait.hook for wait in waits))


def _place() -> tuple[str, str]:
    line, hook = "", ""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        file = frame.f_code.co_filename
        if not line and not file.startswith(_UNSEEN) and not file.endswith(_FRAMES):
            line = f"{file}:{frame.f_lineno}"
        if file.startswith(_PACKAGE):
            hook = frame.f_code.co_name
        frame = frame.f_back
    return line, hook
