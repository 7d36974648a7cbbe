"""The keys whose best value is kept (`best=` of a monitor), and the errors for those that no fit logs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_tricks.metrics.core.history import History
from lightning_tricks.metrics.core.logged_keys import LoggedKeys
from lightning_tricks.metrics.dataloader_checks import num_batches, will_validate
from lightning_tricks.metrics.key_conflicts import MetricsError


class BestKeys:
    """The keys whose best value is kept.

    Args:
        monitor: The name of the monitor, for errors.
        keys: The keys that it logs.
        modes: Key -> "min" or "max".

    Raises:
        ValueError: If no stage logs a key, or a mode is none.
    """

    def __init__(self, monitor: str, keys: LoggedKeys, modes: Mapping[str, str]) -> None:
        keys.check_best(dict(modes))
        self._name, self._keys, self._modes = monitor, keys, modes

    def values(self, history: History) -> dict[str, tuple[float, int]]:
        """Return the best value of each key, and the optimizer steps done by then."""
        start = "" if self._keys.prefix is None else f"{self._keys.prefix}/"
        found = history.best({key.removeprefix(start): mode for key, mode in self._modes.items()})
        return {start + key: value for key, value in found.items()}

    def of_stage(self, stage: str) -> list[str]:
        """Return the keys of a stage."""
        return self._keys.keys_of_stage(self._modes, stage)

    def check_fit(self, trainer: Trainer) -> None:
        """Warn of a key of validation in a fit that does not validate, as a short one that tries whether all works."""
        if not will_validate(trainer) and (keys := self.of_stage("val")):
            rank_zero_warn(
                f"{self._name}: best has the key {keys[0]!r}, but this fit does not validate, so that it has no value: "
                "give it validation data and a validation_step, let it validate within max_epochs, or use a key of "
                "train."
            )

    def check_dataloaders(self, trainer: Trainer) -> None:
        """Refuse keys that name a dataloader where there is one, or none where there are several."""
        try:
            self._keys.check_loaders(self._modes, "train", 1)
            self._keys.check_loaders(self._modes, "val", len(num_batches(trainer, "val")))
        except ValueError as error:
            raise MetricsError(f"{self._name}: {error}") from error

    def check_logged(self, stage: str, logged_keys: Collection[str], has_unmeasured: bool) -> None:
        """Refuse a key that was not logged at the end of its stage, where that was not known before."""
        start = self._keys.key(stage, "")
        logged = [key for key in logged_keys if key.startswith(start)]
        for key in self.of_stage(stage):
            if (logged or has_unmeasured) and key not in logged:
                alternatives = self._keys.describe_alternatives(key, stage, logged)
                raise MetricsError(f"{self._name}: best has the key {key!r}, {alternatives}")
