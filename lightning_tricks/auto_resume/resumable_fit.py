"""One fit that can be stopped at any moment: when it is saved, how it stops, and in which order it is restored."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_tricks._lightning_compat.fit import (
    LOADER_LIMITS,
    clear_restart_flags,
    disable_finders,
    is_at_step_boundary,
    is_last_batch,
    override_resume_checkpoint,
    skip_sanity_check,
)
from lightning_tricks._lightning_compat.fit_end import (
    call_after_train_end,
    restore_swa_max_epochs,
    restore_swa_scheduler,
)
from lightning_tricks._lightning_compat.fit_loaders import close_workers
from lightning_tricks._lightning_compat.fit_observer import FitObserver, observe_fit
from lightning_tricks._lightning_compat.trainer import callbacks_of, callbacks_of_type
from lightning_tricks._shared.rng import restore_rng_state
from lightning_tricks.auto_resume.checkpoint_selection import CheckpointSelection
from lightning_tricks.auto_resume.checkpoint_writer import CheckpointWriter
from lightning_tricks.auto_resume.core.attributes.model_structure import param_group_names, resize_to_state_dict
from lightning_tricks.auto_resume.core.data.rng_state import RNG_STATE_KEY, pack_rng_state, unpack_rng_state
from lightning_tricks.auto_resume.core.manifests import CHECKPOINT_KEY, Manifest
from lightning_tricks.auto_resume.core.rank_agreement import RankAgreement
from lightning_tricks.auto_resume.core.signals import StopRequest
from lightning_tricks.auto_resume.early_signals import EARLY_SIGNALS
from lightning_tricks.auto_resume.epoch_start_replay import replay_epoch_start
from lightning_tricks.auto_resume.loader_tracker import LoaderTracker
from lightning_tricks.auto_resume.pending_resume import PendingResume, SavePoint, state_dict_tensors
from lightning_tricks.auto_resume.rank_state import RankState
from lightning_tricks.auto_resume.resume_report import find_differences, report_differences
from lightning_tricks.auto_resume.run_configuration import RunConfiguration
from lightning_tricks.auto_resume.run_files import raise_for_problem
from lightning_tricks.auto_resume.run_status import RunStatus

if TYPE_CHECKING:
    from lightning_tricks.auto_resume.callback import AutoResume
    from lightning_tricks.auto_resume.run_files import RunFiles


class ResumableFit(FitObserver):
    """Saves a fit at the boundaries of its steps, stops it there when asked to, and resumes it from there.

    A boundary is the moment after a batch with an optimizer step, when the batch is done and logged and before the
    validation that may follow; or the moment before the first batch of an epoch.

    Args:
        settings: The callback, with the user's choices.
        trainer: The Trainer of the fit.
        module: The module that is trained.
        run_files: The files around the checkpoints, with their folder.
        stop_request: The signals at which the fit stops.
        installed: What is installed for the time of the fit is entered on it.
    """

    def __init__(
        self,
        settings: AutoResume,
        trainer: Trainer,
        module: LightningModule,
        run_files: RunFiles,
        stop_request: StopRequest,
        installed: ExitStack,
    ) -> None:
        self.settings, self.trainer, self.module, self.run_files = settings, trainer, module, run_files
        self.resumed: Manifest | None = None
        self.writer = CheckpointWriter(settings, trainer, module, run_files)
        self.status = RunStatus(trainer, run_files.folder)
        self.selection: CheckpointSelection
        self.configuration: RunConfiguration
        self.rank: RankState
        self.rank_agreement: RankAgreement
        self._pending: PendingResume | None = None  # until the fit is where the checkpoint was saved
        self._is_running = False  # before that, a tuner may train in a fit of its own
        self._loader_origins: dict[str, Any] = {}  # what "training" and "validation" loaders were created from
        self._epoch_start: Mapping[str, Any] | None = None  # the state before the hooks of the epoch's start
        self._last_step = -1
        self._checkpoint: dict[str, Any] | None = None  # until the optimizers are there
        self._changed_states: dict[str, Any] = {}  # of optimizers and schedulers, where another start changed them
        self.stop_request = stop_request
        self.loaders = LoaderTracker(self.stop_request)
        self._installed = installed
        installed.callback(self.stop_request.close)
        installed.callback(self.loaders.close)
        installed.enter_context(call_after_train_end(trainer, self.after_train_end))
        installed.enter_context(observe_fit(trainer, self))
        installed.enter_context(override_resume_checkpoint(trainer, self._select_checkpoint))

    # -- before the first batch

    def _select_checkpoint(self, user_path: str | os.PathLike[str] | None) -> tuple[Path, dict[str, Any]] | None:
        """Read the newest checkpoint of this run, and keep what is restored later than the Trainer's own part."""
        self.selection = CheckpointSelection(self.settings, self.trainer, self.module, self.run_files)
        self.configuration = RunConfiguration(self.settings, self.trainer, self.module)
        self._installed.callback(self.configuration.close)
        newest = self.selection.newest(user_path)
        if newest is None:
            self.rank = RankState(self.trainer, self.module)
            return None
        self.resumed, path = newest
        self._checkpoint = checkpoint = self.selection.load(path)
        part = checkpoint[CHECKPOINT_KEY]
        before, ranks = part["shared"].get("configuration"), len(part["ranks"])
        self.configuration.resume_from(before, self.resumed, str(path.parent), ranks)
        self.rank = RankState(self.trainer, self.module)
        pending = PendingResume.from_checkpoint(self.resumed, path, checkpoint, self.trainer, self.module)
        self._pending, self._loader_origins = pending, dict(pending.rank_state["made"])
        if pending.save_point is SavePoint.FIT_END:
            self.selection.forget()  # nothing is restored once more
        resize_to_state_dict(self.module, checkpoint["state_dict"], pending.shared_state["buffers"])
        self._installed.enter_context(disable_finders(self.trainer))
        extended = f", extended {self.configuration.extended}" if self.configuration.extended else ""
        position = f"resumes at epoch {self.resumed.epoch}, step {self.resumed.step}{extended}"
        is_over = self.resumed.finished and not extended
        rank_zero_info(f"AutoResume: the run {'had finished' if is_over else position} ({path}).")
        return path, checkpoint

    def on_optimizers_created(self) -> None:
        """Decide on what another start changed, before hooks of the fit's start and before optimizers are restored."""
        checkpoint, self._checkpoint = self._checkpoint, None
        if checkpoint is None:
            self.configuration.check_optimizers(None)
            return
        self.configuration.check_optimizers(checkpoint)
        pending = self._pending
        if pending is None or not self.configuration.changed_states:
            return
        self._changed_states = copy.deepcopy({name: checkpoint[name] for name in ("optimizer_states", "lr_schedulers")})
        outline = {**pending.rank_state.get("outline", {})}
        outline |= {name: self.rank.outline()[name] for name in ("optimizers", "schedulers")}
        rank_state = {**pending.rank_state, "outline": outline}
        if rank_state["epoch"] is not None and not pending.shared_state["groups"]:
            groups = param_group_names(self.module, self.trainer.optimizers)
            rank_state["epoch"] = {**rank_state["epoch"], "groups": groups}
        changed = {change.name for change in self.configuration.changes}
        settings = {
            name: one for name, one in pending.shared_state["settings"].items() if f"Trainer.{name}" not in changed
        }
        self._pending = replace(
            pending, rank_state=rank_state, shared_state={**pending.shared_state, "settings": settings}
        )

    def on_fit_start(self) -> None:
        """Note what later saves are compared with; restore weights that were loaded in another precision."""
        if self.trainer.is_global_zero:
            self.run_files.on_fit_start(self.resumed)
        raise_for_problem(self.trainer.strategy.broadcast(self.run_files.problem))
        self.rank_agreement = RankAgreement()
        self.rank.on_fit_start(self._pending.shared_state if self._pending is not None else {})
        if self._pending is None:
            return
        self._check_optimizers(self._pending)
        self.rank.settings.allow_epoch(self._pending.manifest.epoch, self._pending.shared_state)
        weights = self._pending.saved_weights
        with torch.no_grad():
            for name, value in state_dict_tensors(self.module.state_dict()).items():
                if name in weights:
                    value.copy_(weights[name])
        self._pending = replace(self._pending, saved_weights={})

    def _check_optimizers(self, pending: PendingResume) -> None:
        """Refuse optimizers of other classes than those whose states are about to be loaded."""
        known = pending.rank_state.get("outline", {}).get("optimizers", {})
        present = self.rank.outline()["optimizers"]
        others = [name for name in known.keys() & present.keys() if known[name] != present[name]]
        if others and self.settings.on_change != "old":
            saved, now = known[others[0]], present[others[0]]
            raise MisconfigurationException(
                f"AutoResume: the checkpoint {pending.path} has the state of {saved}, and configure_optimizers now "
                f"returned {now}: a hook exchanged it in the fit, or the code has changed. Return {saved} from "
                "configure_optimizers, or choose another dirpath to start anew. With on_change='old' the state is "
                "loaded nevertheless."
            )

    def on_signals_registered(self) -> None:
        """Handle signals from here on; restore the results of a fit that had finished."""
        self._is_running = True
        if not self.stop_request.install_handlers():
            rank_zero_warn("AutoResume: signals are handled in the main thread only; periodic saves are still written.")
        EARLY_SIGNALS.claim(self.stop_request)
        EARLY_SIGNALS.leave(self.settings)
        EARLY_SIGNALS.deliver()  # such as that at which SLURM requeues the job
        pending = self._pending
        self.rank.settings.on_limits_given({} if pending is None else pending.shared_state)
        if pending is not None and pending.save_point is SavePoint.FIT_END:
            self.rank.restore_structure(pending.shared_state)
            self.rank.restore_epoch_results(pending.rank_state)
            self._discard_later_rows()
            for swa in callbacks_of_type(self.trainer, StochasticWeightAveraging):
                restore_swa_scheduler(self.trainer, swa)
            skip_sanity_check(self.trainer)

    def sampler_epoch(self, epoch: int) -> int:
        """Return the epoch that is resumed, also where loaders are created before the loops are restored."""
        return int(self._pending.rank_state["loaders"]["epoch"]) if self._pending is not None else epoch

    def before_loaders_created(self, kind: str, epoch: int) -> int:
        """Note what loaders are created from, or restore it: epoch, random states, and attributes such as a size."""
        if self._pending is None:
            self._loader_origins[kind] = {
                "epoch": epoch,
                RNG_STATE_KEY: pack_rng_state(),
                "attributes": self.rank.attribute_changes(),
                "settings": self.rank.settings.changed_settings(),
            }
        elif kind in self._loader_origins:
            origin = self._loader_origins[kind]
            self.rank.settings.restore_settings(origin.get("settings", {}))
            self.rank.restore_attributes(origin["attributes"])
            unpack_rng_state(origin[RNG_STATE_KEY])
            return int(origin.get("epoch", epoch))
        return epoch

    def after_loaders_created(self, kind: str) -> None:
        """Restore the attributes of a fit that had finished: nothing may follow that restores them later."""
        if kind == "training":
            shared_state = {} if self._pending is None else self._pending.shared_state
            self.rank.settings.on_limits_given(shared_state, LOADER_LIMITS)
        if self._pending is not None and self._pending.save_point is SavePoint.FIT_END:
            self.rank.restore_attributes(self._pending.rank_state["attributes"])

    def on_train_loaders_ready(self, loaders: list[Any], all_sized: bool) -> None:
        """Track the loaders, from the position that is resumed."""
        pending = self._pending
        scale = self.configuration.check_loaders(loaders, resumes=pending is not None)
        if pending is not None and scale is not None:
            changed = self.loaders.with_other_batches(pending.rank_state["loaders"], scale)
            self._pending = pending = replace(pending, rank_state={**pending.rank_state, "loaders": changed})
        self.loaders.track_train(loaders, all_sized, None if pending is None else pending.rank_state["loaders"])

    def on_validation_loaders_ready(self, loaders: list[Any], reloaded: bool) -> None:
        """Track the loaders; those that the Trainer reloads after the resume are others than those that were saved."""
        self.loaders.track_validation(loaders, is_saved=not reloaded or self._pending is not None)

    def on_train_start(self) -> None:
        """Continue after the end of a fit that was given more epochs."""
        pending = self._pending
        if pending is not None and pending.save_point is SavePoint.FIT_END:
            self._pending = None
            clear_restart_flags(self.trainer)
            self.rank.detach(self.loaders.datasets(), pending.rank_state.get("data_held_by", ()))
            self.loaders.create_iterators(self.trainer, pending.rank_state["loaders"])
            self.rank.restore_structure(pending.shared_state)
            self.rank.restore(pending.rank_state)
            self._load_changed_optimizers()
            unrestored, drawn_anew = self.rank.unrestored(pending.rank_state), self._drawn_anew(pending)
            report_differences(self.trainer, self._unknown(unrestored), drawn_anew, self.loaders.differences)
            self.configuration.set_new_values()

    def is_resuming(self) -> bool:
        """Return whether the epoch that begins resumes in the middle."""
        return self._is_running and self._pending is not None

    def before_epoch_start_hooks(self) -> None:
        """Note the state that the hooks of the epoch's start begin with."""
        if self._pending is None:
            self._epoch_start = {
                RNG_STATE_KEY: pack_rng_state(),
                "groups": param_group_names(self.module, self.trainer.optimizers),
                "attributes": self.rank.note_changes(),
            }

    def before_epoch_iterators(self) -> None:
        """Note the random state that determines the epoch's order; or the position, if the batches changed."""
        if self._pending is not None and self._is_running:
            self.loaders.set_num_batches_done(self.trainer, self._pending.rank_state["loaders"])
        elif self._pending is None:
            self.loaders.record_rng_state("iterator")

    def before_first_batch(self, finish_batch: Callable[[], None]) -> None:
        """Resume in the middle of the epoch; or save between two epochs."""
        if not self._is_running:
            return
        if self._pending is not None and self._ask_ranks()[0]:
            self._stop()  # the checkpoint stays the newest
        pending, self._pending = self._pending, None
        if pending is not None:
            self._load_mid_epoch_state(pending)
            self._last_step = self.trainer.global_step
            self.writer.skip_step(self._last_step)
            if pending.save_point is SavePoint.AFTER_BATCH:
                finish_batch()
            return
        self.rank.note_changes(after_hooks=True)  # those of the epoch's start are repeated where it is resumed
        self.loaders.record_rng_state("batch")
        self.loaders.record_first_batch(self.trainer)
        epoch = self.trainer.current_epoch
        stop_requested, time_over = self._ask_ranks()
        if epoch > 0 and (stop_requested or time_over or self.writer.is_epoch_due(epoch)):
            self._save(SavePoint.EPOCH_START)
        if stop_requested:
            self._stop()

    def _load_mid_epoch_state(self, pending: PendingResume) -> None:
        """Restore the middle of an epoch: repeat the hooks of its start, move the loaders, then restore all state."""
        trainer, state = self.trainer, pending.rank_state
        clear_restart_flags(trainer)
        self.rank.detach(self.loaders.datasets(), state.get("data_held_by", ()))
        self.rank.restore_structure(pending.shared_state)
        self._epoch_start = state["epoch"]
        if self._epoch_start is not None:
            self.rank.restore_attributes(self._epoch_start["attributes"], before_hooks=True)
            unpack_rng_state(self._epoch_start[RNG_STATE_KEY])
            replay_epoch_start(trainer, self.module, self._epoch_start["groups"], lambda: self._reload_weights(pending))
            for swa in callbacks_of_type(trainer, StochasticWeightAveraging):
                restore_swa_scheduler(trainer, swa)  # it creates none in the epoch for batch statistics
            self.rank.restore_structure(pending.shared_state)
        self.rank.note_changes(after_hooks=True)
        self.loaders.restore_positions(trainer, state["loaders"])
        self.rank.restore(state)
        self._load_changed_optimizers()
        unrestored = find_differences(trainer, self.rank, pending, lambda: self._with_changes(pending))
        self.selection.forget()
        report_differences(trainer, self._unknown(unrestored), self._drawn_anew(pending), self.loaders.differences)
        self.configuration.set_new_values()
        self._discard_later_rows()

    def _load_changed_optimizers(self) -> None:
        """Load what another start changed once more: wrappers of optimizers keep options that were restored."""
        for optimizer, state in zip(
            self.trainer.optimizers, self._changed_states.get("optimizer_states", ()), strict=False
        ):
            optimizer.load_state_dict(state)

    def _unknown(self, paths: Sequence[str]) -> list[str]:
        """Return the paths without those in optimizers, if another start changed these."""
        return [path for path in paths if not (self._changed_states and path.startswith("optimizers."))]

    def _drawn_anew(self, pending: PendingResume) -> list[str]:
        paths = self.rank.drawn_anew(pending.rank_state)
        return [path for path in paths if not self.configuration.is_known_change(path)]

    def _with_changes(self, pending: PendingResume) -> dict[str, Any]:
        """Return the checkpoint that is resumed, with what another start changed in it."""
        return {**self.selection.loaded(pending.path), **self._changed_states}

    def _reload_weights(self, pending: PendingResume) -> None:
        """Load weights and optimizer states from the checkpoint that is resumed once more."""
        checkpoint = {**self.selection.load(pending.path), **self._changed_states}
        self.module.on_load_checkpoint(checkpoint)
        self.module.load_state_dict(checkpoint["state_dict"], strict=False)
        for optimizer, state in zip(self.trainer.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def _discard_later_rows(self) -> None:
        """Remove from the loggers what was logged after the save that is resumed, by this process as well."""
        if self.trainer.is_global_zero and self.resumed is not None:
            self.run_files.discard_rows_after(self.resumed)

    # -- while it trains

    def after_batch(self) -> None:
        """Save or stop, if it is time for that."""
        if not self._is_running:
            return
        step = self.trainer.global_step
        made_step = step != self._last_step or self.module.automatic_optimization
        if not is_at_step_boundary(self.trainer) or not made_step:
            return
        # a batch may have several steps, as with several optimizers
        before, self._last_step = self._last_step if self._last_step >= 0 else max(step - 1, 0), step
        stop_requested, time_over = self._ask_ranks()
        if stop_requested or time_over or self.writer.is_step_due(before, step):
            self._save(SavePoint.AFTER_BATCH)
        if stop_requested:
            self._stop()
        self.status.write_if_due()

    def after_train_end(self) -> None:
        """Save the end of the fit, after all hooks that may change it."""
        if not self._is_running or self.settings not in callbacks_of(self.trainer):
            return  # the fit of a tuner, which leaves the callbacks out
        self._save(SavePoint.FIT_END)
        self.status.write("finished")

    def on_fit_end(self) -> None:
        """Note what was logged after the end; restore the random state of a fit that had finished before."""
        if self.writer.final_manifest is not None and self.trainer.is_global_zero:
            self.run_files.on_fit_end(self.writer.final_manifest)
        if self._pending is not None:
            clear_restart_flags(self.trainer)
            for swa in callbacks_of_type(self.trainer, StochasticWeightAveraging):
                restore_swa_max_epochs(self.trainer, swa)
            restore_rng_state(self._pending.rank_state["rng"])
            report_differences(self.trainer, self.rank.unrestored(self._pending.rank_state), (), ())

    def _ask_ranks(self) -> list[bool]:
        """Return whether any rank was asked to stop, and whether it is time for a save."""
        return self.rank_agreement.any_rank(bool(self.stop_request.received), self.writer.is_time_over())

    def _save(self, save_point: SavePoint) -> None:
        trainer = self.trainer
        at_end = save_point is SavePoint.FIT_END or (save_point is SavePoint.AFTER_BATCH and is_last_batch(trainer))
        state = self.rank.capture(self.loaders.datasets())
        state |= {
            "made": self._loader_origins,
            "epoch": self._epoch_start,
            "loaders": self.loaders.state(trainer, at_end),
        }
        state["not_saved"] = self.rank.unsaved_names(state)
        self.writer.save(save_point, state, self._shared_state, self.selection.identity)

    def _shared_state(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        return {**self.rank.shared_state(checkpoint), "configuration": self.configuration.saved()}

    def _stop(self) -> NoReturn:
        name = self.stop_request.received or "a signal to another rank"
        step = self.trainer.global_step
        rank_zero_info(f"AutoResume: stopped by {name} at step {step}. Run the same command again to resume.")
        self.status.write("stopped")
        close_workers(self.trainer)  # nobody else does in a forked rank
        raise SystemExit(self.settings.exit_code)
