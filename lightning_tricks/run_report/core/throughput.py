"""How fast a run trained, and what it waited for."""

from __future__ import annotations

from lightning_tricks._shared.report_parts import DeviceUse, Facts
from lightning_tricks.run_report.core.numbers import format_number, format_percent
from lightning_tricks.run_report.core.record import RunRecord


def samples_per_second(record: RunRecord) -> float | None:
    """Return the samples that a rank trained on in a second of the fit, or None if it is not known."""
    return record.samples / record.seconds if record.samples and record.seconds > 0 else None


def throughput(record: RunRecord) -> Facts:
    """Return how fast a run trained and what it waited for, as far as it is known."""
    facts: list[tuple[str, str]] = []
    rate = samples_per_second(record)
    whose = f", on rank 0 of {record.ranks}" if record.ranks > 1 else ""
    training = record.seconds - record.validation_seconds
    if rate is not None:
        facts.append((f"samples a second{whose}", format_number(rate)))
        if record.validation_seconds and training > 0:
            facts.append(
                (f"samples a second, without validation{whose}", format_number(rate * record.seconds / training))
            )
    if record.batches and record.seconds > 0:
        facts.append((f"batches a second{whose}", format_number(record.batches / record.seconds)))
        facts.append(("share of the time in validation", format_percent(record.validation_seconds / record.seconds)))
    uses = record.parts_of(DeviceUse)
    for use in uses:
        if use.data_wait is not None:
            rank = f" of rank {use.rank}" * (len(uses) > 1)
            facts.append((f"share of the time{rank} waiting for data", format_percent(use.data_wait / 100)))
    verdicts = [f"{f'Rank {use.rank}: ' * (len(uses) > 1)}{said}" for use in uses for said in use.verdict]
    if facts and not uses:
        verdicts = ["With a DeviceMonitor, it is said here what training waited for."]
    return Facts(title="Throughput", facts=facts, sentences=verdicts)
