"""What was unusual in how a run used devices and data, and what stands against repeating it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import pairwise

from lightning_tricks._shared.report_parts import DeviceUse
from lightning_tricks.run_report.core.curves import equal_parts, sign_of_better
from lightning_tricks.run_report.core.finding import Check, Finding, finite, median, note, warn
from lightning_tricks.run_report.core.numbers import format_number, format_percent
from lightning_tricks.run_report.core.record import RunRecord

_MUCH_WAIT = 10.0  # percent
_LOW_UTILIZATION = 0.2
_MEMORY = re.compile(r"(^|[^a-z])(memory|mem|vram|rss|process_ram|allocated)($|[^a-z])")
_NOT_IN_USE = re.compile(
    r"(total|free|avail|limit|percent|pct|fraction|util|reserved|cache|buffer|bank|replay)"
    r"|\.allocated$"  # what torch has allocated since the start, freed or not
)


def ended_early(record: RunRecord) -> Sequence[Finding]:
    """The run failed, or was stopped."""
    if record.status == "failed":
        return warn(f"The run failed at step {record.step:,}, in epoch {record.epochs}: {record.message}")
    if record.status == "stopped":
        return note(f"The run was stopped at step {record.step:,}, in epoch {record.epochs}.")
    return ()


def data_wait(record: RunRecord) -> Sequence[Finding]:
    """More than 10 % of the time were lost in waiting for data; with a GPU, time in which it had nothing to do.

    Where `DeviceMonitor` gives a verdict, that is followed. In the middle of a run there are its logged values alone,
    without the first, whose time includes the start.
    """
    uses = record.parts_of(DeviceUse)
    waits = [
        (part.data_wait, " ".join(part.verdict))
        for part in uses
        if part.data_wait and not any("keeps up" in said for said in part.verdict)
    ]
    if not uses:
        keys = [key for key in record.logged_keys() if re.fullmatch(r"gpu\d+/data_wait", key)]
        has_gpu = any(key.startswith("gpu") and "/" in key for key in record.logged_keys())
        for key in keys if has_gpu else ["host/data_wait"]:
            points = finite(record.curve(key))[1:]
            waits += [(sum(point.value for point in points) / len(points), "")] if len(points) > 1 else []
    share, verdict = max(waits, default=(0.0, ""))
    if share <= _MUCH_WAIT:
        return ()
    remedy = re.search(r"bottleneck; (.*)", verdict)
    said = f"Training waited for data {format_percent(share / 100)} of the time"
    return warn(f"{said}: {remedy[1] if remedy else 'more workers, or cheaper loading, would make it faster.'}")


def low_utilization(record: RunRecord) -> Sequence[Finding]:
    """The device did less than a fifth of the matrix products that it could, in the median and without the start."""
    points = finite(record.curve("flops/mfu"))[1:]
    if len(points) < 5:
        return ()
    usual = median([point.value for point in points])
    if usual >= _LOW_UTILIZATION:
        return ()
    lower = "lower precision " if dict(record.trainer).get("precision", "32").startswith(("32", "64")) else ""
    return note(
        f"The model FLOPs utilization was {format_percent(usual)} (median of {len(points):,} values): larger batches, "
        f"{lower}or torch.compile may use the device better."
    )


def memory_grows(record: RunRecord) -> Sequence[Finding]:
    """The memory in use grew all the time: by a tenth at least, in 7 of 9 parts, and in the last 3 at half the pace.

    So a cache that fills, a second stage with larger images, or a peak that is reached now and then are none.
    """
    found: list[Finding] = []
    for key in record.logged_keys():
        is_memory = _MEMORY.search(key.lower()) and not _NOT_IN_USE.search(key.lower()) and not sign_of_better(key)
        points = finite(record.curve(key)) if is_memory else []
        if len(points) < 12:
            continue
        levels = [median([point.value for point in part]) for part in equal_parts(points, 10)]
        growth = levels[-1] - levels[0]
        steady = sum(after - before > 0.3 * growth / 9 for before, after in pairwise(levels))
        if growth > 0.1 * abs(levels[0]) and steady >= 7 and levels[-1] - levels[-4] > 0.5 * growth / 3:
            scale, unit = (2.0**30, " GiB") if "bytes" in key else (1.0, " GiB" if key.endswith("_gib") else "")
            said = (
                f"{key} grew from {format_number(levels[0] / scale)} to {format_number(points[-1].value / scale)}{unit}"
            )
            found += warn(
                f"{said} and did not stop: unless something is meant to grow, something keeps tensors, such as a list "
                "of losses with their graphs."
            )
    return found


def resumes(record: RunRecord) -> Sequence[Finding]:
    """The run was resumed."""
    count = len(record.resumes)
    if not count:
        return ()
    steps = ", ".join(f"{one.step:,}" for one in record.resumes[-5:])
    times = "once, at step" if count == 1 else f"{count:,} times, {'last ' * (count > 5)}at steps"
    said = f"The run was resumed {times} {steps}"
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
    where = ": the differences are in the section Code" * bool(git.diff)
    return note(f"{files} from commit {git.commit[:10]}{where}.")


def limited_data(record: RunRecord) -> Sequence[Finding]:
    """A limit of batches took a part of the data away: fewer batches were used than the loader has."""
    limits, batches = dict(record.trainer), dict(record.data)
    names = (("limit_train_batches", "training"), ("limit_val_batches", "validation"))
    overfit = limits.get("overfit_batches", "0")
    if overfit not in ("0", "1"):  # the Trainer then sets both limits by it
        return note(f"Only a part of the data was used in training and validation (overfit_batches={overfit}).")
    found = [
        f"{word} ({name}={limits[name]})"
        for name, word in names
        if limits.get(name, "1") not in ("1", "0 batches", "0", "None")
        and _is_part(batches.get(f"{word} batches", ""), limits[name])
    ]
    return note(f"Only a part of the data was used in {' and '.join(found)}.") if found else ()


def _is_part(batches: str, limit: str) -> bool:
    """Whether a limit took something away, as far as it is known.

    Args:
        batches: "7 of 20", or "7 of unknown"; "7" or "" in records of earlier versions.
        limit: "7 batches", or a share.
    """
    used, _, there = batches.partition(" of ")
    if there:
        return there not in (used, "unknown")
    return "batches" not in limit or not batches or f"{used.replace(',', '')} batches" == limit


USAGE_CHECKS: tuple[Check, ...] = (
    data_wait,
    memory_grows,
    low_utilization,
    resumes,
    not_seeded,
    uncommitted_changes,
    limited_data,
)
