"""Pictures of schedules."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_tricks._shared.extras import import_extra
from lightning_tricks.lr_schedules.core.schedule_spec import ScheduleSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_schedule(
    spec: ScheduleSpec,
    total_steps: int,
    *,
    lr: float = 1.0,
    steps_per_epoch: int | None = None,
    ax: Axes | None = None,
    label: str | None = None,
) -> Axes:
    """Draw the learning rate of a run; needs matplotlib, the extra `reports`.

    Args:
        spec: The schedule.
        total_steps: Optimizer steps of the run, at least 1.
        lr: The base learning rate.
        steps_per_epoch: Optimizer steps of an epoch, for a spec that counts in epochs.
        ax: Axes to draw on; None makes a figure.
        label: Name of the line, `spec.kind` by default.

    Returns:
        The axes; `plot_schedule(...).figure.savefig(path)` writes the picture.

    Raises:
        ImportError: If matplotlib is missing, with the extra to install.
        ValueError: If the spec does not fit into the run.

    Examples:
        >>> plot_schedule(ScheduleSpec("wsd"), 1000).get_xlabel()
        'optimizer steps'
    """
    figure = import_extra("matplotlib.figure", "reports", "plot_schedule needs matplotlib")
    rates = [lr * factor for factor in spec.factors(total_steps, steps_per_epoch)]
    if ax is None:
        ax = figure.Figure(figsize=(7, 3), layout="constrained").subplots()
        ax.spines[["top", "right"]].set_visible(False)
        ax.grid(alpha=0.3)
        ax.margins(x=0)
    if not ax.get_xlabel():
        ax.set(xlabel="optimizer steps", ylabel="learning rate" if lr != 1 else "factor of the learning rate")
    ax.step(range(len(rates)), rates, where="post", label=label or spec.kind)
    ax.set_ylim(bottom=0)
    return ax
