"""The callback `HangWatch`."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import partial
from pathlib import Path
from threading import TIMEOUT_MAX
from typing import Any

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.flavor import LightningModule, Trainer, rank_zero_warn
from lightning_tricks._lightning_compat.logged_values import observe_log_calls
from lightning_tricks._lightning_compat.observers import observe_fetches
from lightning_tricks._shared.checks import SENT_BY_AUTO_RESUME, TIMEDELTA_UNITS, check_duration, check_path
from lightning_tricks.hang_watch.functional import RankRecord, protect_forks

_STAGES = {"train": "train", "validation": "val", "test": "test", "predict": "predict"}
_PARTS = ("start", "end", "epoch_start", "epoch_end", "batch_start", "batch_end")
_HOOKS = (
    *("on_fit_start", "on_sanity_check_start", "on_sanity_check_end", "on_save_checkpoint"),
    *("on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    *(f"on_{stage}_{part}" for stage in _STAGES for part in _PARTS),
)


def _noting(hook: str) -> Callable[..., None]:
    """Return a hook that notes where the run is."""
    stage, _, what = hook.removeprefix("on_").partition("_")

    def note(self: HangWatch, trainer: Trainer, *args: Any) -> None:
        if (record := self._record) is None:
            return
        if what == "epoch_start":
            record.start_epoch(_STAGES[stage], trainer.current_epoch)
        elif what == "batch_start":
            record.step, record.batch, record.batches = trainer.global_step, args[2], record.batches + 1
        elif what == "epoch_end" and stage == "validation":
            record.batch = -1  # the next place is one of training again
        record.backwards += hook == "on_before_backward"
        record.stops = trainer.should_stop
        self._move(hook)

    return note


class HangWatch(TrickCallback):
    """Record the position of each rank when the run stops making progress, to find out which rank is behind.

    A rank makes progress when it reaches a hook or fetches a batch. If it makes none for `timeout`, the stacks of all
    its threads are written to `rank<n>.stacks` in `dirpath`, even while C code holds the interpreter's lock, and
    `lightning-tricks hang <dirpath>` compares the ranks: which one is behind, in which hook and batch, and which ran
    another number of batches or logged other values. Ranks do not communicate, and the run continues: a step that takes
    longer leaves the stacks behind, and a warning. If nothing hung, the files are removed.

    If you start the run again, the files of a hang move to the folder `previous`. `faulthandler` has one timer per
    process: a timer set by other code is not set again after the fit, nor after this process forks. NCCL ends a process
    after its own timeout of 10 minutes; give it more, or this callback less.

    Args:
        timeout: Time without progress: text such as `"10 minutes"` or `"90 seconds"`, a timedelta, or a dict of its
            arguments such as `{"minutes": 10}`. The stacks are written up to a second earlier.
        dirpath: The folder of this run, shared by all ranks or one on each node; `~` is the home directory.

    Raises:
        TypeError: If an argument has the wrong type.
        ValueError: If the time is not positive or has an unknown unit, or `dirpath` is an address.
        OSError: In a run, if the folder cannot be written.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[HangWatch("5 minutes", "runs/hang")], accelerator="cpu", logger=False)
    """

    path_arguments = ("dirpath",)

    def __init__(
        self, timeout: str | timedelta | dict[str, float] = "10 minutes", dirpath: str | os.PathLike[str] = "hang"
    ) -> None:
        self.timeout = timeout
        self._seconds = min(_seconds(timeout), TIMEOUT_MAX)
        self.dirpath = check_path("dirpath", dirpath, "a folder", remedy=SENT_BY_AUTO_RESUME)
        protect_forks()
        super().__init__()

    def _forget_run(self) -> None:
        self._record: RankRecord | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start watching, in the process of each rank."""
        super().setup(trainer, pl_module, stage)
        about = {"rank": trainer.global_rank, "world_size": trainer.world_size, "pid": os.getpid(), "function": stage}
        self._record = RankRecord(Path(self.dirpath).expanduser().absolute(), self._seconds, about)
        self._installed.callback(self._record.close)
        self._installed.enter_context(observe_log_calls(trainer, self._record.log))
        begin, end = (partial(self._move, f"{what} of a {{}} batch") for what in ("fetch", "end of the fetch"))
        self._installed.enter_context(observe_fetches(trainer, begin, end, "HangWatch"))
        self._move("setup")

    def _move(self, hook: str, stage: str = "") -> None:
        if self._record is not None and (stood := self._record.move(hook.format(stage))):
            where = f"`lightning-tricks hang {shlex.quote(os.fspath(self.dirpath))}` shows where"
            rank_zero_warn(f"HangWatch: the run stood still for {stood:.0f} s and now continues; {where}.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say what is watched."""
        self._move("on_train_start")
        self.say(f"writes stacks to {os.fspath(self.dirpath)} after {self._seconds:g} s without progress")
        super().on_train_start(trainer, pl_module)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Note the exception, and watch no longer."""
        if self._record is not None:
            self._record.ended_by = f" by {type(exception).__name__}"
        super().on_exception(trainer, pl_module, exception)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Report a hang at the very end, and stop watching."""
        self._move("teardown")
        super().teardown(trainer, pl_module, stage)


for _hook in _HOOKS:
    if _hook not in vars(HangWatch):
        setattr(HangWatch, _hook, _noting(_hook))


def _seconds(timeout: object) -> float:
    if isinstance(timeout, str):
        number, _, unit = timeout.strip().lower().partition(" ")
        unit = unit.strip().removesuffix("s") + "s"
        with suppress(ValueError, OverflowError):
            return check_duration("timeout", {unit: float(number)} if unit in TIMEDELTA_UNITS else {})
        raise ValueError(f"timeout must be a time such as '10 minutes' or '90 seconds', got {timeout!r}.")
    return check_duration("timeout", timeout)
