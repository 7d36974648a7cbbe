"""One fit that can be stopped at any moment: when it is saved, how it is stopped, and how it is taken up again."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging, Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.fit import (
    FitObserver,
    clear_restart_flags,
    close_workers,
    disable_finders,
    dump_checkpoint,
    is_at_step_boundary,
    is_last_batch,
    num_batches_done,
    observe_fit,
    override_resume_checkpoint,
    skip_sanity_check,
    slurm_requeue_signal,
)
from lightning_tricks._lightning_compat.fit_end import (
    call_after_train_end,
    restore_swa_max_epochs,
    restore_swa_scheduler,
)
from lightning_tricks._lightning_compat.trainer import callbacks_of
from lightning_tricks._shared.ranks import gather_objects
from lightning_tricks._shared.rng import isolated_rng, restore_rng_state
from lightning_tricks.auto_resume.core.attributes.comparison import differing_paths
from lightning_tricks.auto_resume.core.attributes.model_structure import param_group_names, resize_to_state_dict
from lightning_tricks.auto_resume.core.checkpoint_files import (
    FORMAT,
    Manifest,
    NewerFormatError,
    differences,
)
from lightning_tricks.auto_resume.core.data.rng_state import pack_rng_state, unpack_rng_state
from lightning_tricks.auto_resume.core.rank_agreement import RankAgreement
from lightning_tricks.auto_resume.core.safe_loading import find_objects, load_plain_data
from lightning_tricks.auto_resume.core.signals import StopRequest, redirect_output
from lightning_tricks.auto_resume.epoch_start_replay import replay_epoch_start
from lightning_tricks.auto_resume.loader_tracker import LoaderTracker
from lightning_tricks.auto_resume.module_state import run_identity, shape_differences
from lightning_tricks.auto_resume.rank_state import REPLACED_MODULE_SUFFIX, RankState
from lightning_tricks.auto_resume.unsafe_objects import describe_object
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError

if TYPE_CHECKING:
    from lightning_tricks.auto_resume.callback import AutoResume
    from lightning_tricks.auto_resume.run_files import RunFiles

CHECKPOINT_KEY = "auto_resume"  # in a checkpoint
_SECONDS_BETWEEN_STATUS = 10.0

# Compared after a resume: of what ranks keep these, of a checkpoint all but those, which each save writes anew
_KEPT_BY_RANKS = ("rng", "trainer", "buffers", "gradients", "callbacks")
_NOT_COMPARED = (
    CHECKPOINT_KEY,
    "epoch",
    "global_step",
    "loops",
    "pytorch-lightning_version",
    "hparams_name",
    "hyper_parameters",
)

# Moments of a save
_AFTER_BATCH, _AT_EPOCH_START, _AT_END = "after a batch", "at an epoch's start", "at the end"


class ResumableFit(FitObserver):
    """Saves a fit at the boundaries of its steps, stops it there when asked to, and takes it up from there.

    A boundary is the moment after a batch with an optimizer step, when all that belongs to it is done and logged, and
    before the validation that may follow; or the moment before the first batch of an epoch.

    Args:
        callback: With the settings.
        trainer: That fits.
        module: That is fitted.
        run_files: Of this fit, with the folder for its checkpoints.
    """

    def __init__(self, callback: AutoResume, trainer: Trainer, module: LightningModule, run_files: RunFiles) -> None:
        self.settings, self.trainer, self.module, self.run_files = callback, trainer, module, run_files
        self.folder = run_files.folder
        self.resumed: Manifest | None = None
        self._final_manifest: Manifest | None = None  # written at the end of this fit
        requeue = slurm_requeue_signal(trainer)
        detach = self._detach_from_terminal if callback.on_hangup == "detach" else None
        self.stop_request = StopRequest([name for name in callback.signals if name != requeue], detach)
        self.loaders = LoaderTracker(self.stop_request)
        self.rank: RankState
        self.rank_agreement: RankAgreement
        self._identity: Mapping[str, Any] = {}
        self._is_running = False  # before that, a tuner may train in a fit of its own
        self._pending_save_point = ""  # of the checkpoint that is to be taken up; empty once that is done
        self._pending_rank_state: Mapping[str, Any] = {}  # this rank's part of it
        self._pending_shared_state: Mapping[str, Any] = {}  # the part of all ranks
        self._world_size_changed = False  # wrote it
        self._loader_origins: dict[str, Any] = {}  # what loaders were made from: "training" and "validation"
        self._epoch_start: Mapping[str, Any] | None = None  # what the hooks of the epoch's start found
        self._full_precision_weights: Mapping[str, Any] | None = None  # weights that were loaded in another precision
        self._last_step = self._saved_step = -1
        self._reported: set[str] = set()
        self._saved_at = self._status_written_at = time.monotonic()
        close_override = override_resume_checkpoint(trainer, self._select_checkpoint)
        close_observer = observe_fit(trainer, self)
        close_end_call = call_after_train_end(trainer, self.after_train_end)
        self._close_functions = [
            close_override,
            close_observer,
            close_end_call,
            self.loaders.close,
            self.stop_request.close,
        ]

    def close(self) -> None:
        """Leave the Trainer and its loaders as they were."""
        for close in self._close_functions:
            close()

    # -- taking up

    def _select_checkpoint(self, user_path: str | os.PathLike[str] | None) -> tuple[Path, dict[str, Any]] | None:
        """Read the newest checkpoint on all ranks, and see that it is this run's."""
        self._identity = run_identity(self.module, os.environ.get("PL_GLOBAL_SEED"))
        self.rank = RankState(self.trainer, self.module)
        manifest, problem = None, ""
        if self.trainer.is_global_zero:
            try:
                manifest = self.folder.newest(lambda sentence: rank_zero_warn(f"AutoResume: {sentence}"))
            except (NewerFormatError, OSError) as error:
                problem = str(error)
            if manifest is not None and self._is_user_path_newer(user_path, manifest):
                manifest = None
        manifest, problem = self.trainer.strategy.broadcast((manifest, problem))
        if problem:
            raise MisconfigurationException(f"AutoResume: {problem}")
        if manifest is None:
            return None
        path = self.folder.path / manifest.file
        self._check_same_run(manifest, path)
        checkpoint = self._load_checkpoint(path)
        self._set_pending(checkpoint)
        self.resumed = manifest
        where = "was at its end" if manifest.finished else f"goes on at epoch {manifest.epoch}, step {manifest.step}"
        rank_zero_info(f"AutoResume: the run {where} ({path}).")
        return path, checkpoint

    def _is_user_path_newer(self, user_path: str | os.PathLike[str] | None, manifest: Manifest) -> bool:
        """Say which is resumed where the user gave a checkpoint, too, and whether it is that one."""
        if user_path is None:
            return False
        newer = Path(user_path).exists() and Path(user_path).stat().st_mtime > manifest.written
        which, other = (user_path, manifest.file) if newer else (manifest.file, user_path)
        rank_zero_info(f"AutoResume: {str(which)!r} is newer than {str(other)!r} and is resumed.")
        return newer

    def _check_same_run(self, manifest: Manifest, path: Path) -> None:
        found = differences(manifest.run, self._identity)
        shapes = [phrase for phrase in found if phrase.startswith("parameters was")]
        if shapes:
            found.remove(shapes[0])
            found += shape_differences(self.module, _load_plain_data_or_raise(path)["state_dict"])
        if not found:
            return
        problem_text = f"{self.folder.path} holds checkpoints of another run: {'; '.join(found)}."
        if not self.settings.force:
            raise MisconfigurationException(
                f"AutoResume: {problem_text} Choose another dirpath to begin afresh, or force=True to go on from it."
            )
        rank_zero_warn(f"AutoResume(force=True): {problem_text} The run goes on from it.")

    def _load_checkpoint(self, path: Path, *, mmap: bool = False) -> dict[str, Any]:
        if self.settings.allow_pickle:
            checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
            return checkpoint
        checkpoint = _load_plain_data_or_raise(path, mmap=mmap)
        for key_path, kind in find_objects(checkpoint).items():
            raise MisconfigurationException(
                f"AutoResume: {describe_object(self.trainer, self.module, key_path, kind)} in {path}. Objects are not "
                "restored, as that runs code of the file. If nobody else writes to that directory, "
                "AutoResume(..., allow_pickle=True) restores them."
            )
        return checkpoint

    def _set_pending(self, checkpoint: Mapping[str, Any]) -> None:
        """Keep what is restored later than the Trainer's own part."""
        written = checkpoint[CHECKPOINT_KEY]["format"]
        if written != FORMAT:
            raise MisconfigurationException(
                f"AutoResume: the checkpoints in {self.folder.path} are of format {written}, this release writes "
                f"{FORMAT}. Choose another dirpath, or finish the run with the release that began it."
            )
        ranks: Sequence[Mapping[str, Any]] = checkpoint[CHECKPOINT_KEY]["ranks"]
        rank, world_size = self.trainer.global_rank, self.trainer.world_size
        self._pending_save_point, self._pending_rank_state = (
            checkpoint[CHECKPOINT_KEY]["moment"],
            ranks[rank % len(ranks)],
        )
        self._pending_shared_state, self._loader_origins = (
            checkpoint[CHECKPOINT_KEY]["shared"],
            dict(self._pending_rank_state["made"]),
        )
        resize_to_state_dict(self.module, checkpoint["state_dict"], self._pending_shared_state["buffers"])
        self._close_functions.append(disable_finders(self.trainer))
        own, saved = _tensors(self.module.state_dict()), _tensors(checkpoint["state_dict"])
        if any(name in own and own[name].dtype != value.dtype for name, value in saved.items()):
            self._full_precision_weights = saved
        self._world_size_changed = len(ranks) != world_size
        if self._world_size_changed:
            self._pending_rank_state = {
                **self._pending_rank_state,
                "buffers": {},
                "trainer": {**self._pending_rank_state["trainer"], "results": []},
            }
            rank_zero_warn(
                f"AutoResume: the run had {len(ranks)} ranks and goes on with {world_size}. Weights, optimizer and "
                "position are restored. The shares of samples and the random numbers of the ranks are others than they "
                "would have been, and the means of this epoch lack what was logged before."
            )

    def on_fit_start(self) -> None:
        """Note what a later save is compared with; restore what was loaded before the Trainer chose the precision."""
        if self.trainer.is_global_zero:
            self.run_files.on_fit_start(self.resumed)
        self.rank_agreement = RankAgreement()
        self.rank.on_fit_start(self._pending_shared_state)
        weights, self._full_precision_weights = self._full_precision_weights, None
        if weights is not None:
            with torch.no_grad():
                for name, value in _tensors(self.module.state_dict()).items():
                    if name in weights:
                        value.copy_(weights[name])

    def on_signals_registered(self) -> None:
        """Heed signals from here on; a fit that had ended gives its results again."""
        self._is_running = True
        if not self.stop_request.install_handlers():
            rank_zero_warn("AutoResume: signals can be heeded in the main thread only; periodic saves go on.")
        if self._pending_save_point == _AT_END:
            self.rank.restore_structure(self._pending_shared_state)
            self.rank.restore_epoch_results(self._pending_rank_state)
            self._discard_later_rows()
            for swa in self._swa_callbacks():
                restore_swa_scheduler(self.trainer, swa)
            skip_sanity_check(self.trainer)

    def sampler_epoch(self, epoch: int) -> int:
        """The epoch that is taken up, also where the loaders are made before the Trainer's loops know of it."""
        return int(self._pending_rank_state["loaders"]["epoch"]) if self._pending_save_point else epoch

    def before_loaders_created(self, kind: str) -> None:
        """Note what loaders are made from, or put that back: streams, and attributes such as a batch size."""
        if not self._pending_save_point:
            self._loader_origins[kind] = {"streams": pack_rng_state(), "attributes": self.rank.attribute_changes()}
        elif kind in self._loader_origins:
            self.rank.restore_attributes(self._loader_origins[kind]["attributes"])
            unpack_rng_state(self._loader_origins[kind]["streams"])

    def on_train_loaders_ready(self, loaders: list[Any], all_sized: bool) -> None:
        """Follow the loaders, or take them to where they were."""
        self.loaders.track_train(
            loaders, all_sized, self._pending_rank_state["loaders"] if self._pending_save_point else None
        )

    def on_validation_loaders_ready(self, loaders: list[Any]) -> None:
        """Follow the loaders."""
        self.loaders.track_validation(loaders)

    def on_train_start(self) -> None:
        """Go on after the end of a fit that was given more epochs."""
        if self._pending_save_point == _AT_END:
            self._pending_save_point = ""
            clear_restart_flags(self.trainer)
            self.loaders.create_iterators(self.trainer, self._pending_rank_state["loaders"])
            self.rank.restore_structure(self._pending_shared_state)
            self.rank.restore(self._pending_rank_state)
            self._report([*self.rank.failed, *self._pending_rank_state["not_saved"]])
            self._pending_rank_state = self._pending_shared_state = {}

    def is_resuming(self) -> bool:
        """Whether the epoch that begins goes on where another process was stopped."""
        return self._is_running and bool(self._pending_save_point)

    def before_epoch_start_hooks(self) -> None:
        """Note what the hooks of the epoch's start draw from."""
        if not self._pending_save_point:
            groups = param_group_names(self.module, self.trainer.optimizers)
            self._epoch_start = {
                "streams": pack_rng_state(),
                "groups": groups,
                "attributes": self.rank.attribute_changes(),
            }

    def before_epoch_iterators(self) -> None:
        """Note what the epoch's order comes from."""
        if not self._pending_save_point:
            self.loaders.record_rng_state("iterator")

    def before_first_batch(self, finish_batch: Callable[[], None]) -> None:
        """Go on where another process was stopped; else save between two epochs."""
        if not self._is_running:
            return
        save_point, self._pending_save_point = self._pending_save_point, ""
        if save_point:
            self._load_mid_epoch_state()
            self._last_step = self._saved_step = self.trainer.global_step
            if save_point == _AFTER_BATCH:
                finish_batch()
            return
        self.loaders.record_rng_state("batch")
        epoch, interval = self.trainer.current_epoch, self.settings.every_n_epochs
        stop_requested, save_due = self.rank_agreement.any_rank(bool(self.stop_request.received), self._is_save_due())
        if epoch > 0 and (stop_requested or save_due or (interval and epoch % interval == 0)):
            self._save(_AT_EPOCH_START)
        if stop_requested:
            self._stop()

    def _load_mid_epoch_state(self) -> None:
        """Bring the epoch to where it was: its hooks are called again, its loaders skip, all else is put back."""
        trainer, rank_state = self.trainer, self._pending_rank_state
        clear_restart_flags(trainer)
        self.rank.restore_structure(self._pending_shared_state)
        self._epoch_start = rank_state["epoch"]
        if self._epoch_start is not None:
            self.rank.restore_attributes(self._epoch_start["attributes"], before_hooks=True)
            unpack_rng_state(self._epoch_start["streams"])
            replay_epoch_start(trainer, self.module, self._epoch_start["groups"], self._reload_weights)
            for swa in self._swa_callbacks():  # it makes no scheduler in the epoch for batch statistics
                restore_swa_scheduler(trainer, swa)
            self.rank.restore_structure(self._pending_shared_state)
        self.loaders.restore_positions(trainer, rank_state["loaders"])
        self.rank.restore(rank_state)
        self._report_differences()
        self._discard_later_rows()
        self._pending_rank_state = self._pending_shared_state = {}

    def _reload_weights(self) -> None:
        """Load weights and the states of the optimizers from the checkpoint that is resumed."""
        checkpoint = self._load_checkpoint(self._resumed_path())
        self.module.on_load_checkpoint(checkpoint)
        self.module.load_state_dict(checkpoint["state_dict"], strict=False)
        for optimizer, state in zip(self.trainer.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def _resumed_path(self) -> Path:
        if self.resumed is None:
            raise RuntimeError("no checkpoint is resumed.")
        return self.folder.path / self.resumed.file

    def _report_differences(self) -> None:
        """Compare what was restored with what was saved, and name what is not the same."""
        rank_state, now = self._pending_rank_state, self.rank.capture()
        kept = [
            name
            for name in _KEPT_BY_RANKS
            if name in rank_state and not (name == "callbacks" and self._world_size_changed)
        ]
        found = [*self.rank.failed, *_differing_attributes(rank_state, now)]
        found += differing_paths({name: rank_state[name] for name in kept}, now)
        found += self._differences_from_checkpoint()
        recreated = {
            key_path for key_path in self.rank.unsaved_names(now) if key_path.endswith(REPLACED_MODULE_SUFFIX)
        }  # by hooks
        self._report([*found, *(key_path for key_path in rank_state["not_saved"] if key_path not in recreated)])

    def _differences_from_checkpoint(self) -> list[str]:
        """Return where what the Trainer saves now is other than what it saved then; every rank has to call it."""
        with isolated_rng():  # which hooks may draw from
            checkpoint = dump_checkpoint(self.trainer)
        if not self.trainer.is_global_zero:
            return []
        saved: dict[str, Any] = {}
        with suppress(MisconfigurationException):  # a file that somebody wrote since it was read
            saved = self._load_checkpoint(self._resumed_path(), mmap=True)
        key_paths = differing_paths({name: saved[name] for name in saved if name not in _NOT_COMPARED}, checkpoint)
        callbacks = callbacks_of(self.trainer)
        timer_paths = tuple(f"callbacks.{one.state_key}." for one in callbacks if isinstance(one, Timer))
        return [key_path for key_path in key_paths if not key_path.startswith(timer_paths)]

    def _report(self, found: Sequence[str]) -> None:
        """Warn of what is not as it was, on any rank, and tell the callbacks that want to know."""
        ranks = gather_objects((list(found), self.loaders.differences))
        key_paths = list(dict.fromkeys(key_path for found, _ in ranks for key_path in found))
        sentences = list(dict.fromkeys(sentence for _, differences in ranks for sentence in differences))
        for callback in callbacks_of(self.trainer):
            if isinstance(callback, TrickCallback):
                callback.resumed(self.trainer, [*key_paths, *("the data" for _ in sentences[:1])])
        if key_paths:
            sentences.append(
                f"not restored: {summarize(key_paths)}. The run goes on and may diverge from the one that was never "
                "stopped. Keep such values in a state_dict, or in on_save_checkpoint and on_load_checkpoint."
            )
        for sentence in sentences:
            rank_zero_warn(f"AutoResume: {sentence}")

    # -- saving

    def after_batch(self) -> None:
        """Save, or stop, where it is time for that."""
        if not self._is_running:
            return
        trainer = self.trainer
        step = trainer.global_step
        if not is_at_step_boundary(trainer) or (step == self._last_step and not self.module.automatic_optimization):
            return
        self._last_step = step
        stop_requested, save_due = self.rank_agreement.any_rank(bool(self.stop_request.received), self._is_save_due())
        interval = self.settings.every_n_train_steps
        if stop_requested or save_due or (interval and step % interval == 0 and step != self._saved_step):
            self._save(_AFTER_BATCH)
        if stop_requested:
            self._stop()
        if time.monotonic() - self._status_written_at > _SECONDS_BETWEEN_STATUS:
            self._write_status("running")

    def after_train_end(self) -> None:
        """Save the end, when no hook changes it any more."""
        if not self._is_running or self.settings not in callbacks_of(self.trainer):
            return  # a tuner's fit, which leaves the callbacks out
        self._save(_AT_END)
        self._write_status("finished")

    def on_fit_end(self) -> None:
        """Note what was logged after the end; leave the random streams where the run left them, if it had ended."""
        if self._final_manifest is not None and self.trainer.is_global_zero:
            self.run_files.on_fit_end(self._final_manifest)
        if self._pending_save_point:
            clear_restart_flags(self.trainer)
            for swa in self._swa_callbacks():
                restore_swa_max_epochs(self.trainer, swa)
            restore_rng_state(self._pending_rank_state["rng"])

    def _swa_callbacks(self) -> list[StochasticWeightAveraging]:
        callbacks = callbacks_of(self.trainer)
        return [one for one in callbacks if isinstance(one, StochasticWeightAveraging)]

    def _discard_later_rows(self) -> None:
        """Take back what was logged after the save that is resumed, by this process as well."""
        if self.trainer.is_global_zero and self.resumed is not None:
            self.run_files.discard_rows_after(self.resumed)

    def _is_save_due(self) -> bool:
        if not self.trainer.is_global_zero:
            return False
        return time.monotonic() - self._saved_at >= self.settings.seconds_between_saves

    def _save(self, save_point: str) -> None:
        trainer = self.trainer
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
        at_end = save_point == _AT_END or (save_point == _AFTER_BATCH and is_last_batch(trainer))
        rank_state = self.rank.capture()
        rank_state |= {
            "made": self._loader_origins,
            "epoch": self._epoch_start,
            "loaders": self.loaders.state(trainer, at_end),
        }
        rank_state["not_saved"] = self.rank.unsaved_names(rank_state)
        ranks = gather_objects(rank_state)
        self._warn_unsaved(ranks)
        with isolated_rng():  # the hooks of a save are none of the run's
            checkpoint = dump_checkpoint(trainer)
        failure = ""
        if trainer.is_global_zero:
            shared_state = self.rank.shared_state()
            checkpoint[CHECKPOINT_KEY] = {
                "format": FORMAT,
                "moment": save_point,
                "shared": shared_state,
                "ranks": ranks,
            }
            failure = self._write_checkpoint(checkpoint, finished=save_point == _AT_END)
        failure = trainer.strategy.broadcast(failure)
        if failure and self.settings.on_failed_save == "raise":
            raise OSError(failure)
        if failure:
            rank_zero_warn(f"{failure} Training goes on.")
        else:
            self._status_written_at = -math.inf  # the status is due

    def _write_checkpoint(self, checkpoint: Mapping[str, Any], finished: bool) -> str:
        """Write a checkpoint and remove old ones; return why that failed, or nothing."""
        trainer = self.trainer
        try:
            for logger in trainer.loggers:  # or what was logged before is lost when the process is killed
                logger.save()
            manifest = self.folder.save(
                checkpoint,
                epoch=trainer.current_epoch,
                step=trainer.global_step,
                batches=num_batches_done(trainer),
                finished=finished,
                loggers=self.run_files.loggers.records(),
                run=self._identity,
            )
            self.run_files.on_save(manifest)
            self._final_manifest = manifest if finished else None
            self.folder.prune(self.settings.keep_last)
            return "" if self.settings.allow_pickle else self._why_not_loadable(self.folder.path / manifest.file)
        except Exception as error:  # of a disk, a logger, or what pickling an object of the user's raises
            return (
                f"AutoResume: step {trainer.global_step} could not be saved in {self.folder.path}: {error}. The "
                "checkpoint before it is whole."
            )

    def _warn_unsaved(self, ranks: Sequence[Mapping[str, Any]]) -> None:
        """Say what a resumed run will lack, once."""
        found = dict.fromkeys(
            key_path
            for rank_state in ranks
            for key_path in rank_state["not_saved"]
            if not key_path.endswith(REPLACED_MODULE_SUFFIX)
        )
        new = [key_path for key_path in found if key_path not in self._reported]
        self._reported.update(new)
        if new:
            rank_zero_warn(
                f"AutoResume: changed in this fit, and cannot be saved: {summarize(new)}. A resumed run begins with "
                "them anew. Keep plain values, tensors or what has a state_dict there, or save them in "
                "on_save_checkpoint."
            )

    def _why_not_loadable(self, path: Path) -> str:
        """Return why a checkpoint that was just written could not be resumed, once for each reason; or nothing."""
        try:
            found = find_objects(load_plain_data(path, mmap=True)).items()
            saved = [describe_object(self.trainer, self.module, key_path, kind) for key_path, kind in found]
        except CheckpointError as error:
            saved = [str(error)]
        new = [phrase for phrase in saved if phrase not in self._reported]
        self._reported.update(new)
        if not new:
            return ""
        return (
            f"AutoResume: {'; '.join(new)}. A run is not resumed from a checkpoint with objects, as that runs code of "
            "the file. Save plain values and tensors, such as float(x) or x.tolist(), or set "
            "AutoResume(..., allow_pickle=True)."
        )

    def _write_status(self, state: str) -> None:
        """Write the status file."""
        self._status_written_at = time.monotonic()
        trainer = self.trainer
        if not trainer.is_global_zero:
            return
        try:
            self.folder.write_status(
                state=state,
                epoch=trainer.current_epoch,
                step=trainer.global_step,
                max_epochs=trainer.max_epochs,
                max_steps=trainer.max_steps,
            )
        except OSError:
            return  # a full disk is reported where a checkpoint is lost

    # -- stopping

    def _stop(self) -> NoReturn:
        name = self.stop_request.received or "a signal to another rank"
        step = self.trainer.global_step
        rank_zero_info(f"AutoResume: stopped by {name} at step {step}. Run the same command again to go on.")
        self._write_status("stopped")
        close_workers(self.trainer)  # nobody else does in a forked rank
        raise SystemExit(self.settings.exit_code)

    def _detach_from_terminal(self) -> None:
        redirect_output(self.folder.log_path)


def _differing_attributes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the attributes that changed in both processes, and to different values."""
    saved_changes, present_changes = (state["attributes"]["values"] for state in (saved, now))
    for key_path in saved_changes.keys() & present_changes.keys():
        if (
            isinstance(saved_changes[key_path]["value"], dict)
            and saved_changes[key_path]["value"].get("kind") == "clock"
        ):
            continue  # which is not put back
        if any(True for _ in differing_paths(saved_changes[key_path]["value"], present_changes[key_path]["value"])):
            yield key_path


def summarize(key_paths: Sequence[str], max_names: int = 5) -> str:
    """Return the first of many names, and how many there are beside them."""
    more = len(key_paths) - max_names
    return ", ".join(key_paths[:max_names]) + (f" and {more} more" if more > 0 else "")


def _tensors(state_dict: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of a state dict, which may hold what `get_extra_state` returns, too."""
    return {name: value for name, value in state_dict.items() if isinstance(value, torch.Tensor)}


def _load_plain_data_or_raise(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    try:
        return load_plain_data(path, mmap=mmap)
    except CheckpointError as error:
        raise MisconfigurationException(f"AutoResume: {error}") from error
