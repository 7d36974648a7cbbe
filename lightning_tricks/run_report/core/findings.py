"""What was unusual in a run, in sentences with numbers."""

from __future__ import annotations

from lightning_tricks.run_report.core.finding import Check, Finding
from lightning_tricks.run_report.core.loss_findings import LOSS_CHECKS
from lightning_tricks.run_report.core.record import RunRecord
from lightning_tricks.run_report.core.training_findings import TRAINING_CHECKS
from lightning_tricks.run_report.core.usage_findings import USAGE_CHECKS, ended_early

CHECKS: tuple[Check, ...] = (ended_early, *LOSS_CHECKS, *TRAINING_CHECKS, *USAGE_CHECKS)


def find_all(record: RunRecord) -> list[Finding]:
    """Return what was unusual, warnings first.

    Examples:
        >>> from lightning_tricks.run_report import RunRecord
        >>> [finding.text for finding in find_all(RunRecord(step=10, status="stopped"))]
        ['The run was stopped at step 10, in epoch 0.']
    """
    found = [finding for check in CHECKS for finding in check(record)]
    return sorted(found, key=lambda finding: finding.level != "warning")
