"""What was unusual in training: gradients, losses, learning rates, classes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

from lightning_tricks._shared.report_parts import ClippedSteps, ConfusionMatrix, Reliability
from lightning_tricks.run_report.core.curves import LEARNING_RATE, best_point, equal_parts, keys_of_topic, split_key
from lightning_tricks.run_report.core.finding import Check, Finding, finite, losses, median, note, warn, watched
from lightning_tricks.run_report.core.numbers import format_number, format_percent
from lightning_tricks.run_report.core.record import Point, RunRecord

_FEWEST_STEPS = 20  # below, a share of steps says nothing
_FEWEST_EPOCHS = 4
_FEWEST_SAMPLES = 10  # of a class


def clipped_steps(record: RunRecord) -> Sequence[Finding]:
    """Many steps were clipped, or none although the norms are far below `max_norm`."""
    found: list[Finding] = []
    for part in record.parts_of(ClippedSteps):
        prefix = "grad_norm" if len(record.parts_of(ClippedSteps)) == 1 else f"grad_norm/{part.optimizer}"
        norms = [point.value for point in finite(record.curve(f"{prefix}/pre_clip"))]
        if part.steps < _FEWEST_STEPS:
            continue
        said = f"{format_percent(part.clipped / part.steps)} of {part.steps:,} steps were clipped"
        limit = "" if part.max_norm is None else f"max_norm={format_number(part.max_norm)}"
        if part.clipped >= 0.2 * part.steps:
            if limit and norms and part.max_norm is not None:
                where = "below" if part.max_norm < median(norms) else "above"
                said += f": {limit} is {where} the median norm of {format_number(median(norms))}"
            is_most = part.clipped > 0.5 * part.steps
            more = " Most updates were rescaled; a larger max_norm clips only what is unusual." * (
                is_most and bool(limit)
            )
            found.append(Finding("warning" if is_most else "note", f"{said}.{more}"))
        elif not part.clipped and limit and norms and part.max_norm is not None and part.max_norm > 10 * max(norms):
            largest = format_number(max(norms))
            found += note(f"No step was clipped: {limit} is far above the largest norm that was logged, {largest}.")
    return found


def skipped_steps(record: RunRecord) -> Sequence[Finding]:
    """Steps were skipped, as gradients were not finite."""
    found: list[Finding] = []
    for part in record.parts_of(ClippedSteps):
        if part.skipped:
            share = format_percent(part.skipped / max(part.steps, 1))
            said = f"{part.skipped:,} of {part.steps:,} steps ({share}) were skipped: gradients were NaN or Inf."
            found += warn(said)
    return found


def loss_not_finite(record: RunRecord) -> Sequence[Finding]:
    """A loss was NaN or Inf."""
    found: list[Finding] = []
    for stage in ("train", "val", "test", ""):
        for key, points in losses(record, stage):
            bad = [point for point in points if not math.isfinite(point.value)]
            if bad:
                where = f"at step {bad[0].step:,} (epoch {bad[0].epoch})"
                often = f", and in {len(bad):,} of {len(points):,} logged values" if len(bad) > 1 else ""
                found += warn(f"{key} was {format_number(bad[0].value)} {where}{often}.")
    return found


def loss_rises(record: RunRecord) -> Sequence[Finding]:
    """The training loss rose again, to at least twice its lowest level; of several losses, such as a GAN's, some do."""
    curves = losses(record, "train")
    for key, points in curves:
        if len(curves) > 1 and split_key(key).name != "loss":
            continue
        values = finite(points)
        if len(values) < 50:
            continue
        parts = equal_parts(values, 10)
        levels = [median([point.value for point in part]) for part in parts]
        lowest = min(range(10), key=lambda place: levels[place])
        rise, fall = levels[-1] - levels[lowest], abs(levels[0] - levels[lowest])
        if lowest < 8 and rise > max(levels[lowest], 0.5 * fall) and levels[lowest] > 0:
            step = parts[lowest][-1].step
            said = f"{key} rose from {format_number(levels[lowest])} (around step {step:,}) to "
            return warn(f"{said}{format_number(levels[-1])} at the end: training diverged.")
    return ()


def overfitting(record: RunRecord) -> Sequence[Finding]:
    """The best validation lies long before the end."""
    for key, sign, points in watched(record):
        values = finite(points)
        best = best_point(values, sign)
        if best is None or len(values) < _FEWEST_EPOCHS:
            continue
        last, spread = values[-1], max(point.value for point in values) - min(point.value for point in values)
        since = [point.value for point in values[values.index(best) :]]
        is_long = len(since) >= max(_FEWEST_EPOCHS, 1 + 0.3 * len(values))
        if is_long and abs(last.value - best.value) > 0.1 * spread and _is_beyond_noise(since):
            word = "lowest" if sign < 0 else "highest"
            return warn(
                f"{key} was {word} in epoch {best.epoch} ({format_number(best.value)}) and ended at "
                f"{format_number(last.value)} in epoch {last.epoch}: the model overfits; use the checkpoint of epoch "
                f"{best.epoch}, or stop earlier."
            )
    return ()


