"""`lightning-tricks resume`: how far a run is, and whether its checkpoints are intact."""

from __future__ import annotations

import argparse
import sys
import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_tricks._shared.checks import file_argument, is_address, path_argument
from lightning_tricks._shared.console import make_console, write_json

if TYPE_CHECKING:
    from lightning_tricks.auto_resume.core.checkpoint_folder import CheckpointFolder, Manifest
    from lightning_tricks.auto_resume.core.store.mirror import Mirror


def add_to(commands: Any) -> None:
    """Add `resume` to the subcommands of the command line."""
    parser: argparse.ArgumentParser = commands.add_parser("resume", help="inspect the checkpoints of AutoResume")
    subcommands = parser.add_subparsers(metavar="TOOL")
    descriptions = {
        "status": "show the progress of a run, and the checkpoint from which it would resume",
        "verify": "check that each checkpoint is intact, byte for byte; the exit status is 1 if one is not, 2 if there "
        "is none",
        "fetch": "copy the newest intact checkpoint of each fit, and the files that were sent beside it, from an "
        "object store to an empty folder, which AutoResume then takes as its dirpath",
    }
    runs = (("status", partial(_run, _status), 1), ("verify", partial(_run, _verify), 2), ("fetch", _fetch, 1))
    for name, run, error_status in runs:
        subcommand = subcommands.add_parser(
            name, help=descriptions[name], description=descriptions[name][0].upper() + descriptions[name][1:] + "."
        )
        metavar, words = "ADDRESS" if run is _fetch else "DIR", "the dirpath of AutoResume, which may be an address"
        subcommand.add_argument("dirpath", type=file_argument, metavar=metavar, help=words)
        if run is _fetch:
            subcommand.add_argument("folder", type=path_argument, metavar="DIR", help="an empty or a new folder")
        subcommand.add_argument("--json", action="store_true", help="print JSON")
        subcommand.set_defaults(run=run, error_status=error_status)


def _run(run: Any, arguments: argparse.Namespace) -> int:
    from lightning_tricks.auto_resume.core.store.mirror import Mirror

    if not is_address(arguments.dirpath):
        return int(run(_folders(arguments.dirpath, arguments), arguments.json))
    with tempfile.TemporaryDirectory(prefix="lightning_tricks_") as scratch:
        mirror = Mirror(arguments.dirpath, Path(scratch))
        mirror.fetch_manifests()
        return int(run(_folders(scratch, arguments), arguments.json, mirror))


def _folders(path: str | Path, arguments: argparse.Namespace) -> list[CheckpointFolder]:
    from lightning_tricks.auto_resume.core.checkpoint_folder import fit_folders

    found = fit_folders(path)
    if folders := [folder for folder in found if folder.manifests() or folder.problems() or folder.read_status()]:
        return folders
    raise FileNotFoundError(f"{arguments.dirpath} contains no checkpoints of AutoResume. Give the dirpath of a run.")


def _fetch(arguments: argparse.Namespace) -> int:
    from lightning_tricks.auto_resume.core.store.mirror import Mirror

    folder = arguments.folder.expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty. Give another folder.")
    with tempfile.TemporaryDirectory(prefix=".fetching-", dir=folder) as scratch:
        said = list[str]()
        Mirror(arguments.dirpath, Path(scratch)).fetch(said.append, is_owner=False)
        if not any(fit.manifests() for fit in _folders(scratch, arguments)):
            raise FileNotFoundError(" ".join([*said, f"{arguments.dirpath} has no intact checkpoint."]))
        for path in Path(scratch).iterdir():
            path.replace(folder / path.name)
    sys.stderr.write("".join(f"{arguments.parser.prog}: {sentence}\n" for sentence in said))
    return _status(_folders(folder, arguments), arguments.json)


