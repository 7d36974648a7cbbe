"""The findings about losses and metrics: how training went."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from statistics import median

from lightning_tricks._shared.text import format_number, format_percent
from lightning_tricks.run_report.core import curves
from lightning_tricks.run_report.core.record import Finding, Point, RunRecord, note, warning

_PARTS = 10  # of a curve, whose levels are compared: each is a median
_FEWEST_EPOCHS = 4
_WHOLE_LOSS = ("loss", "total_loss", "loss_total", "loss/total")


def loss_not_finite(record: RunRecord) -> Iterator[Finding]:
    """A loss was NaN or Inf: such a value is never meant, and its gradients are lost."""
    for stage in ("train", "val", "test", ""):
        for key, points in curves.losses(record, stage):
            bad = [point for point in points if not math.isfinite(point.value)]
            if bad:
                where = f"at step {bad[0].step:,} (epoch {bad[0].epoch})"
                often = f", and in {len(bad):,} of {len(points):,} recorded values" if len(bad) > 1 else ""
                yield warning(f"{key} was {format_number(bad[0].value)} {where}{often}.")


def loss_rises(record: RunRecord) -> Iterator[Finding]:
    """The training loss rose again by much of its fall: training diverged.

    That is so if the level of its last tenth (of at least 10 values) lies above the lowest level, which is not among
    the last two tenths, by more than half of the whole fall before, beyond scatter, and at least doubled if losses are
    positive. A loss that never fell must end at its highest level. Nothing is said where a rising loss means something
    else: of several losses, such as a GAN's, some rise; the weight of a part of it rose meanwhile (`kl_weight`); or
    another value got better meanwhile, such as the reward.
    """
    trained = _training_losses(record)
    for key, points in trained:
        values = curves.finite(points)
        if len(values) < _PARTS or (len(trained) > 1 and curves.split_key(key).name.lower() not in _WHOLE_LOSS):
            continue
        parts = curves.equal_parts(values, _PARTS)
        levels = [median([point.value for point in part]) for part in parts]
        lowest = min(range(_PARTS), key=levels.__getitem__)
        low, last, step = levels[lowest], levels[-1], parts[lowest][-1].step
        fall = max(levels[: lowest + 1]) - low
        scatter = _deviation(values) / math.sqrt(len(values) / _PARTS)  # that of a level
        is_high = last - low > max(0.5 * fall, low, 7 * scatter) and (fall > 0 or last == max(levels))
        if is_high and lowest < _PARTS - 2 and not _has_another_meaning(record, key, step, of_training=True):
            said = f"{key} rose from {format_number(low)} (around step {step:,}) to {format_number(last)} at the end"
            yield warning(f"{said}: training diverged.")
            return


def _training_losses(record: RunRecord) -> list[tuple[str, list[Point]]]:
    """Return the losses of training: those that say so, and those that say nothing and have values of steps."""
    of_steps = {key for row in record.rows if row.kind == "step" for key in row.values}
    return curves.losses(record, "train") + [loss for loss in curves.losses(record, "") if loss[0] in of_steps]


def _has_another_meaning(record: RunRecord, key: str, step: int, *, of_training: bool) -> bool:
    """Whether a value got worse after a step as a part of the loss counted more, or while another value got better.

    The other value is one of validation or, if `of_training`, one that should be high.
    """
    for other in record.logged_keys():
        parts = curves.split_key(other)
        sign = 1 if curves.is_weight(other) else curves.sign_of_better(parts.name)
        sign *= curves.is_weight(other) or parts.stage == "val" or (of_training and sign > 0)
        if sign and other != key and sign * _change(record.curve(other), step) > 0:
            return True
    return False


def _change(points: Sequence[Point], step: int) -> int:
    """Return 1 if a curve rose after a step, -1 if it fell, 0 if it did neither by more than it scatters."""
    values = curves.finite(points)
    before = [point.value for point in values if point.step <= step][-3:] or [point.value for point in values[:1]]
    after = [point.value for point in values if point.step > step][-3:]
    if not after:
        return 0
    change = median(after) - median(before)
    return int(math.copysign(1, change)) if change and abs(change) > 4 * _deviation(values) else 0


def overfitting(record: RunRecord) -> Iterator[Finding]:
    """The best validation lies long before the end, and no other value of validation got better since then.

    Long is a third of the values, and three at least; worse is by a tenth of the whole range, and by more than they
    scatter. Only a training loss that did not rise meanwhile makes it overfitting: else training may have gone wrong.
    """
    for key, sign, points in curves.watched(record):
        values = curves.finite(points)
        best = curves.best_point(values, sign)
        if best is None or len(values) < _FEWEST_EPOCHS:
            continue
        if _has_another_meaning(record, key, best.step, of_training=False):
            continue
        last, spread = values[-1], max(point.value for point in values) - min(point.value for point in values)
        since = [point.value for point in values[values.index(best) :]]
        is_long = len(since) >= max(_FEWEST_EPOCHS, 1 + 0.3 * len(values))
        if is_long and abs(last.value - best.value) > 0.1 * spread and _is_beyond_noise(since):
            word = "lowest" if sign < 0 else "highest"
            changes = [_change(curve, best.step) for _, curve in _training_losses(record)]
            cause = "the model overfits; " if changes and max(changes) <= 0 else ""
            where, end = (f"epoch {point.epoch}" for point in (best, last))
            if len({point.epoch for point in values}) < len(values):  # several validations in an epoch
                where, end = (f"step {point.step:,}" for point in (best, last))
            yield warning(
                f"{key} was {word} in {where} ({format_number(best.value)}) and ended at {format_number(last.value)} "
                f"in {end}: {cause}use the checkpoint of {where}, or stop earlier."
            )


def _deviation(points: Sequence[Point]) -> float:
    """Return the standard deviation of values around a smooth curve, by the median of their second differences."""
    bends = _bends([point.value for point in points])
    return median(bends) / 1.65 if bends else 0.0  # of normal numbers, the median is 1.65 deviations


def _bends(values: Sequence[float]) -> list[float]:
    return [abs(before - 2 * here + after) for before, here, after in zip(values, values[1:], values[2:], strict=False)]


def _is_beyond_noise(values: Sequence[float]) -> bool:
    """Whether values that begin with their best one get worse by more than they scatter around a line.

    The best of many noisy values lies about two standard deviations from their mean.
    """
    bends = _bends(values)
    deviation = max(median(bends), sum(bends) / len(bends)) / math.sqrt(6)
    return abs(median(values[1 + len(values) // 2 :]) - values[0]) > 6 * deviation


def still_improving(record: RunRecord) -> Iterator[Finding]:
    """Validation was at its best at the end, and still getting better at a rate of a tenth of the gain in a quarter.

    A learning rate that ended below half of its peak has made the end: then a longer run needs a longer schedule as
    well, and nothing is said.
    """
    if record.status != "finished" or _ended_low(record):
        return
    for key, sign, points in curves.watched(record):
        values = curves.finite(points)
        if len(values) < 2 * _FEWEST_EPOCHS or curves.best_point(values, sign) != values[-1]:
            continue
        whole = sign * (values[-1].value - values[0].value)
        quarter = values[-1 - len(values) // 4]
        late = sign * (values[-1].value - quarter.value)
        from_best = [point.value for point in reversed(values)]
        if whole > 0 and late > 0.1 * whole and _is_beyond_noise(from_best):
            yield note(
                f"{key} was best at the end ({format_number(values[-1].value)}), and "
                f"{format_percent(late / whole)} of the improvement came in the last quarter: train longer."
            )


def _ended_low(record: RunRecord) -> bool:
    rates = [[point.value for point in points] for points in curves.learning_rates(record)]
    return any(values and values[-1] < 0.5 * max(values) for values in rates)
