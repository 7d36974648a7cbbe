"""The callback `AutoResume`."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import fields
from datetime import timedelta
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any, Literal

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.fit import (
    ToldBeforeLoggers,
    call_after_teardown,
    is_tuning,
    override_resume_checkpoint,
    slurm_requeue_signal,
)
from lightning_tricks._lightning_compat.flavor import (
    DeepSpeedStrategy,
    FSDPStrategy,
    LightningModule,
    MisconfigurationException,
    Trainer,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.sharded import is_sharding, restored_before_setup
from lightning_tricks._lightning_compat.trainer import is_fast_dev_run
from lightning_tricks._shared.checks import (
    check_choice,
    check_choices,
    check_count,
    check_duration,
    check_path,
    is_address,
)
from lightning_tricks._shared.patterns import as_patterns
from lightning_tricks._shared.report_parts import Facts
from lightning_tricks._shared.tensors import gather_objects
from lightning_tricks.auto_resume.checkpoint_writer import durable_checkpoints
from lightning_tricks.auto_resume.core.checkpoint_folder import CheckpointFolder
from lightning_tricks.auto_resume.core.signals import (
    DEFAULT_SIGNALS,
    EARLY_SIGNALS,
    KNOWN_SIGNALS,
    StopRequest,
    missed_submitit_signal,
    misses_slurm_signals,
    redirect_output,
    signal_names,
)
from lightning_tricks.auto_resume.core.store.mirror_process import MirrorProcess, default_scratch
from lightning_tricks.auto_resume.model_checkpoint_files import ORIGIN_KEY
from lightning_tricks.auto_resume.parts import Settings
from lightning_tricks.auto_resume.resumable_fit import ResumableFit
from lightning_tricks.auto_resume.run_files import RunFiles, raise_for_problem

_REFUSED_STRATEGIES = (DeepSpeedStrategy, FSDPStrategy)


class AutoResume(ToldBeforeLoggers, TrickCallback):
    """Save a fit while it runs and resume it automatically, bit for bit, when the same command is run again.

    Your script stays `trainer.fit(model, datamodule)`. The first process starts the run; later processes resume from
    the newest complete checkpoint in `dirpath`. On the same machine, with the same number of ranks and workers, the
    final weights, buffers, optimizer, scheduler and scaler states, metrics and logged values equal those of an
    uninterrupted run: the order of the batches, the random numbers of each process and dataloader worker, partial epoch
    means and a validation that is due are all resumed. The sampler skips samples that were already seen.

    Checkpoints are only saved between two optimizer steps, never within accumulation or validation: a kill loses the
    steps after the last save, and the next process repeats them. Saving does not change the run. Under
    `ModelParallelStrategy`, each rank writes its shards by torch.distributed.checkpoint, into a folder.

    Loggers and ModelCheckpoint resume as well. CSVLogger and TensorBoardLogger keep their version, and rows that they
    wrote after the save are removed, so each row exists once. WandbLogger and MLFlowLogger continue the same run on
    their server, where the rows between the save and the kill remain; a run that was open before the fit stays open.
    Other loggers start again. ModelCheckpoint finds its scores and best files as they were at the save: files that it
    removes are kept until the next save. Each checkpoint records its run: a repeated step overwrites its own file, and
    a file of the same name from elsewhere is kept.

    AutoResume removes and renames only its own files in `dirpath`, which it identifies by its records and their bytes.
    Other files may be there, such as those of ModelCheckpoint. Only one process may use the directory at a time; a
    second one raises an error.

    The n-th fit of an instance resumes the n-th fit of the stopped run. A `fast_dev_run` is neither saved nor resumed.

    In a resumed epoch, `on_train_epoch_start` of the module and the callbacks is called again, with the same random
    numbers and without its logging. Then all known state is restored: which parameters require gradients, training
    modes, parameter groups, pruning masks, buffers of any shape, gradients that manual optimization keeps, metrics,
    settings of the Trainer, and attributes of module, datamodule, callbacks, datasets and samplers that changed in the
    fit and are plain values, tensors, random generators or objects made of these, as well as the variables of closures
    and modules that their functions use. The restored state is compared with the saved state; one warning names the
    differences, with a remedy. The first save names state that cannot be saved.

    A resume is not exact, and usually a warning says so, with: attributes that are other objects, such as open files,
    or have more than 64 MiB in total (64 KiB in a worker; weights of modules do not count); parameters that are created
    during the fit; hooks that are registered, weights that are tied, and schedulers and callbacks that are replaced or
    removed during it; attributes that are drawn, and data that are created or split, without a seed before the Trainer
    has them, or data that depend on more than their index, the random state and such attributes; a loader of an unknown
    type that changes its order each time (it is read again up to its position), or with `in_order=False`. Clock values
    are not restored. A changed list or dict is restored as a whole. Effects of hooks outside the process are repeated.

    Args:
        dirpath: Directory for this run's checkpoints, on a file system that all ranks share; `~` is the home directory.
            Or an address in an object store that fsspec opens, such as `"s3://bucket/run"`, `"gs://..."` or
            `"az://..."` (extras `s3`, `gs` and `az`): checkpoints are written to `scratch` and sent in the background.
        every_n_train_steps: Number of optimizer steps between two saves, at least 1; None for no such saves.
        every_n_epochs: Number of epochs between two saves, at least 1, validation included; None for no such saves.
        train_time_interval: Time between two saves, as a timedelta or a dict of its arguments such as
            `{"minutes": 10}`; the first step after it is saved. None for no such saves.
        keep_last: Number of checkpoints to keep, at least 1.
        signals: Names of the signals at which the run finishes its step, saves and exits with `exit_code`; at SIGHUP it
            continues without its terminal, and appends its output to `train.log` in `dirpath`. Defaults depend on the
            system (Windows has no SIGHUP and no SIGUSR1). SIGKILL cannot be handled: the run resumes from its last
            save. A second SIGINT stops at once. SLURM's requeue signal is left to Lightning if Lightning requeues the
            job (`SLURMEnvironment(auto_requeue=True)`, its default). A signal during a validation takes effect after
            it. From the construction of this callback in the main thread until the first batch, signals other than
            SIGINT are noted: the run exits with `exit_code` when its fit starts, and a second signal stops it at once.
            In a Slurm job, a signal without a handler, such as SIGUSR1, is left alone until then. After the save, a
            handler that the process had before gets the signal, such as submitit's, which requeues the job.
        exit_code: Exit status after a signal, in [0, 255]; 75 (EX_TEMPFAIL) tells a scheduler to start the job again,
            which resumes from the last complete save. A refused start, an error and a second Ctrl+C exit with 1. Under
            `ddp_fork` and `ddp_spawn`, the main process exits with it as well; torchrun exits with 1.
        on_change: What to do if the script changed the training since the run started: optimizers, their groups and
            schedules, layers and their modes, frozen parameters, buffers, training loaders, samplers and datasets,
            callbacks and their arguments, settings of the Trainer, or the seed. With "raise", an error lists the
            changes. With "new", the new values apply from the resume on, while moments, position and random states
            continue; schedules have the values that they would have had at this step. More epochs or steps extend the
            run and are not a change. Nor are hyper-parameters, which a line names.
        ignore: Patterns over the names that such an error prints, such as `"MyCallback.run_name"`: a glob that must
            match the whole name (`"MyCallback.*"`), or `re:` and a regular expression. Matching changes take effect
            without an error, and a line names them.
        on_failed_save: With "warn", training continues if a save fails, for example on a full disk; with "raise", an
            error ends it. The previous checkpoint stays complete in both cases. A checkpoint that could not be resumed,
            because hooks put objects into it, counts as a failed save.
        asynchronous: Whether training continues while a checkpoint is written: it is copied in host memory first, which
            takes the size of the checkpoint until the fit ends. The next save waits until it is written; a signal, an
            exception and the end of the fit wait for the last one. A kill during a write leaves the previous
            checkpoint. None means True for checkpoints of up to 512 MiB that hold only tensors and plain values, and
            are not sharded.
        scratch: With an address, the local folder for the checkpoints, and for other files that shall be sent with
            them, such as those of loggers and ModelCheckpoint. Default: a folder in `~/.cache/lightning_tricks`, named
            by the address and the node; the attribute `scratch` has its path. Of a model that is sharded over several
            nodes, each has its part there, those after the first in `node-1` and so on.
        send_timeout: With an address, how long a signal or an exception waits until the last checkpoint is sent, as a
            timedelta or a dict of its arguments. The end of the fit waits until it is sent.
        allow_pickle: Whether objects in a checkpoint that are neither tensors nor plain values are restored, which
            runs code of the file: only allow it if no other user can write to `dirpath`. Objects among hyper-parameters
            do not need it.

    Raises:
        TypeError: If a number, the signals, the patterns or `asynchronous` have the wrong type.
        ValueError: If a value is out of range, a signal is unknown, a pattern is none, or there is a `scratch` without
            an address.
        MisconfigurationException: In a fit under FSDP1 or DeepSpeed, or if the directory or the object store cannot be
            used.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[AutoResume("runs/digits", every_n_train_steps=500)], accelerator="cpu")
    """

    path_arguments = ("dirpath", "scratch")
    _begins_before_setup = True  # in `before_loggers_begin`

    def __init__(
        self,
        dirpath: str | os.PathLike[str],
        *,
        every_n_train_steps: int | None = None,
        every_n_epochs: int | None = 1,
        train_time_interval: timedelta | dict[str, float] | None = None,
        keep_last: int = 2,
        signals: Sequence[str] = DEFAULT_SIGNALS,
        exit_code: int = 75,
        on_change: Literal["raise", "new"] = "raise",
        ignore: Sequence[str] = (),
        on_failed_save: Literal["warn", "raise"] = "warn",
        asynchronous: bool | None = None,
        scratch: str | os.PathLike[str] | None = None,
        send_timeout: timedelta | dict[str, float] = timedelta(minutes=2),
        allow_pickle: bool = False,
    ) -> None:
        for name, value in (("every_n_train_steps", every_n_train_steps), ("every_n_epochs", every_n_epochs)):
            if value is not None:
                check_count(name, value)
        _seconds(train_time_interval)
        if check_count("exit_code", exit_code, 0) > 255:
            raise ValueError(f"exit_code must be in [0, 255], got {exit_code}.")
        check_choices("signals", signals, KNOWN_SIGNALS)
        if not isinstance(asynchronous, bool | None):
            raise TypeError(f"asynchronous must be True, False or None, got {asynchronous!r}.")
        self.dirpath = check_path("dirpath", dirpath, "a directory", takes_address=True)
        if scratch is not None:
            check_path("scratch", scratch, "a directory")
            if not is_address(dirpath):
                raise ValueError(
                    f"scratch={os.fspath(scratch)!r} is for a dirpath that is an address, got {dirpath!r}."
                )
        self.scratch = default_scratch(str(dirpath)) if scratch is None and is_address(dirpath) else scratch
        check_duration("send_timeout", send_timeout)
        self.send_timeout = send_timeout
        self.every_n_train_steps = every_n_train_steps
        self.every_n_epochs = every_n_epochs
        self.train_time_interval = train_time_interval
        self.keep_last = check_count("keep_last", keep_last)
        self.signals = signals
        self.exit_code = exit_code
        self.on_change = check_choice("on_change", on_change, ("raise", "new"))
        as_patterns("ignore", ignore)
        self.ignore = ignore
        self.on_failed_save = check_choice("on_failed_save", on_failed_save, ("warn", "raise"))
        self.asynchronous = asynchronous
        self.allow_pickle = allow_pickle
        self._num_fits_done = 0
        EARLY_SIGNALS.wait(self, self._new_stop_request(self.signals))
        self._origin: dict[str, Any] | None = None  # of checkpoints that are saved after the fit
        super().__init__()

    def _forget_run(self) -> None:
        self._stop_request: StopRequest | None = None
        self._run_files: RunFiles | None = None
        self._fit: ResumableFit | None = None  # from when the Trainer looks for a checkpoint

    def before_loggers_begin(self, trainer: Trainer, module: LightningModule) -> None:
        """Lock the directory, unless a signal has asked to stop, before loggers touch what another process writes."""
        self._close()
        if is_fast_dev_run(trainer):
            return
        requeue = slurm_requeue_signal(trainer)
        self._stop_request = self._new_stop_request([name for name in self.signals if name != requeue])
        EARLY_SIGNALS.wait(self, self._stop_request)
        if trainer.world_size == 1:
            self._stop_if_asked(trainer, self._stop_request)
        root, mirror = CheckpointFolder(self._folder).path, None
        if is_address(self.dirpath):
            is_part = is_sharding(trainer.strategy) and trainer.node_rank > 0
            root = root / f"node-{trainer.node_rank}" if is_part else root  # nodes may share the scratch folder
            sends = self.keep_last, self.seconds_to_send, trainer.num_nodes
            mirror = MirrorProcess(str(self.dirpath), root, *sends, is_part=is_part)
        folder = CheckpointFolder(root / f"fit{self._num_fits_done + 1}" if self._num_fits_done else root)
        self._run_files = RunFiles(trainer, root, folder, self._installed, mirror)
        self._run_files.open()
        if trainer.world_size == 1:
            raise_for_problem(self._run_files.problem)

    @property
    def _folder(self) -> str | os.PathLike[str]:
        return self.dirpath if self.scratch is None else self.scratch

    def _new_stop_request(self, signals: Sequence[str]) -> StopRequest:
        log = CheckpointFolder(self._folder).path / "train.log"
        return StopRequest(signals, partial(redirect_output, log), self.exit_code)

    def _stop_if_asked(self, trainer: Trainer, request: StopRequest) -> None:
        """Stop before the fit, on all ranks if a signal came to one of them; all of them have to call it."""
        ranks = [request.received] if trainer.world_size == 1 else gather_objects(request.received)
        if names := signal_names(ranks):
            rank_zero_info(
                f"AutoResume: stopped by {names[0]} before the first batch. Run the same command again to train."
            )
            EARLY_SIGNALS.forget()
            call_after_teardown(trainer, partial(request.leave, ranks, trainer.global_rank))
            raise SystemExit(self.exit_code)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Prepare the directory, and observe the fit from here on."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            self._close()
            return
        if is_fast_dev_run(trainer):
            self.say("a fast_dev_run is neither saved nor resumed")
            return
        if is_tuning(trainer):
            return  # the fit follows later
        self._check_supported(trainer, pl_module)
        if self._run_files is None:  # `setup` was called by hand
            self.before_loggers_begin(trainer, pl_module)
        run_files: Any = self._run_files
        stop_request: Any = self._stop_request
        raise_for_problem(trainer.strategy.broadcast(run_files.problem))
        self._stop_if_asked(trainer, stop_request)
        if trainer.is_global_zero:
            run_files.prepare()
        raise_for_problem(trainer.strategy.broadcast(run_files.problem))
        run_files.check_shared()
        run_files.follow_rank_zero()
        if misses_slurm_signals():
            rank_zero_warn(
                "AutoResume: this job runs without srun, so signals from Slurm (--signal, scancel --signal) do not "
                "reach it unless the job script forwards them. Start it with `srun python ...`, or with `exec python "
                "...` and `#SBATCH --signal=B:USR1@90`."
            )
        if name := missed_submitit_signal(self.signals):
            rank_zero_warn(
                f"AutoResume: submitit requeues this job at {name} without a save, as {name} is not among signals. Set "
                f"signals=('SIGTERM', '{name}')."
            )
        self._installed.enter_context(durable_checkpoints(trainer.strategy))
        self._installed.enter_context(run_files.others.observed())
        undo = self._installed.enter_context(restored_before_setup(trainer.strategy))
        settings = Settings(**{field.name: getattr(self, field.name) for field in fields(Settings)})
        parts = self, settings, trainer, pl_module, run_files, stop_request, self._installed

        def select_checkpoint(user_path: str | os.PathLike[str] | None) -> tuple[Path, dict[str, Any]] | None:
            self._fit = fit = ResumableFit(*parts, user_path)
            if fit.resumed_from is None:
                undo()
            return fit.resumed_from

        self._installed.enter_context(override_resume_checkpoint(trainer, select_checkpoint))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what later saves are compared with, and restore weights of another precision."""
        if self._fit is not None:
            self._fit.on_fit_start()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue after the end of a fit that was given more epochs."""
        if self._fit is not None:
            self._fit.on_train_start()
            self.say(f"saves to {os.fspath(self.dirpath)} {self._cadence()}")
        super().on_train_start(trainer, pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note what was logged after the end, and count the fit."""
        if self._fit is not None:
            self._fit.on_fit_end()
            self._num_fits_done += 1
        super().on_fit_end(trainer, pl_module)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave the Trainer as it was."""
        super().teardown(trainer, pl_module, stage)
        if stage == "fit":
            EARLY_SIGNALS.leave(self)
        else:
            EARLY_SIGNALS.pause(self)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the Trainer as it was, and exit as the ranks of a fork or spawn launcher did."""
        super().on_exception(trainer, pl_module, exception)
        EARLY_SIGNALS.leave(self)
        if getattr(exception, "exit_code", None) == self.exit_code and not isinstance(exception, SystemExit):
            request = self._new_stop_request(self.signals)
            request.leave([request.received])  # what came to the process that launched them

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Say which run wrote a checkpoint also after the fit, and after an exception that ended it."""
        if self._origin is not None:
            checkpoint[ORIGIN_KEY] = self._origin

    def report_parts(self, trainer: Trainer) -> list[Facts]:
        """Return where and how often the fit is saved."""
        facts = [("directory", os.fspath(self.dirpath)), ("saves", self._cadence())]
        return [Facts(title="Saves of AutoResume", facts=facts)]

    def _cadence(self) -> str:
        seconds = None if math.isinf(self.seconds_between_saves) else self.seconds_between_saves
        units = (("step", self.every_n_train_steps), ("epoch", self.every_n_epochs), ("second", seconds))
        often = (f"every {unit}" if n == 1 else f"every {n:g} {unit}s" for unit, n in units if n is not None)
        return ", ".join(often) or "at the end of the fit"

    @property
    def seconds_between_saves(self) -> float:
        """The `train_time_interval` in seconds; infinity without one."""
        return _seconds(self.train_time_interval)

    @property
    def seconds_to_send(self) -> float:
        """The `send_timeout` in seconds."""
        return check_duration("send_timeout", self.send_timeout)

    def _check_supported(self, trainer: Trainer, module: LightningModule) -> None:
        strategy = type(trainer.strategy).__name__
        if isinstance(trainer.strategy, _REFUSED_STRATEGIES):
            raise MisconfigurationException(
                f"AutoResume does not save the shards of {strategy}. Shard with ModelParallelStrategy (FSDP2), train "
                "with one device or DDP, or resume with Lightning's ModelCheckpoint and ckpt_path='last'."
            )
        if "dataloader_iter" in signature(module.training_step).parameters:
            raise MisconfigurationException(
                "AutoResume cannot follow training_step(dataloader_iter), which fetches batches by itself. Take the "
                "batch as training_step(batch, batch_idx)."
            )

    def _close(self) -> None:
        run_files = self._run_files
        super()._close()
        if run_files is not None:
            self._origin = vars(run_files.others.origin)


def _seconds(interval: timedelta | dict[str, float] | None) -> float:
    return math.inf if interval is None else check_duration("train_time_interval", interval)
