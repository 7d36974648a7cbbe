"""What callbacks may change of a Trainer while it runs, and no checkpoint of it holds."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from lightning.pytorch import Trainer

from lightning_tricks._lightning_compat.fit import LOADER_LIMITS, loop_limits, set_loop_limits
from lightning_tricks._lightning_compat.guards import set_private
from lightning_tricks.auto_resume.core.changed_values import ChangedValues
from lightning_tricks.auto_resume.core.optimizer_changes import SCHEDULE_OPTIONS

# Those that shape the training
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
_SETTINGS = (*SHAPING_SETTINGS, "log_every_n_steps")


class TrainerSettings:
    """Finds what changed of a Trainer since its creation: its settings, when schedulers step, and its loops' limits.

    Args:
        trainer: The Trainer of the fit.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._settings = ChangedValues(self._present_settings())
        self._schedulers = ChangedValues({})
        self._limits = ChangedValues(loop_limits(trainer))

    def on_fit_start(self) -> None:
        """Note when the schedulers step, as soon as there are schedulers."""
        self._schedulers = ChangedValues(self._present_schedulers())

    def changed_settings(self) -> dict[str, Any]:
        """Return the settings that are other than at first, or were so at an earlier call."""
        return self._settings.changes(self._present_settings())

    def changes(self) -> dict[str, Any]:
        """Return what is other than at first, or was so at an earlier call, as plain values."""
        limits = self._limits.changes(loop_limits(self._trainer))
        return {
            "settings": self.changed_settings(),
            "schedulers": self._schedulers.changes(self._present_schedulers()),
            "limits": {name: [self._limits.initial[name], now] for name, now in limits.items()},
        }

    def restore_settings(self, settings: Mapping[str, Any]) -> None:
        """Restore what `changed_settings` returned."""
        self._settings.note(settings)
        set_private(self._trainer, **settings)

    def restore(self, changes: Mapping[str, Any]) -> None:
        """Restore what `changes` returned."""
        self.restore_settings(changes["settings"])
        schedulers = changes.get("schedulers", {})
        self._schedulers.note(schedulers)
        for number, config in enumerate(self._trainer.lr_scheduler_configs):
            for name in SCHEDULE_OPTIONS:
                if f"{number}.{name}" in schedulers:
                    setattr(config, name, schedulers[f"{number}.{name}"])
        for name, (before, after) in changes.get("limits", {}).items():
            if self._limits.initial[name] == before:
                set_loop_limits(self._trainer, {name: after})

    def on_limits_given(self, changes: Mapping[str, Any], names: Collection[str] = ()) -> None:
        """Restore limits that changed after the Trainer had been given the same ones as now.

        All hooks before the first epoch must have been called: some of them change the number of epochs as well.

        Args:
            changes: What `changes` returned in another process.
            names: The limits; empty for all that do not come from loaders.
        """
        now, saved = loop_limits(self._trainer), changes.get("limits", {})
        for name in names or now.keys() - LOADER_LIMITS:
            self._limits.initial[name] = now[name]
            before, after = saved.get(name, (None, None))
            if name in saved and now[name] in (before, after):
                self._limits.initial[name] = before
                self._limits.note([name])
                set_loop_limits(self._trainer, {name: after})

    def allow_epoch(self, epoch: int, changes: Mapping[str, Any]) -> None:
        """Let the Trainer restore an epoch beyond its `max_epochs`, if a callback had raised that."""
        _, after = changes.get("limits", {}).get("max_epochs", (None, None))
        given = self._trainer.max_epochs
        if after is not None and given is not None and 0 <= given < epoch <= after:
            set_loop_limits(self._trainer, {"max_epochs": after})

    def _present_settings(self) -> dict[str, Any]:
        return {name: getattr(self._trainer, name) for name in _SETTINGS}

    def _present_schedulers(self) -> dict[str, Any]:
        configs = self._trainer.lr_scheduler_configs
        return {
            f"{number}.{name}": getattr(config, name)
            for number, config in enumerate(configs)
            for name in SCHEDULE_OPTIONS
        }
