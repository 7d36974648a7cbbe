"""What loggers and ModelCheckpoint left of a run, to be compared with what they left of another."""

from pathlib import Path
from typing import Any

import torch

from tests.auto_resume.training import digest


def scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """Read a directory of event files with TensorBoard's reader: tag -> (step, value) in their order."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


def left_in(folder: Path) -> dict[str, Any]:
    """Return all that is below a run's folder, but for AutoResume's own and the script's own: path -> content."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if name.startswith("resume") or "/" not in name or path.is_dir():
            continue
        if "tfevents" in name:
            found[f"{name.rpartition('/')[0]}/events"] = scalars(path.parent)
        elif path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.suffix == ".ckpt":
            saved = torch.load(path, weights_only=True)
            found[name] = digest({part: saved.get(part) for part in ("state_dict", "optimizer_states", "global_step")})
        else:
            found[name] = path.read_text()
    return found


def other_files(folder: Path, whole: Path) -> list[str]:
    """Say which files of a run differ from those of another."""
    present, wanted = left_in(folder), left_in(whole)
    return [
        f"{name}: {'only there' if name not in present else 'only here' if name not in wanted else 'differs'}"
        for name in sorted({*present, *wanted})
        if present.get(name) != wanted.get(name)
    ]
