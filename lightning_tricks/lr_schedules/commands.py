"""`lightning-tricks schedule`: show a schedule before a run is spent on it."""

from __future__ import annotations

import argparse
from dataclasses import fields
from typing import Any

from lightning_tricks._shared.checks import path_argument
from lightning_tricks._shared.console import errors_of_use, make_console, write_json


def add_to(commands: Any) -> None:
    """Add the subcommand to the command line's."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "schedule", help="show a learning rate schedule, step by step"
    )
    add = parser.add_argument
    add(
        "--kind",
        default="warmup_cosine",
        help="kind of schedule: warmup_cosine, wsd, multistep, ... (default: %(default)s)",
    )
    add("--total", type=int, required=True, metavar="N", help="number of optimizer steps of the run")
    add("--lr", type=float, default=1e-3, help="base learning rate (default: %(default)s)")
    duration = "a number, a fraction of the run, or a string such as '500 steps'"
    add("--warmup", type=_duration, help=f"length of the warm-up: {duration}")
    add("--milestones", type=_duration, nargs="+", help=f"milestones of the kind multistep; each is {duration}")
    add("--gamma", type=float, help="factor of the kinds multistep, step and exponential")
    add("--step-size", type=_duration, help=f"length of each step of the kind step: {duration}")
    add("--power", type=float, help="exponent of the kind polynomial (default: 1)")
    add("--decay", type=_duration, help=f"length of the final decay of the kind wsd: {duration} (default: 0.2)")
    add("--start-factor", type=float, help="factor of the kind one_cycle at the first step (default: 0.04)")
    add("--end-factor", type=float, help="factor of the base learning rate at the end")
    add("--interval", default="step", help="unit of the schedule: step or epoch (default: %(default)s)")
    add(
        "--steps-per-epoch",
        type=int,
        metavar="N",
        help="number of optimizer steps of an epoch; required if a duration is in epochs",
    )
    add("--plot", type=path_argument, metavar="FILE", help="plot the schedule to this .png, .svg or .pdf file")
    add("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from lightning_tricks._shared.checks import check_number
    from lightning_tricks._shared.fitting_table import FittingTable
    from lightning_tricks.lr_schedules.core.schedule_spec import ScheduleSpec, plot_schedule

    names = [part.name for part in fields(ScheduleSpec) if part.name not in ("total", "rest")]
    with errors_of_use(arguments):
        check_number("--lr", arguments.lr, above=0)
        spec = ScheduleSpec(**{name: getattr(arguments, name) for name in names})
        factors = spec.factors(arguments.total, arguments.steps_per_epoch)
    peak = factors.index(max(factors))
    steps = sorted({0, peak, *(round(arguments.total * tenth / 10) for tenth in range(11))})
    rows = [{"step": step, "factor": factors[step], "lr": arguments.lr * factors[step]} for step in steps]
    console = make_console(quiet=arguments.json)
    if arguments.json:
        write_json({"kind": spec.kind, "total": arguments.total, "lr": arguments.lr, "peak": peak, "rows": rows})
    table = FittingTable("step", "factor", "learning rate", drop=["factor"])
    table.title = f"{spec.kind}, {arguments.total:,} steps"
    for row in rows:
        note = " (peak)" if row["step"] == peak else ""
        table.add_row(f"{row['step']:,}{note}", f"{row['factor']:.4f}", f"{row['lr']:.3g}")
    console.print(table)
    if arguments.plot is not None:
        axes = plot_schedule(spec, arguments.total, lr=arguments.lr, steps_per_epoch=arguments.steps_per_epoch)
        axes.figure.savefig(arguments.plot)  # type: ignore[union-attr]
        console.print(f"The plot was written to {arguments.plot}.")
    return 0


def _duration(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
