"""How calibrations are fitted to logits and labels in double precision, each by the minimum of a convex function."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

_RESOLUTION = 1e-15  # scikit-learn takes smaller differences for none
_LEAST_ROWS = 10


def fit_calibration(method: str, logits: Tensor, target: Tensor) -> dict[str, Tensor]:
    """Fit a calibration.

    Args:
        method: "temperature", "vector" or "isotonic".
        logits: (N, C), float64.
        target: Labels as probabilities of the classes, (N, C), float64.

    Returns:
        The tensors that `Calibration.set_values` takes.

    Raises:
        ValueError: If the rows do not determine the calibration; the message says why, and what to do.
    """
    rows, classes = logits.shape
    needed = max(_LEAST_ROWS, {"temperature": 1, "vector": 2 * classes, "isotonic": classes}[method])
    if rows < needed:
        raise ValueError(
            f"{method!r} needs {needed} held-out rows or more for {classes} classes, got {rows}: give more."
        )
    if method == "temperature":
        return {"temperature": fit_temperature(logits, target)}
    if len(absent := (target.sum(0) == 0).nonzero()):
        remedy = "so it would give this class the probability 0: give rows of all classes, or use temperature"
        raise ValueError(f"{method!r}: none of the {rows} held-out rows is of class {int(absent[0])}, {remedy}.")
    if method == "vector":
        return dict(zip(("scale", "bias"), fit_vector(logits, target), strict=True))
    probabilities = logits.softmax(1).T.numpy()
    steps = [isotonic_steps(x, y) for x, y in zip(probabilities, target.T.numpy(), strict=True)]
    most = max(2, *(len(x) for x, _ in steps))
    padded = np.array([[np.pad(part, (0, most - len(part)), "edge") for part in pair] for pair in steps])
    return {"thresholds": torch.from_numpy(padded[:, 0]), "values": torch.from_numpy(padded[:, 1])}


def fit_temperature(logits: Tensor, target: Tensor) -> Tensor:
    """Return the temperature with the least negative log-likelihood, by a Newton search for 1 / T between two bounds.

    The likelihood is convex in 1 / T, which is not negative.

    Args:
        logits: (N, C), float64.
        target: Probabilities of the classes, (N, C), float64.

    Raises:
        ValueError: If there is none: each row is predicted rightly, or none better than by chance.

    Source: Guo et al., arXiv 1706.04599.
    """
    if ((logits == -torch.inf) & (target > 0)).any():
        raise ValueError("'temperature': a label has the probability 0, which no temperature changes: use isotonic.")
    finite = torch.where(logits.isfinite(), logits, 0)
    scored = (target * finite).sum(1)
    if ((logits.amax(1) - scored) <= 0).all():
        remedy = "so the lowest temperature would be the best: give more rows that were not trained on"
        raise ValueError(f"'temperature': all {len(logits)} held-out rows are predicted correctly, {remedy}.")
    if (finite.sum(1) / logits.isfinite().sum(1) - scored).mean() >= 0:
        remedy = "so the highest temperature would be the best: check the labels, and that the module is trained"
        raise ValueError(f"'temperature': the logits say nothing about the held-out labels, {remedy}.")
    low, high, beta = 0.0, torch.inf, 1.0 / max(float(finite.abs().max()), 1e-300)
    for _ in range(2000):
        share = (beta * logits).softmax(1)
        mean = (share * finite).sum(1)
        slope = float((mean - scored).mean())
        curvature = float((share * finite.square()).sum(1).sub(mean.square()).mean())
        low, high = (beta, high) if slope < 0 else (low, beta)
        found = beta - slope / curvature if curvature > 0 else torch.inf
        if not low < found < min(high, 10 * beta):
            found = min(10 * beta, (low + high) / 2)
        if abs(found - beta) <= 1e-13 * beta:
            break
        beta = found
    return torch.tensor(1 / beta, dtype=torch.float64)


def fit_vector(logits: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return scale and bias of each class, (C,) each, with the least negative log-likelihood, by Newton's method.

    Args:
        logits: (N, C), float64.
        target: Probabilities of the classes, (N, C), float64.

    Raises:
        ValueError: If there are none, as the rows of a class can be told from all others without error.

    Source: Guo et al., arXiv 1706.04599.
    """
    if not logits.isfinite().all():
        raise ValueError("'vector' needs finite logits, but some are infinite: use temperature or isotonic.")
    rows, classes = logits.shape
    size = logits.abs().amax(0).clamp(min=1e-300)  # so that all directions are of the same order
    given = logits / size
    found = torch.cat([size / size.max(), torch.zeros_like(size)])

    def loss(point: Tensor) -> Tensor:
        return -(target * (given * point[:classes] + point[classes:]).log_softmax(1)).sum(1).mean()

    now = loss(found)
    for _ in range(500):
        share = (given * found[:classes] + found[classes:]).softmax(1)
        gradient = torch.cat([((share - target) * given).mean(0), (share - target).mean(0)])
        both = torch.cat([share * given, share], 1)
        square, cross, one = ((share * given**power).mean(0).diag() for power in (2, 1, 0))
        hessian = torch.cat([torch.cat([square, cross], 1), torch.cat([cross, one], 1)]) - both.T @ both / rows
        hessian.diagonal().add_(1e-13)  # a number that is added to all biases changes nothing
        step = -torch.linalg.solve(hessian, gradient)
        step[classes:] -= step[classes:].mean()
        gain = -(gradient @ step)
        if gain < 1e-9 and loss(found + 100 * step / step.norm()) < now - 1e-13:  # the further, the better
            remedy = "give more rows that were not trained on, or use temperature"
            raise ValueError(f"'vector' has no optimum, as it separates the held-out rows without error: {remedy}.")
        length = 1.0
        while (following := loss(found + length * step)) > now and length > 1e-10:
            length /= 2
        if gain < 1e-20 or following >= now:
            break
        found, now = found + length * step, following
    return found[:classes] / size, found[classes:]


