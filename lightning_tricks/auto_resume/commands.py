"""`lightning-tricks resume`: how far a run is, and whether its checkpoints are intact."""

from __future__ import annotations

import argparse
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.checks import path_argument
from lightning_tricks._shared.console import make_console, write_json

if TYPE_CHECKING:
    from lightning_tricks.auto_resume.core.checkpoint_folder import CheckpointFolder, Manifest


def add_to(commands: Any) -> None:
    """Add `resume` to the subcommands of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser("resume", help="inspect the checkpoints of AutoResume")
    subcommands = parser.add_subparsers(metavar="TOOL")
    descriptions = {
        "status": "show the progress of a run, and the checkpoint from which it would resume",
        "verify": "check that each checkpoint is intact, byte for byte; the exit status is 1 if one is not, 2 if there "
        "is none",
    }
    for name, run, error_status in (("status", _status, 1), ("verify", _verify, 2)):
        subcommand = subcommands.add_parser(
            name, help=descriptions[name], description=descriptions[name][0].upper() + descriptions[name][1:] + "."
        )
        subcommand.add_argument("dirpath", type=path_argument, metavar="DIR", help="the dirpath of AutoResume")
        subcommand.add_argument("--json", action="store_true", help="print JSON")
        subcommand.set_defaults(run=partial(_run, run), error_status=error_status)


def _run(run: Any, arguments: argparse.Namespace) -> int:
    from lightning_tricks.auto_resume.core.checkpoint_folder import fit_folders

    folders = [
        folder
        for folder in fit_folders(arguments.dirpath)
        if folder.manifests() or folder.problems() or folder.read_status()
    ]
    if not folders:
        raise FileNotFoundError(
            f"{arguments.dirpath} contains no checkpoints of AutoResume. Give the dirpath of a run."
        )
    return int(run(folders, arguments.json))


def _status(folders: list[CheckpointFolder], as_json: bool) -> int:
    from lightning_tricks._shared.text import format_bytes

    if as_json:
        write_json([_status_values(folder) for folder in folders])
        return 0
    console = make_console(soft_wrap=True, highlight=False)
    for folder in folders:
        manifests = folder.manifests()
        status = _last_known(folder, manifests)
        if status:
            description = f"{folder.private / 'status.json'} is damaged"
            with suppress(OverflowError, TypeError, ValueError):
                description = _describe_status(status)
            console.print(f"{folder.path}: {description}", markup=False)
        for manifest in manifests:
            progress = "at the end" if manifest.finished else f"batch {manifest.batches} of epoch {manifest.epoch}"
            size = sum(size for _, size in manifest.files.values())
            summary = f"step {manifest.step}, {progress}, {format_bytes(size)}, {_describe_age(manifest.written)}"
            console.print(f"  {manifest.file}: {summary}", markup=False)
        for path, problem in folder.problems().items():
            console.print(f"  {path.name}: {problem}", markup=False)
    return 0


def _last_known(folder: CheckpointFolder, manifests: list[Manifest]) -> dict[str, Any]:
    """Return the status that the run wrote last, at the step of its newest checkpoint if that was written later."""
    status, newest = folder.read_status(), next(iter(manifests), None)
    with suppress(TypeError, ValueError):
        if status and newest is not None and newest.written > float(status.get("time", 0)):
            return {**status, "epoch": newest.epoch, "step": newest.step, "time": newest.written}
    return status


def _status_values(folder: CheckpointFolder) -> dict[str, Any]:
    manifests = folder.manifests()
    status, names = _last_known(folder, manifests), ("epoch", "max_epochs", "step", "max_steps", "pid", "host", "time")
    of_checkpoints = ("file", "epoch", "batches", "step", "finished", "bytes", "written")
    return {
        "folder": str(folder.path),
        "state": _state(status) if status else None,
        **{name: status.get(name) for name in names},
        "checkpoints": [{name: getattr(each, name) for name in of_checkpoints} for each in manifests],
        "damaged": [path.name for path in folder.problems()],
    }


def _verify(folders: list[CheckpointFolder], as_json: bool) -> int:
    problems = dict[str, str | None]()
    for folder in folders:
        found = {folder.private / each.file: folder.find_problem(each) or None for each in folder.manifests()}
        problems |= {str(path): problem for path, problem in {**found, **folder.problems()}.items()}
    if as_json:
        write_json([{"file": file, "problem": problem} for file, problem in problems.items()])
    console = make_console(soft_wrap=True, highlight=False, quiet=as_json)
    for file, problem in problems.items():
        console.print(f"{file}: {problem or 'complete'}", markup=False)
    return int(any(problems.values()))


def _state(status: dict[str, Any]) -> str:
    from lightning_tricks._shared.file_locks import has_exited

    state = str(status.get("state", "unknown"))
    return "killed" if state == "running" and has_exited(status) else state


def _describe_status(status: dict[str, Any]) -> str:
    total = status.get("max_steps", -1)
    steps = f"{status.get('step', '?')}" + (f" of {total}" if isinstance(total, int) and total > 0 else "")
    all_epochs = status.get("max_epochs") or -1
    epochs = f"{status.get('epoch', '?')}" + (f" of {all_epochs}" if all_epochs > 0 else "")
    pid = f"process {status.get('pid', '?')} on {status.get('host', '?')}"
    return f"{_state(status)}, epoch {epochs}, step {steps}, {pid}, {_describe_age(float(status.get('time', 0)))}"


def _describe_age(timestamp: float) -> str:
    import time

    seconds = max(0, round(time.time() - timestamp))
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size} {unit} ago"
    return f"{seconds} s ago"
