"""The Lightning shell of the auto_resume room."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from inspect import signature
from typing import Any, Literal

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.fit import is_tuning
from lightning_tricks._lightning_compat.trainer import is_fast_dev_run
from lightning_tricks._shared.checks import check_choice, check_count, check_names, check_path
from lightning_tricks.auto_resume.core.checkpoint_files import CheckpointFolder
from lightning_tricks.auto_resume.core.signals import DEFAULT_SIGNALS, check_signals
from lightning_tricks.auto_resume.durable_checkpoint_io import install_durable_checkpoint_io
from lightning_tricks.auto_resume.resumable_fit import ResumableFit
from lightning_tricks.auto_resume.run_files import RunFiles, raise_for_problem

_TIMEDELTA_UNITS = ("weeks", "days", "hours", "minutes", "seconds", "milliseconds", "microseconds")
_SHARDED_STRATEGIES = (DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy)


class AutoResume(TrickCallback):
    """Resume a fit by itself, bit for bit, wherever it was stopped: run the same command again.

    The script stays `trainer.fit(model, datamodule)`. The first start begins afresh; a later one goes on from the
    newest whole checkpoint in `dirpath`. On the same machine with the same number of ranks and workers the final
    weights, buffers, optimizer, scheduler and scaler states, metrics and logged values are those of the run that was
    never stopped: the batches, the random numbers of each process and each DataLoader worker, partial epoch means and
    a validation that is due all go on where they were. Samples that were seen are skipped at the sampler.

    Saves happen between two optimizer steps only, never within accumulation or validation: a kill loses what came
    after the last one, and repeats it. It does not change the run that it protects.

    Loggers and ModelCheckpoint go on with the run as well. CSVLogger and TensorBoardLogger keep their version, and what
    they wrote after the save is withdrawn, so that each row is there once. WandbLogger and MLFlowLogger go on with the
    same run of their server, in which rows from between the save and the kill stay; a run that was open before the fit
    stays what it is. Other loggers begin anew. ModelCheckpoint finds its scores, paths and files as they were at the
    save: until the next one, AutoResume keeps what ModelCheckpoint replaces or removes beside it, as hidden links.

    Of the files in `dirpath` it removes and renames those that it wrote, which it tells by their records and bytes;
    others may be there, those of ModelCheckpoint for one. One process has the directory at a time; a second one is
    refused.

    The n-th fit of an instance goes on with the n-th fit of the stopped run. A `fast_dev_run` is left alone.

    In an epoch that is resumed, `on_train_epoch_start` of module and callbacks is called again, with the random numbers
    that it had and without what it logs. Then all that is known is put back: what takes gradients, modes, groups of
    parameters, masks of pruning, buffers of any shape, gradients that manual optimization keeps, metrics, and those
    attributes of module, datamodule, callbacks, datasets and samplers that changed in the fit and are plain values,
    tensors, random generators or objects of these. What was saved is compared with what was restored, and what differs
    is named in one warning, with what to do; what cannot be saved is named at the first save.

    Not exact, and said where it is seen: attributes that are other objects, such as open files, or over 64 MiB in all
    (64 KiB in a worker; weights of modules do not count); parameters that are made while the fit runs; data that is
    made or split without a seed before the Trainer has it, or depends on more than its index, the random streams and
    such attributes; a loader of an unknown kind whose order is not the same each time (it is read anew up to its
    place), or with `in_order=False`. Readings of a clock are not put back. A list or dict that changed is put back as
    a whole. What a hook does outside the process, it does again.

    Args:
        dirpath: Directory for this run's checkpoints, on a file system that all ranks see; `~` is the home directory.
        every_n_train_steps: Save each time that many optimizer steps are done; None does not.
        every_n_epochs: Save when that many epochs are done, validation included; None does not.
        train_time_interval: Save at the first step after so much time since the last save: a timedelta, or a dict of
            its arguments such as `{"minutes": 10}`; None does not.
        keep_last: How many checkpoints are kept.
        signals: Names of the signals at which the run finishes its step, saves and leaves with `exit_code`; of the
            default ones, those that the system has (Windows has no SIGHUP and no SIGUSR1). SIGKILL cannot be heeded,
            and the run goes on from its last save. A second SIGINT stops at once. SLURM's requeue signal is left to
            Lightning where Lightning requeues (`SLURMEnvironment(auto_requeue=True)`, its default). In validation the
            answer waits for its end.
        on_hangup: What SIGHUP does, if it is among the signals: "detach" lets training go on without its terminal and
            appends what would be shown there to `train.log` in `dirpath`, or to `train-2.log` where that is somebody
            else's; "stop" saves and leaves.
        exit_code: In [0, 255]; 75 (EX_TEMPFAIL) tells a scheduler to start the job again. Under `ddp_fork` and
            `ddp_spawn` the main process passes it on.
        force: Whether to go on from checkpoints of another model, other hyper-parameters or another seed.
        on_failed_save: "warn" lets training go on when a save fails, on a full disk for one; "raise" ends it. The
            checkpoint before is whole in any case. A save that could not be resumed, as hooks put objects into it,
            counts as failed.
        allow_pickle: Whether objects in a checkpoint that are neither tensors nor plain values are restored, which
            runs code of the file: let nobody else write to `dirpath` then. Those among hyper-parameters are never
            needed.

    Raises:
        TypeError: If a number or the signals are of another type.
        ValueError: If a value is out of range, or a signal unknown.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[AutoResume("runs/digits", every_n_train_steps=500)], accelerator="cpu")
    """

    path_arguments = ("dirpath",)

    def __init__(
        self,
        dirpath: str | os.PathLike[str],
        *,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = 1,
        train_time_interval: timedelta | dict[str, float] | None = None,
        keep_last: int = 2,
        signals: Sequence[str] = DEFAULT_SIGNALS,
        on_hangup: Literal["detach", "stop"] = "detach",
        exit_code: int = 75,
        force: bool = False,
        on_failed_save: Literal["warn", "raise"] = "warn",
        allow_pickle: bool = False,
    ) -> None:
        for name, value in (("every_n_train_steps", every_n_train_steps), ("every_n_epochs", every_n_epochs)):
            if value is not None:
                check_count(name, value)
        _seconds(train_time_interval)
        if check_count("exit_code", exit_code, 0) > 255:
            raise ValueError(f"exit_code must be in [0, 255], got {exit_code}.")
        check_signals(signals)
        self.dirpath = check_path("dirpath", dirpath, "a directory")
        self.every_n_train_steps = every_n_train_steps
        self.every_n_epochs = every_n_epochs
        self.train_time_interval = train_time_interval
        self.keep_last = check_count("keep_last", keep_last)
        self.signals = signals
        self.on_hangup = check_choice("on_hangup", on_hangup, ("detach", "stop"))
        self.exit_code = exit_code
        self.force = force
        self.on_failed_save = check_choice("on_failed_save", on_failed_save, ("warn", "raise"))
        self.allow_pickle = allow_pickle
        self._num_fits_done = 0
        self._fit: ResumableFit | None = None  # between setup and teardown
        self._restore_checkpoint_io: Any = None
        self._run_files: RunFiles | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Lightning gives a callback its module's `log` before the loggers begin; no hook is as early."""
        super().__setattr__(name, value)
        if name == "log":
            self._open_run_files(value.__self__)

    def _open_run_files(self, module: LightningModule) -> None:
        trainer = module.trainer
        self._close()
        if trainer.state.fn != TrainerFn.FITTING or is_fast_dev_run(trainer) or is_tuning(trainer):
            return
        root = CheckpointFolder(self.dirpath).path
        folder = CheckpointFolder(root / f"fit{self._num_fits_done + 1}" if self._num_fits_done else root)
        self._run_files = RunFiles(trainer, module, root, folder)
        self._run_files.open()
        if trainer.world_size == 1:
            raise_for_problem(self._run_files.problem)  # before loggers touch what another process writes

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Find what there is to resume, and follow the fit from here on."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            self._close()
            return
        if is_fast_dev_run(trainer):
            rank_zero_info("AutoResume: a fast_dev_run is neither saved nor resumed.")
            return
        if is_tuning(trainer):
            return  # the fit comes later
        self._check_supported(trainer, pl_module)
        if self._run_files is None:  # `setup` was called by hand
            self._open_run_files(pl_module)
        run_files: Any = self._run_files
        raise_for_problem(trainer.strategy.broadcast(run_files.problem))
        if trainer.is_global_zero:
            run_files.prepare()
        self._restore_checkpoint_io = install_durable_checkpoint_io(trainer.strategy, run_files.record_file_digest)
        self._fit = ResumableFit(self, trainer, pl_module, run_files)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what later saves are compared with."""
        if self._fit is not None:
            self._fit.on_fit_start()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Go on after the end of a fit that was given more epochs."""
        if self._fit is not None:
            self._fit.on_train_start()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Count the fit."""
        if self._fit is not None:
            self._fit.on_fit_end()
            self._num_fits_done += 1

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the Trainer as it was."""
        self._close()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the Trainer as it was; pass on with what the ranks of a fork or spawn launcher exited."""
        self._close()
        if getattr(exception, "exit_code", None) == self.exit_code and not isinstance(exception, SystemExit):
            raise SystemExit(self.exit_code) from exception

    @property
    def seconds_between_saves(self) -> float:
        """The `train_time_interval` in seconds, infinity without one."""
        return _seconds(self.train_time_interval)

    def _check_supported(self, trainer: Trainer, module: LightningModule) -> None:
        strategy = type(trainer.strategy).__name__
        if isinstance(trainer.strategy, _SHARDED_STRATEGIES):
            raise MisconfigurationException(
                f"AutoResume does not save the shards of {strategy}. Train with one device or DDP, or resume with "
                "Lightning's ModelCheckpoint and ckpt_path='last'."
            )
        if "dataloader_iter" in signature(module.training_step).parameters:
            raise MisconfigurationException(
                "AutoResume cannot follow training_step(dataloader_iter), which fetches batches by itself. Take the "
                "batch as training_step(batch, batch_idx)."
            )

    def _close(self) -> None:
        fit, self._fit = self._fit, None
        if fit is not None:
            fit.close()
        run_files, self._run_files = self._run_files, None
        if run_files is not None:
            run_files.close()
        restore_checkpoint_io, self._restore_checkpoint_io = self._restore_checkpoint_io, None
        if restore_checkpoint_io is not None:
            restore_checkpoint_io()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_fit": None, "_restore_checkpoint_io": None, "_run_files": None}


def _seconds(interval: object) -> float:
    if interval is None:
        return math.inf
    requirement = "train_time_interval must be a timedelta or a dict of its arguments such as {'minutes': 10}"
    if isinstance(interval, Mapping):
        check_names("train_time_interval", interval, _TIMEDELTA_UNITS)
        try:
            interval = timedelta(**interval)
        except TypeError as error:
            raise TypeError(f"{requirement}, got {interval!r} ({error}).") from error
    if not isinstance(interval, timedelta):
        raise TypeError(f"{requirement}, got {interval!r}.")
    if interval <= timedelta(0):
        raise ValueError(f"{requirement}, longer than nothing, got {interval!r}.")
    return interval.total_seconds()
