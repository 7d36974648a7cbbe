"""The subcommand `lightning-tricks report`: the page of a run, or of two."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from lightning_tricks._shared.checks import path_argument
from lightning_tricks._shared.console import make_console


def add_to(commands: Any) -> None:
    """Add the subcommand to the command line's."""
    words = "make the page of a run that RunReport recorded, or a page that compares two of them"
    parser: argparse.ArgumentParser = commands.add_parser(
        "report", help=words, description=words[0].upper() + words[1:] + "."
    )
    parser.add_argument("A", type=path_argument, metavar="DIR", help="the folder that was the path of a RunReport")
    parser.add_argument(
        "B", type=path_argument, metavar="OTHER", nargs="?", help="the folder of another run, to compare it with"
    )
    parser.add_argument(
        "--out",
        type=path_argument,
        metavar="FILE",
        help="the page (default: report.html in DIR; comparison.html in this folder for two runs)",
    )
    parser.set_defaults(run=_run)


def _names(first: Path, second: Path) -> tuple[str, str]:
    """Return the names of two folders, or their paths where the names are equal."""
    names = first.name, second.name
    return (str(first), str(second)) if names[0] == names[1] or "" in names else names


def _run(arguments: argparse.Namespace) -> int:
    from lightning_tricks.run_report.core.comparison_page import comparison_page
    from lightning_tricks.run_report.core.page import run_page
    from lightning_tricks.run_report.core.record_file import PAGE_FILE, read_record, write_page

    first = read_record(arguments.A)
    if arguments.B is None:
        page, path = run_page(first), arguments.out or arguments.A / PAGE_FILE
    else:
        page = comparison_page(first, read_record(arguments.B), _names(arguments.A, arguments.B))
        path = arguments.out or Path("comparison.html")
    write_page(path, page)
    make_console(soft_wrap=True, highlight=False).print(f"Report: {path}", markup=False)
    return 0
