"""The parts of a fit's state that the Trainer and its callbacks hold."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.callbacks import (
    capture_lottery_tickets,
    restore_lottery_tickets,
    restore_swa_max_epochs,
    restore_swa_scheduler,
)
from lightning_tricks._lightning_compat.checkpoints import checkpoint_callback_state, restore_checkpoint_callback_state
from lightning_tricks._lightning_compat.fit import LOADER_LIMITS, loop_limits, set_loop_limits
from lightning_tricks._lightning_compat.flavor import (
    Callback,
    LightningModule,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    Trainer,
)
from lightning_tricks._lightning_compat.guards import set_private
from lightning_tricks._lightning_compat.results import capture_loop_state, named_callbacks, restore_loop_state
from lightning_tricks._lightning_compat.trainer import callbacks_of, callbacks_of_type
from lightning_tricks._shared.rng import capture_rng_state, restore_rng_state
from lightning_tricks.auto_resume.core.attributes.object_walk import ObjectWalk
from lightning_tricks.auto_resume.core.configuration import SCHEDULE_OPTIONS
from lightning_tricks.auto_resume.parts import ChangedValues, ComparedPart, Part, Phase, SavedState, move_to_device

# Those that shape the training
# Attributes of the Trainer that callbacks set while it runs, as GradientAccumulationScheduler does with the first, and
# that no checkpoint of Lightning 2.6.6 holds (checkpoint_connector.py, `dump_checkpoint`).
SHAPING_SETTINGS = (
    "accumulate_grad_batches",
    "check_val_every_n_epoch",
    "gradient_clip_algorithm",
    "gradient_clip_val",
    "limit_train_batches",
    "limit_val_batches",
    "overfit_batches",
    "reload_dataloaders_every_n_epochs",
    "val_check_interval",
)

# How the memory of a type of callbacks within an epoch is captured and restored, beside `TrickCallback`, which knows it
_MEMORIES: tuple[tuple[type[Callback], Callable[[Any], dict[str, Any]], Callable[[Any, Any], object]], ...] = (
    (ModelCheckpoint, checkpoint_callback_state, restore_checkpoint_callback_state),
    (ModelPruning, capture_lottery_tickets, restore_lottery_tickets),
)


class RandomStates(ComparedPart):
    """The global random number generators, on the CPU and on CUDA devices."""

    name = "rng"

    def capture(self, walk: ObjectWalk) -> dict[str, Any]:
        """Return the states of the generators."""
        # Not in a checkpoint of Lightning (#18780): after a resume, dropout and shuffling would draw other numbers.
        return {"rng": capture_rng_state()}

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Restore the states of the generators."""
        restore_rng_state(saved.rank["rng"])


