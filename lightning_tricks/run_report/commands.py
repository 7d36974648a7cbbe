"""The subcommand `lightning-tricks report`: the page of a run, of two, or a table of many."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.checks import path_argument
from lightning_tricks._shared.console import errors_of_use, make_console, write_json

if TYPE_CHECKING:
    from lightning_tricks.run_report.core.record import RunRecord


def add_to(commands: Any) -> None:
    """Add the subcommand to the command line's."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "report",
        help="write the page of a run that RunReport recorded, a page that compares two runs, or a table of many",
        description="Write the page of a run that RunReport recorded. For two runs, write a page that compares them. "
        "For more runs, or a folder of runs, print a table of them, the best first.",
    )
    add = parser.add_argument
    add(
        "folders",
        type=path_argument,
        metavar="DIR",
        nargs="+",
        help="the dirpath of a RunReport, or a folder of several",
    )
    add(
        "--out",
        type=path_argument,
        metavar="FILE",
        help="the file to write (default: report.html in DIR; for two runs, comparison.html in this folder)",
    )
    add("--sort", metavar="KEY", help="print a table, sorted by this metric (default: one of validation)")
    direction = parser.add_mutually_exclusive_group()
    direction.add_argument(
        "--max", dest="sign", action="store_const", const=1, default=0, help="print a table, the highest value first"
    )
    direction.add_argument(
        "--min", dest="sign", action="store_const", const=-1, help="print a table, the lowest value first"
    )
    add("--json", action="store_true", help="print the table as JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from lightning_tricks.run_report.core.comparison_page import comparison_page
    from lightning_tricks.run_report.core.other_runs import find_run_before, runs_in
    from lightning_tricks.run_report.core.page import run_page
    from lightning_tricks.run_report.core.record import PAGE_FILE, RUN_FILE, read_record
    from lightning_tricks.run_report.core.rendering import write_page

    folders = [path.parent if path.name == PAGE_FILE else path for path in arguments.folders]
    found = [[folder] if (folder / RUN_FILE).exists() else list(runs_in(folder)) or [folder] for folder in folders]
    has_table = bool(arguments.sort is not None or arguments.sign or arguments.json)
    if has_table or found != [[folder] for folder in folders] or len(folders) > 2:
        if arguments.out is not None:
            arguments.parser.error("--out is for the page of one or two runs; a table of runs is printed.")
        return _print_table(arguments, dict.fromkeys(run for runs in found for run in runs))
    records = [read_record(folder) for folder in folders]
    if len(records) == 1:
        page = run_page(records[0], find_run_before(folders[0], records[0]))
        path = arguments.out or folders[0] / PAGE_FILE
    else:
        page = comparison_page(records[0], records[1], _short_names(folders))
        path = arguments.out or Path("comparison.html")
    write_page(path, page)
    make_console(soft_wrap=True, highlight=False).print(f"Report: {path}", markup=False)
    return 0


def _print_table(arguments: argparse.Namespace, folders: Iterable[Path]) -> int:
    from lightning_tricks.run_report.core.other_runs import ends_of, make_overview
    from lightning_tricks.run_report.core.record import RunReportError, read_record

    runs: list[tuple[Path, RunRecord]] = []
    left_out: list[str] = []
    for folder in folders:
        try:
            runs.append((folder, ends_of(read_record(folder))))
        except (OSError, RunReportError) as error:
            left_out.append(f"Left out: {error}")
    if not runs:
        raise RunReportError("\n".join(left_out))
    names = _short_names([folder for folder, _ in runs])
    named = [(name, record) for name, (_, record) in zip(names, runs, strict=True)]
    with errors_of_use(arguments):
        overview = make_overview(named, arguments.sort or "", arguments.sign)
    if arguments.json:
        write_json({"sort": overview.key, "runs": overview.rows(), "left_out": left_out})
        return 0
    console = make_console(highlight=False)
    console.print(overview.table())
    for sentence in left_out:
        console.print(sentence, markup=False, soft_wrap=True)
    return 0


def _short_names(folders: list[Path]) -> list[str]:
    """Return the paths of folders from the deepest one that holds them all."""
    paths = [os.path.abspath(folder) for folder in folders]  # noqa: PTH100  # follows no link
    common = os.path.commonpath([os.path.dirname(path) for path in paths])  # noqa: PTH120
    return [Path(path).relative_to(common).as_posix() for path in paths]
