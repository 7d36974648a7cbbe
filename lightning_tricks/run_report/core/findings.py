"""The findings of a run, sentences with numbers about its unusual sides; those about losses are in `loss_findings`."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from statistics import median

from lightning_tricks._shared.report_parts import ClippedSteps, ConfusionMatrix, DeviceUse, Facts, Reliability
from lightning_tricks._shared.text import format_number, format_percent, list_names
from lightning_tricks.run_report.core import curves
from lightning_tricks.run_report.core.loss_findings import loss_not_finite, loss_rises, overfitting, still_improving
from lightning_tricks.run_report.core.record import Finding, GitState, RunRecord, note, warning

_FEWEST_STEPS = 20  # below, a share of steps says nothing
_FEWEST_SAMPLES = 10  # of a class
_MUCH_WAIT = 10.0  # percent
_LOW_UTILIZATION = 0.2
_NEEDS_NO_SCHEDULE = re.compile(r"schedule.?free|lbfgs|prodigy|dadapt", re.IGNORECASE)
_MEMORY = re.compile(r"(^|[^a-z])(memory|mem|vram|rss|process_ram|allocated)($|[^a-z])")
_NOT_IN_USE = re.compile(
    r"(total|free|avail|limit|percent|pct|fraction|util|reserved|cache|buffer|bank|replay)"
    r"|\.allocated$"  # what torch has allocated since the start, freed or not
)


def find_all(record: RunRecord) -> list[Finding]:
    """Return the findings of a run, warnings first.

    Examples:
        >>> from lightning_tricks.run_report import RunRecord
        >>> [finding.text for finding in find_all(RunRecord(step=10, status="stopped"))]
        ['The run was stopped at step 10, in epoch 0.']
    """
    found = [finding for check in CHECKS for finding in check(record)]
    return sorted(found, key=lambda finding: finding.level != "warning")


def ended_early(record: RunRecord) -> Iterator[Finding]:
    """The run failed, or was stopped."""
    if record.status == "failed":
        yield warning(f"The run failed at step {record.step:,}, in epoch {record.epochs}: {record.message}")
    if record.status == "stopped":
        yield note(f"The run was stopped at step {record.step:,}, in epoch {record.epochs}.")


def told_by_callbacks(record: RunRecord) -> Iterator[Finding]:
    """What callbacks have found themselves."""
    yield from (warning(said) for part in record.parts_of(Facts) for said in part.warnings)


def skipped_steps(record: RunRecord) -> Iterator[Finding]:
    """Steps were skipped, as gradients were not finite.

    In true fp16 a GradScaler finds its scale by steps that overflow: a warning needs more than 1 % of them, and 10.
    """
    is_scaled = _precision(record).startswith("16")
    for part in record.parts_of(ClippedSteps):
        if part.skipped > (max(10, 0.01 * part.steps) if is_scaled else 0):
            share = format_percent(part.skipped / max(part.steps, 1))
            steps = f"{part.skipped:,} of {record.describe_steps(part)}"
            yield warning(f"{steps} ({share}) were skipped: gradients were NaN or Inf.")


def clipped_steps(record: RunRecord) -> Iterator[Finding]:
    """A `max_norm` rescaled more than half of the steps, or none, as it is more than ten times the largest norm.

    Clipping by norm is meant for unusual steps. Other methods, such as AGC, are not judged: they change some of the
    gradients in most steps of a healthy run.
    """
    parts = record.parts_of(ClippedSteps)
    for part in parts:
        if part.max_norm is None or part.steps < _FEWEST_STEPS:
            continue
        prefix = "grad_norm" if len(parts) == 1 else f"grad_norm/{part.optimizer}"
        norms = [point.value for point in curves.finite(record.curve(f"{prefix}/pre_clip"))]
        limit = f"max_norm={format_number(part.max_norm)}"
        if part.clipped > 0.5 * part.steps:
            usual = median(norms) if norms else 0.0
            why = f": {limit} is below the median norm of {format_number(usual)}" if part.max_norm < usual else ""
            yield note(
                f"{format_percent(part.clipped / part.steps)} of {record.describe_steps(part)} were clipped{why}. "
                "Most updates were rescaled; a larger max_norm clips only unusual steps."
            )
        elif not part.clipped and norms and part.max_norm > 10 * max(norms):
            largest = format_number(max(norms))
            whose = f" of optimizer {part.optimizer}" if len(parts) > 1 else ""
            yield note(f"No step{whose} was clipped: {limit} is far above the largest logged norm, {largest}.")


def weak_classes(record: RunRecord) -> Iterator[Finding]:
    """A class is recognized much less often than the others.

    Its recall lies below 80 %, and below the median of the other classes by 15 points, and by 4 standard deviations
    both of these and of what so few samples would have with that median.
    """
    for part in record.parts_of(ConfusionMatrix):
        recalls, totals = part.recalls, [sum(row) for row in part.counts]
        known = [place for place, total in enumerate(totals) if total >= _FEWEST_SAMPLES]
        if not part.is_square or len(known) < 2:
            continue
        worst = min(known, key=recalls.__getitem__)
        others = [recalls[place] for place in known if place != worst]
        usual = median(others)
        # 1.25 mean distances are, of normal numbers, their deviation
        scatter = 1.25 * sum(abs(recall - usual) for recall in others) / len(others)
        smoothed = (usual * totals[worst] + 2) / (totals[worst] + 4)  # as 100 % has no deviation
        chance = math.sqrt(smoothed * (1 - smoothed) / totals[worst])
        if recalls[worst] < min(0.8, usual - max(0.15, 4 * scatter, 4 * chance)):
            row = part.counts[worst]
            taken = max((place for place in range(len(row)) if place != worst), key=row.__getitem__)
            said = f"Class {part.classes[worst]!r} has a recall of {format_percent(recalls[worst])} in {part.stage}"
            said += f" ({row[worst]:,} of {totals[worst]:,}; the median of the others is {format_percent(usual)})"
            more = f": {row[taken]:,} were predicted as {part.classes[taken]!r}" if row[taken] else ""
            yield warning(f"{said}{more}.")


def learning_rate(record: RunRecord) -> Iterator[Finding]:
    """The learning rate never changed, or a schedule was cut off while it was still high.

    It was cut off if the rate fell without a break since its peak, ended above half of it, and fell in the last tenth
    no slower than on average: rates that fall in stairs, or ever more slowly, have no end that a run could miss.
    """
    rates = [points for points in curves.learning_rates(record) if len(points) >= _FEWEST_STEPS]
    setup, schedulers = record.setup, ", ".join(record.setup.schedulers or ())
    is_known = setup.schedulers is not None and not setup.waits_for_plateau  # a plateau is waited for, rightly
    if not rates or record.status != "finished" or not is_known:
        return
    if all(point.low == point.high == points[0].value for points in rates for point in points):
        shown = list(dict.fromkeys(format_number(points[0].value) for points in rates))
        said = f"The learning rate was {shown[0]}" if len(shown) == 1 else f"The learning rates were {', '.join(shown)}"
        if schedulers:
            yield note(f"{said} in all steps: {schedulers} never changed it.")
        elif not any(map(_NEEDS_NO_SCHEDULE.search, setup.optimizers)):
            yield note(f"{said} in all steps: a schedule that ends near 0 often gives a better model.")
    elif schedulers:
        for points in rates:
            last_at = {point.value: point.step for point in points}  # stairs of epochs fall without a break, too
            stairs = list(last_at.items())[list(last_at).index(max(last_at)) :]
            if _is_cut_off(stairs):
                (peak, _), (last, _) = stairs[0], stairs[-1]
                said = f"The learning rate ended at {format_percent(last / peak)} of its peak of {format_number(peak)}"
                yield note(f"{said} and was still falling: the schedule is longer than the run.")
                return


def _is_cut_off(stairs: Sequence[tuple[float, int]]) -> bool:
    """Whether rates, given with the last step of each, end high and fall as fast at the end as on average."""
    if len(stairs) < 5 or not all(high > low and step < later for (high, step), (low, later) in pairwise(stairs)):
        return False
    (peak, start), (before, late), (last, end) = stairs[0], stairs[-1 - max(1, len(stairs) // 10)], stairs[-1]
    return last >= 0.5 * peak and (before - last) / (end - late) >= 0.95 * (peak - last) / (end - start)


def calibration(record: RunRecord) -> Iterator[Finding]:
    """Confidence is far from accuracy: by 0.05 on average over the bins, and by more than few samples scatter.

    Only a difference of the means that makes most of that says in which direction.
    """
    for part in record.parts_of(Reliability):
        error = part.calibration_error
        matrices = [other for other in record.parts_of(ConfusionMatrix) if other.stage == part.stage]
        samples = sum(sum(row) for matrix in matrices for row in matrix.counts) or math.inf
        noise = 1.5 / math.sqrt(samples)
        if part.label != "accuracy" or not error >= max(0.05, noise):
            continue
        confidence = sum(mean * weight for mean, weight in zip(part.confidence, part.weight, strict=False))
        accuracy = sum(right * weight for right, weight in zip(part.share, part.weight, strict=False))
        word = "is overconfident" if confidence > accuracy else "is underconfident"
        if (gap := abs(confidence - accuracy)) < 0.5 * error:
            if error - gap < noise:  # what differs in the other direction is no more than few samples scatter
                continue
            word = "is overconfident in some predictions and underconfident in others"
        scatter = f" with a standard error of {format_percent(math.sqrt(accuracy * (1 - accuracy) / samples))}"
        yield note(
            f"The model {word} in {part.stage}: its mean confidence is {format_percent(confidence)}, its accuracy "
            f"{format_percent(accuracy)}{scatter if noise else ''} (expected calibration error {error:.2f})."
        )


def data_wait(record: RunRecord) -> Iterator[Finding]:
    """More than 10 % of the time were lost in waiting for data; with a GPU, time in which it had nothing to do.

    Where `DeviceMonitor` gives a verdict, that is followed. In the middle of a run there are its logged values alone,
    without the first, whose time includes the start.
    """
    uses = record.parts_of(DeviceUse)
    waits = [(part.data_wait or 0.0, part.remedy) for part in uses if not part.keeps_up]
    if not uses:
        keys = [key for key in record.logged_keys() if re.fullmatch(r"gpu\d+/data_wait", key)]
        has_gpu = any(key.startswith("gpu") and "/" in key for key in record.logged_keys())
        for key in keys if has_gpu else ["host/data_wait"]:
            points = curves.finite(record.curve(key))[1:]
            waits += [(sum(point.value for point in points) / len(points), "")] if len(points) > 1 else []
    share, remedy = max(waits, default=(0.0, ""))
    if share <= _MUCH_WAIT:
        return
    said = f"Training waited for data {format_percent(share / 100)} of the time"
    yield warning(f"{said}: {remedy or 'more workers, or cheaper loading, would make it faster'}.")


def memory_grows(record: RunRecord) -> Iterator[Finding]:
    """The memory in use grew all the time: by a tenth at least, in 7 of 9 parts, and in the last 3 at half the pace.

    A cache that fills, a second stage with larger images, or an occasional peak is thus not reported.
    """
    for key in record.logged_keys():
        name, sign = key.lower(), curves.sign_of_better(key)
        is_memory = _MEMORY.search(name) and not _NOT_IN_USE.search(name) and not sign
        points = curves.finite(record.curve(key)) if is_memory else []
        if len(points) < 12:
            continue
        levels = [median([point.value for point in part]) for part in curves.equal_parts(points, 10)]
        growth = levels[-1] - levels[0]
        steady = sum(after - before > 0.3 * growth / 9 for before, after in pairwise(levels))
        if growth > 0.1 * abs(levels[0]) and steady >= 7 and levels[-1] - levels[-4] > 0.5 * growth / 3:
            scale, unit = (2.0**30, " GiB") if "bytes" in key else (1.0, " GiB" if key.endswith("_gib") else "")
            first, last = (format_number(value / scale) for value in (levels[0], points[-1].value))
            yield warning(
                f"{key} grew from {first} to {last}{unit} and was still growing at the end: unless that is intended, "
                "something keeps tensors, such as a list of losses with their graphs."
            )


def low_utilization(record: RunRecord) -> Iterator[Finding]:
    """The device did less than a fifth of the matrix products that it could, in the median and without the start."""
    points = curves.finite(record.curve("flops/mfu"))[1:]
    usual = median([point.value for point in points]) if len(points) >= 5 else math.inf
    if usual < _LOW_UTILIZATION:
        lower = "lower precision " if _precision(record).startswith(("32", "64")) else ""
        yield note(
            f"The model FLOPs utilization was {format_percent(usual)} (median of {len(points):,} values): larger "
            f"batches, {lower}or torch.compile may use the device better."
        )


def resumes(record: RunRecord) -> Iterator[Finding]:
    """The run was resumed."""
    count = len(record.resumes)
    if not count:
        return
    steps = ", ".join(f"{resume.step:,}" for resume in record.resumes[-5:])
    times = "once, at step" if count == 1 else f"{count:,} times, {'last at' if count > 5 else 'at'} steps"
    said = f"The run was resumed {times} {steps}"
    lost = list(dict.fromkeys(name for resume in record.resumes for name in resume.not_restored))
    if lost:
        yield warning(f"{said}, and not exactly: {list_names(lost, 5)} could not be restored.")
    else:
        yield note(f"{said}.")


def not_seeded(record: RunRecord) -> Iterator[Finding]:
    """The run cannot be repeated."""
    if record.step and not record.is_seeded:
        yield note(
            "The run was not seeded by SeedEverything or seed_everything: unless the script seeds it in another way, "
            "it cannot be reproduced. SeedEverything(42) seeds it."
        )


def uncommitted_changes(record: RunRecord) -> Iterator[Finding]:
    """The code is not that of the commit."""
    git = record.git or GitState("")
    tracked = [name for name in git.changed if not name.startswith("??")]
    if tracked:
        files = "1 file differs" if len(tracked) == 1 else f"{len(tracked):,} files differ"
        where = ": the differences are in the section Code" if git.diff else ""
        yield note(f"{files} from commit {git.commit[:10]}{where}.")


def limited_data(record: RunRecord) -> Iterator[Finding]:
    """A limit on batches left out a part of the data: fewer batches were used than the loader has."""
    limits, overfit = dict(record.trainer), record.setup.trainer.get("overfit_batches", 0)
    if overfit not in (0, 1):  # the Trainer then sets both limits by it
        yield note(f"Only a part of the data was used in training and validation (overfit_batches={overfit}).")
    elif found := [f"{stage} ({name}={limits.get(name)})" for name, stage in record.setup.left_out.items()]:
        yield note(f"Only a part of the data was used in {' and '.join(found)}.")


def validation_never_ran(record: RunRecord) -> Iterator[Finding]:
    """The fit had data for validation, and ended without one."""
    setup, facts = record.setup, dict(record.trainer)
    if record.status != "finished" or not record.step or not setup.has_validation or record.validation_seconds:
        return
    promised, read = setup.training_batches, record.batches / max(record.epochs, 1)
    if record.batches < (promised or 0) and setup.trainer.get("max_epochs") != record.epochs:
        return  # it ended within the first epoch
    why = f"{record.epochs:,} epochs with check_val_every_n_epoch={facts.get('check_val_every_n_epoch')} and "
    why += f"val_check_interval={facts.get('val_check_interval')}"
    if promised is not None and read < promised:
        why = f"an epoch had {format_number(read)} batches, and validation waits for the last of the {promised:,} that "
        why += "the length of the training loader promises. Correct that length"
    yield warning(f"Validation never ran: {why}.")


def accumulation(record: RunRecord) -> Iterator[Finding]:
    """Gradients were to be accumulated over more batches than an epoch has."""
    asked, promised = record.setup.trainer.get("accumulate_grad_batches"), record.setup.training_batches
    read = record.batches / max(record.epochs, 1)
    is_finished = record.status == "finished" and 0 < record.step == record.epochs
    if is_finished and isinstance(asked, int) and max(read, promised or 0) < asked:
        yield warning(
            f"accumulate_grad_batches={asked} is more than the {format_number(read)} batches of an epoch, which ends "
            "with a step: no step was of that many."
        )


def monitors(record: RunRecord) -> Iterator[Finding]:
    """A callback or a scheduler decides by a value that was never logged, or more often than there was a new one.

    It is also told where the value was missing at the end, for twice as long as ever before.
    """
    for owner, key, is_known, steps in record.monitors:
        rows = [row for row in record.rows if key in row.values]
        every = record.setup.every_n_train_steps.get(owner)
        epochs, values = [row.epoch for row in rows], sum(row.count for row in rows)
        if every and rows:
            steps = record.step // every - rows[0].step // every
        elif rows:
            steps = min(steps, record.epochs - epochs[0])
        if not is_known:
            logged = f"Keys that were logged: {list_names(record.logged_keys(), 6)}"
            yield warning(f"{owner} monitors {key!r}, which was never logged: it had no effect. {logged}.")
        elif 0 < values < steps and all(row.kind == "epoch" for row in rows):  # without rows, no logger was sent it
            said = f"{owner} decided {steps:,} times by {key!r}, of which there were {values:,} values"
            yield warning(f"{said}: it compared old ones again. Let it decide after each validation alone.")
        elif epochs and record.epochs - 1 - epochs[-1] >= 2 * max(b - a for a, b in pairwise([-1, *epochs])):
            said = f"{owner} monitors {key!r}, which was last logged in epoch {epochs[-1]} of {record.epochs:,}"
            yield warning(f"{said}: since then it saw an old value, or none.")


def schedules(record: RunRecord) -> Iterator[Finding]:
    """A cosine went past its end, or a schedule that counts batches was stepped once an epoch."""
    for name, interval, made, total in record.schedules:
        passed = name == "CosineAnnealingLR" and made > total + 1
        if passed and (made < 2 * total or (interval == "step" and total <= record.epochs)):
            said = f"{name} went past its T_max={total:,} to {made:,} {interval}s: the learning rate rose again"
            yield warning(f"{said}. Set T_max to the number of {interval}s.")
        elif interval == "epoch" and total >= record.step > 2 * record.epochs >= 2 * made:
            said = f"{name} made {made:,} of its {total:,} steps, one each epoch"
            yield warning(f'{said}. Return it with "interval": "step" to step it after each optimizer step.')


def _precision(record: RunRecord) -> str:
    """Return the precision by Lightning's name, such as "16-mixed"."""
    return str(record.setup.trainer.get("precision", "32-true"))


# One entry for each sentence that a report may say, in the order in which it says them
CHECKS: tuple[Callable[[RunRecord], Iterator[Finding]], ...] = (
    *(ended_early, told_by_callbacks, validation_never_ran, monitors, loss_not_finite, loss_rises, overfitting),
    *(still_improving, skipped_steps, clipped_steps, accumulation, schedules, weak_classes, learning_rate, calibration),
    *(data_wait, memory_grows, low_utilization, resumes, not_seeded, uncommitted_changes, limited_data),
)
