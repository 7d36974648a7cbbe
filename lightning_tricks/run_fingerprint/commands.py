"""The subcommand `lightning-tricks fingerprint`: find where two recorded runs diverge."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.checks import path_argument
from lightning_tricks._shared.console import make_console, write_json

if TYPE_CHECKING:
    from lightning_tricks.run_fingerprint.core.ranks import RankComparison


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
    words = (
        "print what is wrong among the ranks of a run: learning rates or weights that differ, or batches that are "
        "equal; the exit status is 0 if nothing is, 1 if something is, and 2 if there is nothing to compare"
    )
    ranks = tools.add_parser("ranks", help=words, description=words[0].upper() + words[1:] + ".")
    ranks.add_argument("DIR", type=path_argument, help="a file written by RunFingerprint, or a folder of such files")
    ranks.add_argument("--json", action="store_true", help="print JSON")
    ranks.set_defaults(run=_ranks, error_status=2)


def _diff(arguments: argparse.Namespace) -> int:
    from lightning_tricks.run_fingerprint.core.comparison import compare
    from lightning_tricks.run_fingerprint.core.ranks import compare_ranks
    from lightning_tricks.run_fingerprint.core.record import read_ranks, read_record

    first, second = read_record(arguments.A), read_record(arguments.B)
    if first.header.rank != second.header.rank:
        return _show_ranks(arguments, {f"{arguments.A}": compare_ranks([first, second])})
    is_rank_alone = first.header.rank > 0
    comparison = compare(*([first], [second]) if is_rank_alone else (read_ranks(arguments.A), read_ranks(arguments.B)))
    if arguments.json:
        resumes = [{"run": run, **resume._asdict()} for run, resume in comparison.incomplete_resumes]
        write_json({**asdict(comparison), "incomplete_resumes": resumes})
    else:
        _print(str(comparison))
    return int(comparison.divergence is not None)


def _ranks(arguments: argparse.Namespace) -> int:
    from lightning_tricks.run_fingerprint.core.ranks import compare_ranks
    from lightning_tricks.run_fingerprint.core.record import FingerprintRecordError, rank_path, read_ranks

    paths = sorted(arguments.DIR.iterdir()) if arguments.DIR.is_dir() else [arguments.DIR]
    runs = {f"{path}": compare_ranks(read_ranks(path)) for path in paths if rank_path(path, 1).exists()}
    if not runs:
        raise FingerprintRecordError(f"{arguments.DIR} has no record of several ranks: pass the file of rank 0.")
    return _show_ranks(arguments, runs)


def _show_ranks(arguments: argparse.Namespace, runs: Mapping[str, RankComparison]) -> int:
    from lightning_tricks.run_fingerprint.core.record import FingerprintRecordError

    if not any(any(run.compared.values()) for run in runs.values()):
        raise FingerprintRecordError(f"{' and '.join(runs)}: the ranks have no row in common, nothing was compared.")
    if arguments.json:
        write_json({path: {"found": run.found, "compared": run.compared} for path, run in runs.items()})
    for path, run in runs.items() if not arguments.json else ():
        _print(f"{path}: {run}" if len(runs) > 1 else str(run))
    return int(any(run.found for run in runs.values()))


def _print(text: str) -> None:
    make_console(soft_wrap=True, highlight=False).print(text, markup=False)
