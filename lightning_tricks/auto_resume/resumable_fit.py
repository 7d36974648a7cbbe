"""One fit that can be stopped at any moment: when it is saved, how it stops, and when which state is restored."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

from lightning_tricks._lightning_compat.fit import (
    call_after_teardown,
    call_after_train_hook,
    clear_restart_flags,
    disable_finders,
    is_at_step_boundary,
    is_last_batch,
    skip_sanity_check,
)
from lightning_tricks._lightning_compat.fit_observer import FitObserver, observe_fit
from lightning_tricks._lightning_compat.flavor import (
    Callback,
    LightningModule,
    MisconfigurationException,
    Trainer,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.loaders import close_workers
from lightning_tricks._lightning_compat.sharded import is_sharding
from lightning_tricks._lightning_compat.trainer import callbacks_of
from lightning_tricks._shared.rng import capture_rng_state, restore_rng_state
from lightning_tricks._shared.tensors import gather_objects, reshard_fsdp2
from lightning_tricks.auto_resume.checkpoint_selection import CheckpointSelection
from lightning_tricks.auto_resume.checkpoint_writer import CheckpointWriter
from lightning_tricks.auto_resume.core.attributes.model_structure import param_group_names, resize_to_state_dict
from lightning_tricks.auto_resume.core.data.rng_state import RNG_STATE_KEY
from lightning_tricks.auto_resume.core.signals import EARLY_SIGNALS, RankAgreement, RayDrains, StopRequest, signal_names
from lightning_tricks.auto_resume.fit_state import FitState
from lightning_tricks.auto_resume.loader_tracker import LoaderTracker
from lightning_tricks.auto_resume.moved_positions import continued_positions
from lightning_tricks.auto_resume.parts import Phase, SavedState, SavePoint, Settings
from lightning_tricks.auto_resume.run_configuration import RunConfiguration
from lightning_tricks.auto_resume.run_files import RunFiles


class ResumableFit(FitObserver):
    """Saves a fit at the boundaries of its steps, stops it there when asked to, and resumes it from there.

    A boundary is the moment after a batch with an optimizer step, when the batch is done and logged and before the
    validation that may follow; or the moment before the first batch of an epoch.

    It is created where the Trainer would read a checkpoint, after all `setup` hooks and before the strategy's setup:
    only then the module is what a checkpoint is compared with. It reads the newest checkpoint of the run, and keeps
    what is restored later than the Trainer's own part.

    Args:
        callback: The callback whose fit it is.
        settings: The choices of the user.
        trainer: The Trainer of the fit.
        module: The module that is trained.
        run_files: The files around the checkpoints, with their folder.
        stop_request: The signals at which the fit stops.
        installed: What is installed for the time of the fit is entered on it.
        user_path: The `ckpt_path` that the user gave to the Trainer, or that Lightning found.

    Attributes:
        resumed_from: The path of the checkpoint that is resumed with what it holds, for the Trainer; None for none.
    """

    def __init__(
        self,
        callback: Callback,
        settings: Settings,
        trainer: Trainer,
        module: LightningModule,
        run_files: RunFiles,
        stop_request: StopRequest,
        installed: ExitStack,
        user_path: str | os.PathLike[str] | None,
    ) -> None:
        self.callback, self.settings, self.trainer, self.module = callback, settings, trainer, module
        self.run_files, self._installed = run_files, installed
        self.writer = CheckpointWriter(settings, trainer, module, run_files)
        run_files.await_save = self.writer.wait
        self.stop_request, self.loaders = stop_request, LoaderTracker(trainer, module, stop_request)
        self.drains, self.rank_agreement = RayDrains(trainer.world_size), RankAgreement()
        self._is_running = False  # before that, a tuner may train in a fit of its own
        self._epoch_start: Mapping[str, Any] | None = None  # the state before the hooks of the epoch's start
        self._last_step = -1
        for close in (self.writer.finish_sending, self.stop_request.close, self.loaders.close, self.writer.close):
            installed.callback(close)
        installed.enter_context(call_after_train_hook(trainer, "end", self.after_train_end))
        installed.enter_context(observe_fit(trainer, self))
        self.selection = CheckpointSelection(settings, trainer, module, run_files)
        self.configuration = RunConfiguration(settings, trainer, module)
        newest = self.selection.newest(user_path)
        if trainer.is_global_zero:
            run_files.on_selected(newest and newest[0], user_path)
        saved, checkpoint = None, dict[str, Any]()
        if newest is not None:
            checkpoint = self.selection.load(newest[1])
            saved = SavedState.from_checkpoint(*newest, checkpoint, trainer, module)
            self.configuration.resume_from(saved, checkpoint)
        self.state = FitState(trainer, module, self.loaders, self.configuration)
        self.resumed_from = None if saved is None else (saved.path, checkpoint)
        self._resumed = None if saved is None else saved.manifest
        self._pending = saved  # until the fit is where the checkpoint was saved
        # what "training" and "validation" loaders were created from
        self._loader_origins: dict[str, Any] = {} if saved is None else dict(saved.rank["made"])
        if saved is None:
            return
        if self._finished is not None:
            self.selection.forget()  # nothing is restored once more
        resize_to_state_dict(module, checkpoint["state_dict"], saved.shared["buffers"])
        installed.enter_context(disable_finders(trainer))

    # -- before the first batch

    def on_optimizers_created(self) -> None:
        """Decide on what another start changed, before hooks of the fit's start and before optimizers are restored."""
        resumed_from, self.resumed_from = self.resumed_from, None  # which is not needed any more
        self.configuration.check_optimizers(resumed_from and resumed_from[1])
        if (saved := self._pending) is None:
            return
        outline, present = saved.rank["outline"], self.state.outline.now()
        if not self.configuration.changed_states:
            _check_classes(saved, outline["optimizers"], present["optimizers"])
            return
        # what follows from the changes is not a difference from what was saved
        outline = {**outline, "optimizers": present["optimizers"], "schedulers": present["schedulers"]}
        rank = {**saved.rank, "outline": outline}
        if rank["epoch"] is not None and not saved.shared["groups"]:
            rank["epoch"] = {**rank["epoch"], "groups": param_group_names(self.module, self.trainer.optimizers)}
        changed = {change.name for change in self.configuration.changes}
        settings = {name: old for name, old in saved.shared["settings"].items() if f"Trainer.{name}" not in changed}
        self._pending = replace(saved, rank=rank, shared={**saved.shared, "settings": settings})

    def on_fit_start(self) -> None:
        """Note what later saves are compared with, and restore what the states of optimizers are loaded into."""
        self._reach(Phase.FIT_START)
        if self._pending is not None:
            self._pending = replace(self._pending, weights={})

    def _reach(self, phase: Phase) -> None:
        self.state.note(phase)
        if self._pending is not None:
            self.state.restore(self._pending, phase)

    def before_signals_registered(self) -> None:
        """Let the Trainer find the handlers of the process, which it restores at its end."""
        EARLY_SIGNALS.restore_handlers()

    def on_signals_registered(self) -> None:
        """Handle signals from here on; restore the results of a fit that had finished."""
        self._is_running = True
        if not self.stop_request.install_handlers() and not self.drains.can_ask:
            rank_zero_warn(
                "AutoResume: Python handles signals in the main thread only, so a signal ends this fit without a save: "
                "call trainer.fit in the main thread, or save more often."
            )
        self._reach(Phase.LIMITS_GIVEN)
        if (saved := self._finished) is not None:
            self.state.restore(saved, Phase.RESULTS)
            self._discard_later_rows()
            skip_sanity_check(self.trainer)

    @property
    def _finished(self) -> SavedState | None:
        """The saved state of a fit that had finished, until it continues; None if it had not."""
        saved = self._pending
        return saved if saved is not None and saved.save_point is SavePoint.FIT_END else None

    def sampler_epoch(self, epoch: int) -> int:
        """Return the epoch that is resumed, also where loaders are created before the loops are restored."""
        return int(self._pending.rank["loaders"]["epoch"]) if self._pending is not None else epoch

    def before_loaders_created(self, kind: str, epoch: int) -> int:
        """Note what loaders are created from, or restore it: epoch, random states, and attributes such as a size."""
        if self._pending is None:
            self._loader_origins[kind] = {
                "epoch": epoch,
                RNG_STATE_KEY: capture_rng_state(),
                "attributes": self.state.attributes.changes(),
                "settings": self.state.settings.changed_settings(),
            }
        elif kind in self._loader_origins:
            origin = self._loader_origins[kind]
            self.state.settings.restore_settings(origin.get("settings", {}))
            self.state.attributes.restore_changes(origin["attributes"])
            restore_rng_state(origin[RNG_STATE_KEY])
            return int(origin.get("epoch", epoch))
        return epoch

    def after_loaders_created(self, kind: str) -> None:
        """Restore the limits that follow from loaders, and attributes of a fit that had finished."""
        if kind == "training":
            self._reach(Phase.LOADERS_CREATED)
        if (saved := self._finished) is not None:
            self.state.restore(saved, Phase.RESULTS_WITH_LOADERS)

    def on_train_loaders_ready(self, loaders: list[Any], all_sized: bool) -> None:
        """Track the loaders, from the position that is resumed."""
        saved = self._pending
        scale = self.configuration.check_loaders(loaders, resumes=saved is not None)
        if saved is not None:
            positions = continued_positions(loaders, saved, scale, self.settings, self.trainer)
            self._pending = saved = replace(saved, rank={**saved.rank, "loaders": positions})
        self.loaders.track_train(loaders, all_sized, None if saved is None else saved.rank["loaders"])

    def on_validation_loaders_ready(self, loaders: list[Any], reloaded: bool) -> None:
        """Track the loaders; those that the Trainer reloads after the resume are others than those that were saved."""
        self.loaders.track_validation(loaders, is_saved=not reloaded or self._pending is not None)

    def on_train_start(self) -> None:
        """Say where the fit resumes, as nothing refuses it any more; continue after its end if it has more epochs."""
        self.selection.announce()
        if (saved := self._pending) is not None:
            extended = self.configuration.extended
            position = f"epoch {saved.manifest.epoch}, step {saved.manifest.step}"
            position += f", extended {extended}" if extended else ""
            rank_zero_info(f"AutoResume: the run resumes at {position} ({saved.path}).")
        if (saved := self._finished) is not None:
            self._pending = None
            clear_restart_flags(self.trainer)
            self.state.restore(saved, Phase.CONTINUED)
            self._note_differences(saved, self.state.differences_of_results(saved))

    def is_resuming(self) -> bool:
        """Return whether the epoch that begins resumes in the middle."""
        return self._is_running and self._pending is not None

    def before_epoch_start_hooks(self) -> None:
        """Note the state that the hooks of the epoch's start begin with."""
        if self._pending is None:
            self._epoch_start = {
                RNG_STATE_KEY: capture_rng_state(),
                "groups": param_group_names(self.module, self.trainer.optimizers),
                "attributes": self.state.attributes.changes(),
            }
            self.state.note(Phase.BEFORE_HOOKS)

    def before_epoch_iterators(self) -> None:
        """Set the position that is resumed, if the batches changed."""
        if self._pending is not None and self._is_running:
            self.loaders.set_num_batches_done(self._pending.rank["loaders"])

    def before_first_batch(self, finish_batch: Callable[[], None]) -> None:
        """Resume in the middle of the epoch; or save between two epochs."""
        if not self._is_running:
            return
        stop_requested, time_over = self._ask_ranks()
        if (saved := self._pending) is None:
            self.state.note(Phase.AFTER_HOOKS)  # what they changed is repeated where the epoch is resumed
            epoch, every = self.trainer.current_epoch, self.settings.every_n_train_steps
            if every is not None and epoch == 1 and not self.trainer.global_step:
                rank_zero_warn(
                    f"AutoResume: every_n_train_steps={every} saved nothing in the first epoch, as Lightning counted "
                    "no optimizer step. Set every_n_epochs or train_time_interval instead."
                )
            if epoch > 0 and (stop_requested or time_over or self.writer.is_epoch_due(epoch)):
                self._save(SavePoint.EPOCH_START, at_once=stop_requested)
        if stop_requested:
            self._stop()  # a checkpoint that was to be resumed stays the newest
        if saved is not None:
            self._pending = None
            self._resume_epoch(saved)
            self._last_step = self.trainer.global_step
            self.writer.skip_step(self._last_step)
            if saved.save_point is SavePoint.AFTER_BATCH:
                finish_batch()

    def _resume_epoch(self, saved: SavedState) -> None:
        """Restore the middle of an epoch: repeat the hooks of its start, then restore all state, and compare it."""
        clear_restart_flags(self.trainer)
        self.state.restore(saved, Phase.BEFORE_HOOKS)
        self._epoch_start = saved.rank["epoch"]
        if self._epoch_start is not None:
            restore_rng_state(self._epoch_start[RNG_STATE_KEY])
            self.state.replay_epoch_start(self._epoch_start["groups"], lambda: self._reload_weights(saved))
            self.state.restore(saved, Phase.AFTER_HOOKS)
        self.state.note(Phase.AFTER_HOOKS)
        self.state.restore(saved, Phase.BEFORE_BATCH)
        changed = self.configuration.changed_states
        paths = self.state.differences(saved, lambda: {**self.selection.loaded(saved.path), **changed})
        self.selection.forget()
        self._note_differences(saved, paths)
        self._discard_later_rows()

    def _note_differences(self, saved: SavedState, paths: Sequence[str]) -> None:
        """Note what is not as it was saved, except what another start changed, and set that."""
        is_known = self.configuration.is_known_change
        drawn_anew = [path for path in self.state.attributes.drawn_anew(saved) if not is_known(path)]
        paths = [path for path in paths if not is_known(path)]
        if self.configuration.changed_states:
            made_anew = ("optimizers.", "lr_schedulers", "the class of learning rate scheduler")
            paths = [path for path in paths if not path.startswith(made_anew)]
        data = [] if self.configuration.has_other_data else self.loaders.data_differences
        self.state.note_differences(saved, paths, drawn_anew, data)
        self._installed.callback(self.state.report_differences, made_step=False)  # where no step comes
        self.state.restore(saved, Phase.COMPARED)

    def _reload_weights(self, saved: SavedState) -> None:
        """Load weights and optimizer states from the checkpoint that is resumed once more."""
        checkpoint = {**self.selection.load(saved.path), **self.configuration.changed_states}
        self.module.on_load_checkpoint(checkpoint)
        weights = checkpoint.get("current_model_state", checkpoint["state_dict"])  # beside an average of them
        self.module.load_state_dict(weights, strict=False)
        for optimizer, state in zip(self.trainer.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def _discard_later_rows(self) -> None:
        """Remove from the loggers what was logged after the save that is resumed, by this process as well."""
        if self.trainer.is_global_zero and self._resumed is not None:
            self.run_files.discard_rows_after(self._resumed)

    # -- while it trains

    def after_batch(self) -> None:
        """Save or stop, if it is time for that."""
        if not self._is_running:
            return
        self.state.report_differences()
        step = self.trainer.global_step
        # steps that are not Lightning's, as those within a backward pass, are not counted
        made_step = step != self._last_step or step == 0 or self.module.automatic_optimization
        if not is_at_step_boundary(self.trainer) or not made_step:
            return
        # a batch may have several steps, as with several optimizers
        before, self._last_step = self._last_step if self._last_step >= 0 else max(step - 1, 0), step
        stop_requested, time_over = self._ask_ranks()
        if stop_requested or time_over or self.writer.is_step_due(before, step):
            self._save(SavePoint.AFTER_BATCH, at_once=stop_requested)
        if stop_requested:
            self._stop()
        self.writer.write_status_if_due()

    def after_train_end(self) -> None:
        """Save the end of the fit, after all hooks that may change it."""
        if not self._is_running or id(self.callback) not in map(id, callbacks_of(self.trainer)):
            return  # the fit of a tuner, which leaves the callbacks out
        self._save(SavePoint.FIT_END, at_once=True)
        self.writer.write_status("finished")

    def on_fit_end(self) -> None:
        """Note what was logged after the end; restore the random state of a fit that had finished before."""
        self.selection.announce()
        if self.writer.final_manifest is not None and self.trainer.is_global_zero:
            self.run_files.on_fit_end(self.writer.final_manifest)
        self.run_files.on_saved()
        self.writer.finish_on_nodes(first=1)
        if self._pending is not None:
            clear_restart_flags(self.trainer)
            self.state.restore(self._pending, Phase.FIT_END)
            rank_zero_info(f"AutoResume: the run had finished ({self._pending.path}).")
            self.state.note_differences(self._pending, self.state.differences_of_results(self._pending), (), ())
            self.state.report_differences()

    def _ask_ranks(self) -> list[bool]:
        """Return whether any rank was asked to stop, and whether it is time for a save."""
        mine = bool(self.stop_request.received), self.writer.is_time_over(), self.drains.is_due()
        stop_requested, time_over, asks = self.rank_agreement.any_rank(*mine)
        if asks and self.drains.has_news():
            rank_zero_info("AutoResume: Ray is about to lose a node of this run: the next step is saved.")
            self.writer.set_time_over()
        return [stop_requested, time_over]

    def _save(self, save_point: SavePoint, *, at_once: bool) -> None:
        trainer = self.trainer
        if is_sharding(trainer.strategy):
            reshard_fsdp2(self.module)  # a validation leaves whole parameters, other ones than those of optimizers
        at_end = save_point is SavePoint.FIT_END or (save_point is SavePoint.AFTER_BATCH and is_last_batch(trainer))
        state = self.state.capture()
        state |= {"made": self._loader_origins, "epoch": self._epoch_start, "loaders": self.loaders.state(at_end)}
        parts = self.state.capture_rank_tensors, self.state.capture_shared
        self.writer.save(save_point, state, *parts, self.selection.identity, waits=at_once)

    def _stop(self) -> NoReturn:
        ranks = gather_objects(self.stop_request.received)  # the others have saved as well
        name, step = signal_names(ranks)[0], self.trainer.global_step
        rank_zero_info(f"AutoResume: stopped by {name} at step {step}. Run the same command again to resume.")
        self.writer.write_status("stopped")
        if self.run_files.mirror is not None:  # else a launcher ends the other ranks, and this one soon after
            self.writer.finish_on_nodes(first=0)
            self.writer.finish_sending()
            self.trainer.strategy.barrier()
        close_workers(self.trainer)  # nobody else does in a forked rank
        EARLY_SIGNALS.forget()
        call_after_teardown(self.trainer, partial(self.stop_request.leave, ranks, self.trainer.global_rank))
        raise SystemExit(self.settings.exit_code)


def _check_classes(saved: SavedState, known: Mapping[str, str], present: Mapping[str, str]) -> None:
    """Refuse optimizers of other classes than those whose states are about to be loaded."""
    for before, now in zip(known.values(), present.values(), strict=False):
        if before != now:
            raise MisconfigurationException(
                f"AutoResume: the checkpoint {saved.path} has the state of {before}, which a hook created during the "
                f"fit, and configure_optimizers now returned {now}. Return {before} from configure_optimizers, or "
                "choose another dirpath to start a new run."
            )
