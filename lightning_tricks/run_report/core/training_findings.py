"""What was unusual in training: gradients, learning rates, classes."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import pairwise

from lightning_tricks._shared.report_parts import ClippedSteps, ConfusionMatrix, Reliability
from lightning_tricks.run_report.core.curves import LEARNING_RATE, keys_of_topic
from lightning_tricks.run_report.core.finding import Check, Finding, finite, median, note, steps_of, warn
from lightning_tricks.run_report.core.numbers import format_number, format_percent
from lightning_tricks.run_report.core.record import Point, RunRecord

_FEWEST_STEPS = 20  # below, a share of steps says nothing
_FEWEST_SAMPLES = 10  # of a class
_NEEDS_NO_SCHEDULE = re.compile(r"schedule.?free|lbfgs|prodigy|dadapt", re.IGNORECASE)


def clipped_steps(record: RunRecord) -> Sequence[Finding]:
    """A `max_norm` rescaled more than half of the steps, or none, as it is more than ten times the largest norm.

    Clipping by norm is meant for what is unusual. Of other methods, such as AGC, nothing is said: they change some of
    the gradients in most steps when all is well.
    """
    found: list[Finding] = []
    parts = record.parts_of(ClippedSteps)
    for part in parts:
        if part.max_norm is None or part.steps < _FEWEST_STEPS:
            continue
        prefix = "grad_norm" if len(parts) == 1 else f"grad_norm/{part.optimizer}"
        norms = [point.value for point in finite(record.curve(f"{prefix}/pre_clip"))]
        limit = f"max_norm={format_number(part.max_norm)}"
        if part.clipped > 0.5 * part.steps:
            usual = median(norms) if norms else 0.0
            why = f": {limit} is below the median norm of {format_number(usual)}" if part.max_norm < usual else ""
            found += note(
                f"{format_percent(part.clipped / part.steps)} of {steps_of(record, part)} were clipped{why}. "
                "Most updates were rescaled; a larger max_norm clips only what is unusual."
            )
        elif not part.clipped and norms and part.max_norm > 10 * max(norms):
            largest = format_number(max(norms))
            whose = f" of optimizer {part.optimizer}" * (len(parts) > 1)
            found += note(
                f"No step{whose} was clipped: {limit} is far above the largest norm that was logged, {largest}."
            )
    return found


def skipped_steps(record: RunRecord) -> Sequence[Finding]:
    """Steps were skipped, as gradients were not finite.

    In true fp16 a GradScaler finds its scale by steps that overflow: a warning needs more than 1 % of them, and 10.
    """
    found: list[Finding] = []
    parts = record.parts_of(ClippedSteps)
    is_scaled = dict(record.trainer).get("precision", "").startswith("16")
    for part in parts:
        if part.skipped > (max(10, 0.01 * part.steps) if is_scaled else 0):
            share = format_percent(part.skipped / max(part.steps, 1))
            said = f"{part.skipped:,} of {steps_of(record, part)} ({share}) were skipped: gradients were NaN or Inf."
            found += warn(said)
    return found


def learning_rate(record: RunRecord) -> Sequence[Finding]:
    """The learning rate never changed, or a schedule was cut off while it was still high.

    It was cut off if the rate fell without a break since its peak, ended above half of it, and fell in the last tenth
    no slower than on average: rates that fall in stairs, or ever more slowly, have no end that a run could miss.
    """
    curves = [finite(record.curve(key)) for key in keys_of_topic(record, LEARNING_RATE)]
    curves = [points for points in curves if len(points) >= _FEWEST_STEPS]
    schedulers = ", ".join(text for name, text in record.trainer if name.startswith("scheduler"))
    optimizers = ", ".join(text for name, text in record.trainer if name.startswith("optimizer"))
    if not curves or record.status != "finished" or "plateau" in schedulers.lower():  # which waits, rightly
        return ()
    if all(_is_constant(points) for points in curves):
        rates = list(dict.fromkeys(format_number(points[0].value) for points in curves))
        said = f"The learning rate was {rates[0]}" if len(rates) == 1 else f"The learning rates were {', '.join(rates)}"
        if schedulers:
            return note(f"{said} in all steps: {schedulers} never changed it.")
        advice = "a schedule that ends near 0 often gives a better model"
        return [] if _NEEDS_NO_SCHEDULE.search(optimizers) else note(f"{said} in all steps: {advice}.")
    if schedulers:
        for points in curves:
            last_at = {point.value: point.step for point in points}  # stairs of epochs fall without a break, too
            stairs = list(last_at.items())[list(last_at).index(max(last_at)) :]
            if _is_cut_off(stairs):
                (peak, _), (last, _) = stairs[0], stairs[-1]
                said = f"The learning rate ended at {format_percent(last / peak)} of its peak of {format_number(peak)}"
                return note(f"{said} and was still falling: the schedule is longer than the run.")
    return ()


def _is_cut_off(stairs: Sequence[tuple[float, int]]) -> bool:
    """Whether rates, given with the last step of each, end high and fall as fast at the end as on average."""
    if len(stairs) < 5 or not all(high > low and step < later for (high, step), (low, later) in pairwise(stairs)):
        return False
    (peak, start), (before, late), (last, end) = stairs[0], stairs[-1 - max(1, len(stairs) // 10)], stairs[-1]
    return last >= 0.5 * peak and (before - last) / (end - late) >= 0.95 * (peak - last) / (end - start)


def _is_constant(points: Sequence[Point]) -> bool:
    return all(point.low == point.high == points[0].value for point in points)


def weak_classes(record: RunRecord) -> Sequence[Finding]:
    """A class is recognized much less often than the others.

    Its recall lies below 80 %, and below the median of the other classes by 15 points, and by 4 standard deviations
    both of these and of what so few samples would have with that median.
    """
    found: list[Finding] = []
    for part in record.parts_of(ConfusionMatrix):
        recalls, totals = part.recalls, [sum(row) for row in part.counts]
        known = [place for place, total in enumerate(totals) if total >= _FEWEST_SAMPLES]
        if not part.is_square or len(known) < 2:
            continue
        worst = min(known, key=recalls.__getitem__)
        others = [recalls[place] for place in known if place != worst]
        usual = median(others)
        scatter = (
            1.25 * sum(abs(recall - usual) for recall in others) / len(others)
        )  # of normal numbers, their deviation
        smoothed = (usual * totals[worst] + 2) / (totals[worst] + 4)  # as 100 % has no deviation
        chance = math.sqrt(smoothed * (1 - smoothed) / totals[worst])
        if recalls[worst] < min(0.8, usual - max(0.15, 4 * scatter, 4 * chance)):
            row = part.counts[worst]
            taken = max((place for place in range(len(row)) if place != worst), key=row.__getitem__)
            said = f"Class {part.classes[worst]!r} has a recall of {format_percent(recalls[worst])} in {part.stage}"
            said += f" ({row[worst]:,} of {totals[worst]:,}; the median of the others is {format_percent(usual)})"
            more = f": {row[taken]:,} were taken for {part.classes[taken]!r}" if row[taken] else ""
            found += warn(f"{said}{more}.")
    return found


def calibration(record: RunRecord) -> Sequence[Finding]:
    """Confidence is far from accuracy: by 0.05 on average over the bins, and by more than few samples scatter.

    Only a difference of the means that makes most of that says in which direction.
    """
    found: list[Finding] = []
    for part in record.parts_of(Reliability):
        error = part.calibration_error
        matrices = [other for other in record.parts_of(ConfusionMatrix) if other.stage == part.stage]
        samples = sum(sum(row) for matrix in matrices for row in matrix.counts) or math.inf
        if part.label != "accuracy" or not error >= max(0.05, 1.5 / math.sqrt(samples)):
            continue
        confidence = sum(one * weight for one, weight in zip(part.confidence, part.weight, strict=False))
        accuracy = sum(one * weight for one, weight in zip(part.share, part.weight, strict=False))
        word = "is overconfident" if confidence > accuracy else "is not confident enough"
        if abs(confidence - accuracy) < 0.5 * error:
            word = "is too confident in some predictions and not enough in others"
        found += note(
            f"The model {word} in {part.stage}: its mean confidence is {format_percent(confidence)}, its accuracy "
            f"{format_percent(accuracy)} (expected calibration error {error:.2f})."
        )
    return found


TRAINING_CHECKS: tuple[Check, ...] = (skipped_steps, clipped_steps, weak_classes, learning_rate, calibration)
