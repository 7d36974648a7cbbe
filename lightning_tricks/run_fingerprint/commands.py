"""The subcommand `lightning-tricks fingerprint`: find where two recorded runs diverge."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from lightning_tricks._shared.checks import path_argument
from lightning_tricks._shared.console import make_console, write_json


def add_to(commands: Any) -> None:
    """Add the subcommand to the command line's."""
    parser: argparse.ArgumentParser = commands.add_parser("fingerprint", help="find where two recorded runs diverge")
    tools = parser.add_subparsers(metavar="TOOL")
    words = (
        "print the first step at which two runs differ, and what differs; the exit status is 0 if they are equal, 1 "
        "if they differ, and 2 if the files cannot be compared"
    )
    diff = tools.add_parser("diff", help=words, description=words[0].upper() + words[1:] + ".")
    for name in "AB":
        diff.add_argument(name, type=path_argument, help="a file written by RunFingerprint")
    diff.add_argument("--json", action="store_true", help="print JSON")
    diff.set_defaults(run=_diff, error_status=2)


def _diff(arguments: argparse.Namespace) -> int:
    from lightning_tricks.run_fingerprint.core.comparison import compare
    from lightning_tricks.run_fingerprint.core.record import read_ranks

    comparison = compare(read_ranks(arguments.A), read_ranks(arguments.B))
    if arguments.json:
        resumes = [{"run": run, **resume._asdict()} for run, resume in comparison.incomplete_resumes]
        write_json({**asdict(comparison), "incomplete_resumes": resumes})
    else:
        make_console(soft_wrap=True, highlight=False).print(str(comparison), markup=False)
    return int(comparison.divergence is not None)
