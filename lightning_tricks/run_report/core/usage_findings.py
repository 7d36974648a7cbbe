"""What was unusual in how a run used devices and data, and what stands against repeating it."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lightning_tricks._shared.report_parts import DeviceUse
from lightning_tricks.run_report.core.curves import equal_parts
from lightning_tricks.run_report.core.finding import Check, Finding, finite, median, note, warn
from lightning_tricks.run_report.core.numbers import format_number, format_percent
from lightning_tricks.run_report.core.record import RunRecord

_MUCH_WAIT = 10.0  # percent
_LOW_UTILIZATION = 0.2
_MEMORY = re.compile(r"^(gpu\d+/(memory_used|peak_memory)_gib|host/process_ram_gib)$")


def ended_early(record: RunRecord) -> Sequence[Finding]:
    """The run failed, or was stopped."""
    if record.status == "failed":
        return warn(f"The run failed at step {record.step:,}, in epoch {record.epochs}: {record.message}")
    if record.status == "stopped":
        return note(f"The run was stopped at step {record.step:,}, in epoch {record.epochs}.")
    return ()


def data_wait(record: RunRecord) -> Sequence[Finding]:
    """The run waited for data."""
    waits = [(part.rank, part.data_wait, part.verdict) for part in record.parts_of(DeviceUse) if part.data_wait]
    if not waits:
        points = finite(record.curve("host/data_wait"))[1:]
        waits = [(0, sum(point.value for point in points) / len(points), ())] if len(points) > 1 else []
    slow = [(rank, share, verdict) for rank, share, verdict in waits if share > _MUCH_WAIT]
    if not slow:
        return ()
    _, share, verdict = max(slow, key=lambda one: one[1])
    remedy = next((said.partition("; ")[2] for said in verdict if "; " in said and "bottleneck" in said), "")
    said = f"Training waited for data {format_percent(share / 100)} of the time"
    return warn(f"{said}: {remedy}" if remedy else f"{said}: more workers, or cheaper loading, would make it faster.")


def low_utilization(record: RunRecord) -> Sequence[Finding]:
    """The device did little of what it could."""
    points = finite(record.curve("flops/mfu"))[1:]
    if len(points) < 5:
        return ()
    usual = median([point.value for point in points])
    if usual >= _LOW_UTILIZATION:
        return ()
    return note(
        f"The model FLOPs utilization was {format_percent(usual)} (median of {len(points):,} values): larger batches, "
        "lower precision or torch.compile may use the device better."
    )


def memory_grows(record: RunRecord) -> Sequence[Finding]:
    """The memory grew until the end."""
    found: list[Finding] = []
    for key in record.logged_keys():
        points = finite(record.curve(key)) if _MEMORY.match(key) else []
        if len(points) < 12:
            continue
        levels = [median([point.value for point in third]) for third in equal_parts(points, 3)]
        if levels[1] > 1.05 * levels[0] and levels[2] > 1.05 * levels[1]:
            said = f"{key} grew from {format_number(levels[0])} to {format_number(points[-1].value)} GiB"
            found += warn(
                f"{said} and did not stop: something keeps tensors, such as a list of losses with their graphs."
            )
    return found


def resumes(record: RunRecord) -> Sequence[Finding]:
    """The run was resumed."""
    count = len(record.resumes)
    if not count:
        return ()
    steps = ", ".join(f"{one.step:,}" for one in record.resumes[-5:])
    said = f"The run was resumed {'once' if count == 1 else f'{count:,} times'}, at step {steps}"
    lost = list(dict.fromkeys(name for one in record.resumes for name in one.not_restored))
    if lost:
        names = ", ".join(lost[:5]) + (f" and {len(lost) - 5:,} more" if len(lost) > 5 else "")
        return warn(f"{said}, and not exactly: {names} could not be restored.")
    return note(f"{said}.")


def not_seeded(record: RunRecord) -> Sequence[Finding]:
    """The run cannot be repeated."""
    if record.is_seeded or not record.step:
        return ()
    return note(
        "The run was not seeded by SeedEverything or seed_everything: unless the script does it in another way, it "
        "cannot be repeated. SeedEverything(42) seeds it."
    )


def uncommitted_changes(record: RunRecord) -> Sequence[Finding]:
    """The code is not that of the commit."""
    git = record.git
    if git is None:
        return ()
    tracked = [name for name in git.changed if not name.startswith("??")]
    if not tracked:
        return ()
    files = "1 file differs" if len(tracked) == 1 else f"{len(tracked):,} files differ"
    return note(f"{files} from commit {git.commit[:10]}: the differences are in the section Code.")


def limited_data(record: RunRecord) -> Sequence[Finding]:
    """Only a part of the data was used."""
    limits = dict(record.trainer)
    found = []
    for name, word in (("limit_train_batches", "training"), ("limit_val_batches", "validation")):
        if limits.get(name, "1") not in ("1", "0 batches", "0", "None"):
            found.append(f"{word} ({name}={limits[name]})")
    if limits.get("overfit_batches", "0") != "0":
        found.append(f"all stages (overfit_batches={limits['overfit_batches']})")
    return note(f"Only a part of the data was used in {' and '.join(found)}.") if found else ()


USAGE_CHECKS: tuple[Check, ...] = (
    data_wait,
    memory_grows,
    low_utilization,
    resumes,
    not_seeded,
    uncommitted_changes,
    limited_data,
)