def isotonic_steps(x: npt.NDArray[np.float64], y: npt.NDArray[np.float64]) -> tuple[list[float], list[float]]:
    """Return the thresholds and values of the isotonic regression of y on x, by pooling adjacent violators.

    Between thresholds, a line leads from one value to the next, and outside of them the outer ones hold: those of
    scikit-learn's `IsotonicRegression(out_of_bounds="clip")`, which takes values of x for one that differ by less than
    1e-15.

    Args:
        x: (N,), N >= 1.
        y: (N,).

    Examples:
        >>> isotonic_steps(np.array([0.1, 0.2, 0.3, 0.4]), np.array([0.0, 1.0, 0.0, 1.0]))
        ([0.1, 0.2, 0.3, 0.4], [0.0, 0.5, 0.5, 1.0])
    """
    order = np.lexsort((y, x))
    x, y = x[order], y[order]
    starts, current = [0], x[0]
    for place, value in enumerate(x.tolist()):
        if value - current >= _RESOLUTION:
            starts.append(place)
            current = value
    sums, counts, x = np.add.reduceat(y, starts), np.diff([*starts, len(y)]), x[starts]
    blocks: list[tuple[float, int, int, int]] = []  # sum and count of y, and the places of the first and last x
    for place, (total, count) in enumerate(zip(sums.tolist(), counts.tolist(), strict=True)):
        first = place
        while blocks and blocks[-1][0] * count >= total * blocks[-1][1]:
            before = blocks.pop()
            total, count, first = total + before[0], count + before[1], before[2]
        blocks.append((total, count, first, place))
    steps = [(x[end], total / count) for total, count, *ends in blocks for end in dict.fromkeys(ends)]
    return [float(threshold) for threshold, _ in steps], [value for _, value in steps]