def _status(folders: list[CheckpointFolder], as_json: bool, mirror: Mirror | None = None) -> int:
    from lightning_tricks._shared.text import format_bytes

    name = str if mirror is None else mirror.address_of
    if as_json:
        write_json([_status_values(folder, name(folder.path)) for folder in folders])
        return 0
    console = make_console(soft_wrap=True, highlight=False)
    for folder in folders:
        manifests = folder.manifests()
        status = _last_known(folder, manifests)
        if status:
            description = f"{name(folder.private / 'status.json')} is damaged"
            with suppress(OverflowError, TypeError, ValueError):
                description = _describe_status(status)
            console.print(f"{name(folder.path)}: {description}", markup=False)
        for manifest in manifests:
            progress = "at the end" if manifest.finished else f"batch {manifest.batches} of epoch {manifest.epoch}"
            size = sum(size for _, size in manifest.files.values())
            summary = f"step {manifest.step}, {progress}, {format_bytes(size)}, {_describe_age(manifest.written)}"
            console.print(f"  {manifest.file}: {summary}", markup=False)
        for path, problem in folder.problems().items():
            console.print(f"  {path.name}: {problem}", markup=False)
        with suppress(OverflowError, TypeError, ValueError):  # of a damaged record
            if sent := _sent(folder):
                last = f"{sent['newest']}, {_describe_age(sent['sent'])}" if sent["newest"] else "nothing"
                left = "".join(f"; not sent: {each.file}" for each in manifests[:1] if each.file != sent["newest"])
                reason = [f"as {sent['problem']}"] if sent["problem"] else []
                console.print(", ".join([f"  sent to {sent['address']}: {last}{left}", *reason]), markup=False)
    return 0


def _sent(folder: CheckpointFolder) -> dict[str, Any] | None:
    """Return what was sent last to an address, and why no more was; None of a run that has none."""
    from lightning_tricks.auto_resume.core.store.mirror import STATE_FILE

    state, fit = folder.read_private(STATE_FILE), ""
    if not state and folder.path.name.startswith("fit"):
        state, fit = type(folder)(folder.path.parent).read_private(STATE_FILE), f"{folder.path.name}/"
    sent = {"newest": state.get(f"{fit}newest"), **{name: state.get(name) for name in ("address", "sent", "problem")}}
    return sent if state else None


def _last_known(folder: CheckpointFolder, manifests: list[Manifest]) -> dict[str, Any]:
    """Return the status that the run wrote last, at the step of its newest checkpoint if that was written later."""
    status, newest = folder.read_status(), next(iter(manifests), None)
    with suppress(TypeError, ValueError):
        if status and newest is not None and newest.written > float(status.get("time", 0)):
            return {**status, "epoch": newest.epoch, "step": newest.step, "time": newest.written}
    return status


def _status_values(folder: CheckpointFolder, name: str) -> dict[str, Any]:
    manifests = folder.manifests()
    status, names = _last_known(folder, manifests), ("epoch", "max_epochs", "step", "max_steps", "pid", "host", "time")
    of_checkpoints = ("file", "epoch", "batches", "step", "finished", "bytes", "written")
    return {
        "folder": name,
        "state": _state(status) if status else None,
        **{name: status.get(name) for name in names},
        "checkpoints": [{name: getattr(each, name) for name in of_checkpoints} for each in manifests],
        "damaged": [path.name for path in folder.problems()],
        "mirror": _sent(folder),
    }


def _verify(folders: list[CheckpointFolder], as_json: bool, mirror: Mirror | None = None) -> int:
    name, problems = str if mirror is None else mirror.address_of, dict[str, str | None]()
    for folder in folders:
        for each in folder.manifests():
            found = folder.find_problem(each) if mirror is None else mirror.find_problem(folder, each.file)
            if not found or mirror is None or mirror.has(folder, each.file):  # else it was removed for a newer one
                problems[name(folder.private / each.file)] = found or None
        problems |= {name(path): problem for path, problem in folder.problems().items()}
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
