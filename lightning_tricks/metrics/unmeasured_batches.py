"""Warnings about steps that returned nothing that the metrics can measure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_tricks.metrics.core.suite import MetricSuite
from lightning_tricks.metrics.key_conflicts import STEPS, MetricsError


class UnmeasuredBatches:
    """Warns of batches that are not measured, once for each stage.

    Args:
        monitor: The name of the monitor.
        stages: The stages that are measured.
        has_transform: Whether there is an `output_transform`.
    """

    def __init__(self, monitor: str, stages: Sequence[str], *, has_transform: bool) -> None:
        self._monitor = monitor
        self._stages = stages
        self._has_transform = has_transform
        self._warned: set[str] = set()

    def report_batch(
        self, suite: MetricSuite, inputs: Any, stage: str, batch_idx: int, best_keys: Sequence[str]
    ) -> None:
        """Warn of a batch whose step did not return all that the metrics need.

        Args:
            suite: The metrics.
            inputs: What the step, or `output_transform`, returned.
            stage: "train", "val" or "test".
            batch_idx: The index of the batch.
            best_keys: The keys of `best` that are of this stage.

        Raises:
            MetricsError: If the first batch has something else to measure, and `best` has a key of this stage.
        """
        if stage in self._warned:
            return
        self._warned.add(stage)
        source = "output_transform()" if self._has_transform else STEPS[stage]
        returned = _describe(inputs)
        required = ", ".join(sorted(suite.required_inputs))
        others = [name for name in self._stages if name != stage]
        message = (
            f"{self._monitor}: {source} returned {returned} in batch {batch_idx} of {stage}, but the metrics need "
            f"{required}. Return a dict with them (from training_step together with the loss), give "
            f"output_transform=(outputs, batch, stage) -> dict, or leave {stage!r} out: stages={others!r}."
        )
        keys = [key for key in best_keys if not key.endswith("/loss")]
        if returned != "nothing" and not suite.checked and keys:
            raise MetricsError(f"{message} This is an error because best has the key {keys[0]!r}.")
        rank_zero_warn(f"{message} Until then, only the loss of such batches is averaged.")

    def report_epoch(self, stage: str, num_unmeasured: int, num_measured: int) -> None:
        """Warn of how many batches of an epoch were not measured, if others were."""
        if num_unmeasured and num_measured and f"{stage} in part" not in self._warned:
            self._warned.add(f"{stage} in part")
            rank_zero_warn(
                f"{self._monitor}: {num_unmeasured} of {num_unmeasured + num_measured} batches of {stage} returned "
                "nothing to measure, so the metrics do not include them."
            )


def _describe(inputs: Any) -> str:
    if inputs is None or (isinstance(inputs, Mapping) and not inputs):
        return "nothing"
    return f"{', '.join(map(str, inputs))} alone" if isinstance(inputs, Mapping) else f"a {type(inputs).__name__}"