class TrainerSettings(Part):
    """What callbacks may change of a Trainer: its settings, when schedulers step, and the limits of its loops."""

    name = "settings"

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        super().__init__(trainer, module)
        self._settings = ChangedValues(self._present_settings())
        self._schedulers = ChangedValues({})
        # StochasticWeightAveraging, for one, adds an epoch to `max_epochs` in `on_fit_start`.
        self._limits = ChangedValues(loop_limits(trainer))

    def note(self, phase: Phase) -> None:
        """Note when schedulers step as soon as there are some, limits when they are given, and what hooks changed."""
        if phase is Phase.FIT_START:
            self._schedulers = ChangedValues(self._present_schedulers())
        elif phase in (Phase.LIMITS_GIVEN, Phase.LOADERS_CREATED):
            now = loop_limits(self.trainer)
            self._limits.initial |= {name: now[name] for name in self._given_limits(phase)}
        # For its memory of what was other than at first, which the next save reads.
        elif phase in (Phase.BEFORE_HOOKS, Phase.AFTER_HOOKS):
            self.capture_shared({})

    def capture_shared(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is other than at first, or was so at an earlier call."""
        limits = self._limits.changes(loop_limits(self.trainer))
        return {
            "settings": self.changed_settings(),
            "schedulers": self._schedulers.changes(self._present_schedulers()),
            "limits": {name: [self._limits.initial[name], now] for name, now in limits.items()},
        }

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Restore the limits when their first values are given, and all of it before and after the hooks of an epoch.

        Some hooks before the first epoch change the number of epochs as well: the same limits must be given as then.
        """
        limits = saved.shared.get("limits", {})
        if phase is Phase.FIT_START:  # the Trainer refuses to restore an epoch beyond its `max_epochs`
            _, after = limits.get("max_epochs", (None, None))
            given = self.trainer.max_epochs
            # checkpoint_connector.py, `restore_loops`: a run that a callback had extended could not be resumed with its
            # own script.
            if after is not None and given is not None and 0 <= given < saved.manifest.epoch <= after:
                set_loop_limits(self.trainer, {"max_epochs": after})
        elif phase in (Phase.LIMITS_GIVEN, Phase.LOADERS_CREATED):
            now = loop_limits(self.trainer)
            for name in limits.keys() & self._given_limits(phase):
                before, after = limits[name]
                # Neither of them: the user has given another limit for this start, and it holds.
                if now[name] in (before, after):
                    self._limits.initial[name] = before
                    self._limits.note([name])
                    set_loop_limits(self.trainer, {name: after})
        else:
            self.restore_settings(saved.shared["settings"])
            schedulers = saved.shared.get("schedulers", {})
            self._schedulers.note(schedulers)
            for place in schedulers.keys() & self._present_schedulers():
                number, _, name = place.partition(".")
                setattr(self.trainer.lr_scheduler_configs[int(number)], name, schedulers[place])
            unchanged = [name for name, (before, _) in limits.items() if self._limits.initial[name] == before]
            set_loop_limits(self.trainer, {name: limits[name][1] for name in unchanged})

    def changed_settings(self) -> dict[str, Any]:
        """Return the settings that are other than at first, or were so at an earlier call."""
        return self._settings.changes(self._present_settings())

    def restore_settings(self, settings: Mapping[str, Any]) -> None:
        """Restore what `changed_settings` returned."""
        self._settings.note(settings)
        # As attributes that the Trainer has: one that a new Lightning renamed would be added, and read by nobody.
        set_private(self.trainer, **settings)

    def _given_limits(self, phase: Phase) -> Collection[str]:
        """Return the names of the limits that the Trainer sets last before a phase."""
        # `FitLoop.setup_data` computes these of the loaders each time, and would undo what was restored before.
        return LOADER_LIMITS if phase is Phase.LOADERS_CREATED else loop_limits(self.trainer).keys() - LOADER_LIMITS

    def _present_settings(self) -> dict[str, Any]:
        return {name: getattr(self.trainer, name) for name in (*SHAPING_SETTINGS, "log_every_n_steps")}

    def _present_schedulers(self) -> dict[str, Any]:
        configs = self.trainer.lr_scheduler_configs
        pairs = [(number, name) for number in range(len(configs)) for name in SCHEDULE_OPTIONS]
        return {f"{number}.{name}": getattr(configs[number], name) for number, name in pairs}


class LoopResults(ComparedPart):
    """What the loops have logged in the epoch, and when they reloaded loaders."""

    name = "trainer"

    def capture(self, walk: ObjectWalk) -> dict[str, Any]:
        """Return what `capture_loop_state` does."""
        return {"trainer": move_to_device(capture_loop_state(self.trainer), "cpu")}

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Restore the values and their metrics on the device of the fit."""
        restore_loop_state(self.trainer, move_to_device(saved.rank["trainer"], self.trainer.strategy.root_device))


class CallbackStates(ComparedPart):
    """What callbacks remember beside the state dicts that the Trainer saves, which are those of rank zero."""

    name = "callbacks"

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        super().__init__(trainer, module)
        self._initial = {*named_callbacks(trainer)}

    def capture(self, walk: ObjectWalk) -> dict[str, Any]:
        """Return the states by the `state_key` of the callbacks."""
        found: dict[str, Any] = {}
        for callback in callbacks_of(self.trainer):
            # Lightning gathers nothing: the states in its checkpoint are those of the process that writes it.
            state_dict = callback.state_dict() if self.trainer.world_size > 1 else {}
            state = {"in_epoch": _memory_of(callback)[0](), "state_dict": state_dict}
            if any(state.values()):
                found[callback.state_key] = state
        now = {*named_callbacks(self.trainer)}
        changes = {"added": now - self._initial, "removed": self._initial - now}
        changed = [
            f"{name} (a callback that was {change} in the fit)"
            for change, names in changes.items()
            for name in sorted(names)
        ]
        return {"callbacks": move_to_device(found, "cpu"), "changed_callbacks": changed}

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Restore the states; of a fit that had finished, those of tricks and the memory of ModelCheckpoint alone."""
        device, has_ended = self.trainer.strategy.root_device, phase is Phase.RESULTS
        for callback in callbacks_of(self.trainer):
            state = saved.rank["callbacks"].get(callback.state_key, {})
            # Of a fit that had ended, what Lightning's own callbacks hold is for epochs that do not come.
            if state.get("state_dict") and (not has_ended or isinstance(callback, TrickCallback)):
                callback.load_state_dict(state["state_dict"])
            if state.get("in_epoch") and (not has_ended or isinstance(callback, ModelCheckpoint)):
                _memory_of(callback)[1](move_to_device(state["in_epoch"], device))

    def differences(self, saved: SavedState, now: Mapping[str, Any]) -> Iterable[str]:
        """Return the key paths of what is not as it was saved; another number of ranks has other states."""
        return () if saved.world_size_changed else super().differences(saved, now)


class WeightAveraging(Part):
    """What StochasticWeightAveraging does at the start and the end of a fit, which a resumed one skips."""

    name = "averaging"

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Restore its scheduler, as it creates none in its epoch for batch statistics; at the end remove that epoch."""
        restore_averaging = restore_swa_max_epochs if phase is Phase.FIT_END else restore_swa_scheduler
        for callback in callbacks_of_type(self.trainer, StochasticWeightAveraging):
            restore_averaging(self.trainer, callback)


def _memory_of(callback: Any) -> tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], object]]:
    """Return what captures, and what restores, what a callback remembers within an epoch."""
    # Lightning's callbacks have no method for it, and their classes cannot be given one.
    for kind, capture, restore in _MEMORIES:
        if isinstance(callback, kind):
            return partial(capture, callback), partial(restore, callback)
    return getattr(callback, "mid_epoch_state", dict), lambda state: callback.load_mid_epoch_state(state)
