"""The subcommand `lightning-tricks hang`: which rank of a run that stands still is behind."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from lightning_tricks._shared.checks import path_argument
from lightning_tricks._shared.console import errors_of_use, write_json, write_output


def add_to(commands: Any) -> None:
    """Add the subcommand to the command line's."""
    words = "show which rank of a hanging run is behind, and which batches or logged values differ"
    parser: argparse.ArgumentParser = commands.add_parser("hang", help=words, description=f"{words.capitalize()}.")
    parser.add_argument("folder", metavar="DIR", type=path_argument, help="the dirpath of HangWatch")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=_hang)


def _hang(arguments: argparse.Namespace) -> int:
    from lightning_tricks.hang_watch.functional import compare_ranks

    with errors_of_use(arguments):
        report = compare_ranks(arguments.folder)
    write_json(asdict(report)) if arguments.json else write_output(f"{report}\n")
    return 0