def _is_beyond_noise(values: Sequence[float]) -> bool:
    """Whether values that begin with their best one get worse by more than they scatter around a line.

    The best of many noisy values lies about two standard deviations from their mean.
    """
    bends = [
        abs(before - 2 * here + after) for before, here, after in zip(values, values[1:], values[2:], strict=False)
    ]
    deviation = max(median(bends), sum(bends) / len(bends)) / math.sqrt(6)
    return abs(median(values[1 + len(values) // 2 :]) - values[0]) > 6 * deviation


def still_improving(record: RunRecord) -> Sequence[Finding]:
    """Validation was at its best at the end, and still getting better."""
    if record.status != "finished":
        return ()
    for key, sign, points in watched(record):
        values = finite(points)
        if len(values) < 2 * _FEWEST_EPOCHS or best_point(values, sign) != values[-1]:
            continue
        whole = sign * (values[-1].value - values[0].value)
        quarter = values[-1 - len(values) // 4]
        late = sign * (values[-1].value - quarter.value)
        from_best = [point.value for point in reversed(values)]
        if whole > 0 and late > 0.1 * whole and _is_beyond_noise(from_best):
            return note(
                f"{key} was best in the last epoch ({format_number(values[-1].value)}), and "
                f"{format_percent(late / whole)} of what was gained came in the last quarter: train longer."
            )
    return ()


def learning_rate(record: RunRecord) -> Sequence[Finding]:
    """The learning rate never changed, or a schedule ended while it was still high."""
    keys = keys_of_topic(record, LEARNING_RATE)
    curves = [finite(record.curve(key)) for key in keys]
    curves = [points for points in curves if len(points) >= _FEWEST_STEPS]
    if not curves or record.status != "finished":
        return ()
    if all(_is_constant(points) for points in curves):
        rates = list(dict.fromkeys(format_number(points[0].value) for points in curves))
        said = f"The learning rate was {rates[0]}" if len(rates) == 1 else f"The learning rates were {', '.join(rates)}"
        return note(f"{said} in all steps: a schedule that ends near 0 often gives a better model.")
    first = next([point.value for point in points] for points in curves if not _is_constant(points))
    peak, last = max(first), first[-1]
    falls = all(one >= other for one, other in pairwise(first[first.index(peak) :]))  # and is no cycle
    if falls and 0.5 * peak <= last < peak and any(name == "schedulers" for name, _ in record.trainer):
        ended = f"The learning rate ended at {format_percent(last / peak)} of its peak of {format_number(peak)}"
        return note(f"{ended}: the schedule is longer than the run.")
    return ()


def _is_constant(points: Sequence[Point]) -> bool:
    return all(point.low == point.high == points[0].value for point in points)


def weak_classes(record: RunRecord) -> Sequence[Finding]:
    """A class is recognized much less often than the others."""
    found: list[Finding] = []
    for part in record.parts_of(ConfusionMatrix):
        if not part.is_square:
            continue
        totals, recalls = [sum(row) for row in part.counts], part.recalls
        known = [recall for recall, total in zip(recalls, totals, strict=True) if total >= _FEWEST_SAMPLES]
        if len(known) < 2:
            continue
        worst = min(
            (place for place, total in enumerate(totals) if total >= _FEWEST_SAMPLES), key=lambda place: recalls[place]
        )
        if recalls[worst] < min(0.8, median(known) - 0.15):
            row = part.counts[worst]
            taken = max((place for place in range(len(row)) if place != worst), key=lambda place: row[place])
            said = f"Class {part.classes[worst]!r} has a recall of {format_percent(recalls[worst])} in {part.stage}"
            said += (
                f" ({row[worst]:,} of {totals[worst]:,}; the median of all classes is {format_percent(median(known))})"
            )
            more = f": {row[taken]:,} were taken for {part.classes[taken]!r}" if row[taken] else ""
            found += warn(f"{said}{more}.")
    return found


def calibration(record: RunRecord) -> Sequence[Finding]:
    """Confidence is far from accuracy."""
    found: list[Finding] = []
    for part in record.parts_of(Reliability):
        bins = list(zip(part.confidence, part.share, part.weight, strict=False))
        error = part.calibration_error
        matrices = [other for other in record.parts_of(ConfusionMatrix) if other.stage == part.stage]
        samples = sum(sum(row) for matrix in matrices for row in matrix.counts) or math.inf
        if part.label != "accuracy" or not error >= max(0.05, 1.5 / math.sqrt(samples)):  # few samples scatter
            continue
        confidence = sum(one * weight for one, _, weight in bins)
        accuracy = sum(one * weight for _, one, weight in bins)
        word = "overconfident" if confidence > accuracy else "not confident enough"
        found += note(
            f"The model is {word} in {part.stage}: its mean confidence is {format_percent(confidence)}, its accuracy "
            f"{format_percent(accuracy)} (expected calibration error {error:.2f})."
        )
    return found


TRAINING_CHECKS: tuple[Check, ...] = (
    loss_not_finite,
    skipped_steps,
    loss_rises,
    overfitting,
    clipped_steps,
    weak_classes,
    still_improving,
    learning_rate,
    calibration,
)
