"""What a process has selected, and what it holds for it until it ends."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lightning_tricks.devices.core.cuda_state import uuids_seen_by_cuda
from lightning_tricks.devices.core.gpu import Gpu
from lightning_tricks.devices.core.lock_files import unlock
from lightning_tricks.devices.core.selection_ranks import CPU
from lightning_tricks.devices.core.selection_ranks import VARIABLE as SELECTED_VARIABLE
from lightning_tricks.devices.core.visible_devices import VARIABLE as VISIBLE_VARIABLE


class NoGpuAvailableError(RuntimeError):
    """Not enough GPUs qualify; the message says of each one why.

    Attributes:
        final: Whether waiting would not help.
    """

    def __init__(self, message: str, final: bool = False) -> None:
        super().__init__(message)
        self.final = final


@dataclass(frozen=True, eq=False)
class Selection:
    """What `select_gpus` has selected, for `Trainer(accelerator=selection.accelerator, devices=selection.devices)`.

    The GPUs stay selected until this process ends, or `release` is called, or a `with` statement on this object ends.

    Attributes:
        accelerator: "cuda" or "cpu".
        devices: CUDA's indices in this process, ascending; 1 on the CPU.
        gpus: The state of the GPUs when they were selected, in the same order.
        cuda_visible_devices: What CUDA_VISIBLE_DEVICES has to be for another program that is to use them: UUIDs
            (indices in the order of the PCI bus where a driver tells none), or "-1" on the CPU.
    """

    accelerator: Literal["cuda", "cpu"]
    devices: list[int] | int
    gpus: tuple[Gpu, ...] = ()
    cuda_visible_devices: str = "-1"

    def release(self) -> None:
        """Let other processes select the GPUs; this does nothing after a later call of `select_gpus`."""
        if state.selection is self:
            state.release()

    def __enter__(self) -> Selection:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        names = ", ".join(f"GPU {gpu.index} ({gpu.name})" for gpu in self.gpus)
        return f"Selection(accelerator={self.accelerator!r}, devices={self.devices!r}{names and f': {names}'})"


class _State:
    """The selection of this process: it has one at a time.

    Attributes:
        selection: The selection; None if there is none.
        choice: The keys of its devices, or "cpu" alone, which other ranks use; it outlives `release` if there are any.
        leads: Whether this process has chosen itself.
        locks: The descriptors of its locks by the keys of the devices.
    """

    def __init__(self) -> None:
        self.selection: Selection | None = None
        self.choice: list[str] | None = None
        self.leads = False
        self.locks: dict[str, int] = {}
        self._replaced: tuple[str, str | None] | None = None  # CUDA_VISIBLE_DEVICES: as set here, and before

    def visible_value(self) -> str | None:
        """Return CUDA_VISIBLE_DEVICES as it was before a selection of this process changed it."""
        value = os.environ.get(VISIBLE_VARIABLE)
        return self._replaced[1] if self._replaced and value == self._replaced[0] else value

    def take(
        self,
        selection: Selection,
        choice: Sequence[str] = (CPU,),
        locks: dict[str, int] | None = None,
        visible: str | None = None,
        leads: bool = True,
    ) -> Selection:
        """Replace the selection, and give up the locks that the new one does not have.

        Args:
            selection: The new selection.
            choice: The keys of its devices.
            locks: Its locks.
            visible: What CUDA_VISIBLE_DEVICES has to be for it; None if that does not matter.
            leads: Whether this process has chosen it.
        """
        locks = locks or {}
        for key in self.locks.keys() - locks.keys():
            unlock(self.locks[key])
        self._restore_visible()
        if visible is not None:
            self._replaced = (visible, os.environ.get(VISIBLE_VARIABLE))
            os.environ[VISIBLE_VARIABLE] = visible
        if leads:
            os.environ[SELECTED_VARIABLE] = ",".join(choice)
        self.selection, self.choice, self.locks, self.leads = selection, list(choice), locks, leads
        return selection

    def release(self) -> None:
        """Give up the selection."""
        for descriptor in self.locks.values():
            unlock(descriptor)
        self.selection, self.locks = None, {}
        self._restore_visible()
        if "LOCAL_RANK" not in os.environ:  # other ranks do not know that it was released
            self.choice = None
            os.environ.pop(SELECTED_VARIABLE, None)

    def forget(self) -> None:
        """Let a forked child begin without a selection; the locks are its parent's."""
        self.selection, self.choice, self.locks, self.leads = None, None, {}, False

    def _restore_visible(self) -> None:
        value = self.visible_value()
        changed = self._replaced is not None and value != os.environ.get(VISIBLE_VARIABLE)
        self._replaced = None
        if not changed or uuids_seen_by_cuda() is not None:
            return
        if value is None:
            del os.environ[VISIBLE_VARIABLE]
        else:
            os.environ[VISIBLE_VARIABLE] = value


state = _State()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=state.forget)
