"""Conflicts between the keys of a monitor and those that others log: refused on all ranks, as soon as they occur."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks._lightning_compat.logged_values import drop_reset_values, keys_logged_by_others
from lightning_tricks._shared.ranks import gather_objects

STEPS = {"train": "training_step", "val": "validation_step", "test": "test_step"}


class MetricsError(MisconfigurationException, ValueError):
    """A step returned something that cannot be measured, a loader has no batches, or a key is wrong or logged twice."""


class KeyConflicts:
    """Compares the keys of one run of a monitor with those that the module and other callbacks log.

    Args:
        name: The name under which the monitor logs.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._logged: dict[str, set[str]] = {}
        self._compared: set[str] = set()

    def logged_by_others(self, trainer: Trainer) -> dict[str, str]:
        """Return what others have logged on this rank so far in the stage that runs: key -> hook."""
        return keys_logged_by_others(trainer, self.name)

    def compare_in_first_batch(
        self, trainer: Trainer, pl_module: LightningModule, stage: str, expected: set[str]
    ) -> None:
        """Compare keys with what the module's step has logged.

        In an evaluation on several ranks, one may have no batch: there all compare when the evaluation ends.
        """
        if stage in self._compared:
            return
        self._compared.add(stage)
        if trainer.world_size == 1:
            self.refuse(pl_module, expected, self.logged_by_others(trainer))
        elif stage == "train":
            self.refuse(pl_module, expected, merge_logged_keys(gather_objects(self.logged_by_others(trainer))))

    def note_logged(self, trainer: Trainer, stage: str, keys: set[str]) -> None:
        """Remember what the monitor logs at the end of a stage, to find out who logs the same after it."""
        drop_reset_values(trainer, self.name, keys)
        self._logged[stage] = self._logged.get(stage, set()) | keys

    def compare_afterwards(
        self, trainer: Trainer, pl_module: LightningModule, stage: str, expected: set[str] | None = None
    ) -> None:
        """Compare what the monitor has logged, or is expected to log, with what others have logged after it."""
        own = self._logged.pop(stage, set()) if expected is None else expected
        if not own:
            return
        # a training epoch's values are reset before any hook comes; those of an evaluation are not yet
        others = keys_logged_by_others(trainer, self.name, include_reset=stage == "train")
        if trainer.world_size > 1:
            others = merge_logged_keys(gather_objects({key: hook for key, hook in others.items() if key in own}))
        self.refuse(pl_module, own, others)

    def refuse(self, pl_module: LightningModule, own: set[str], others: Mapping[str, str]) -> None:
        """Raise a MetricsError if others log one of the keys."""
        for key in sorted(own & others.keys()):
            hook, module = others[key], type(pl_module).__name__
            other = f"{module}.{hook}" if hook in STEPS.values() else f"{hook} of {module} or of another callback"
            other = hook if hook.startswith("MetricsMonitor") else other
            raise MetricsError(
                f"{self.name} and {other} both log {key!r}, of which one would overwrite the other: rename one of "
                f"the values, leave out the stage (stages=...), or give {self.name.partition('(')[0]} a prefix, such "
                "as prefix='monitor'."
            )


def merge_logged_keys(ranks: Sequence[Mapping[str, str]]) -> dict[str, str]:
    """Return what is logged on any of the ranks."""
    return {key: hook for of_rank in ranks for key, hook in of_rank.items()}
