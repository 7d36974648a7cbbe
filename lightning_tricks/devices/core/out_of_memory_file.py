"""The files that are written when memory has run out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from lightning_tricks._shared.files import atomic_write
from lightning_tricks._shared.text import describe_error
from lightning_tricks.devices.core.memory_report import MemoryReport


def out_of_memory_text(
    error: BaseException,
    circumstances: Sequence[str],
    batch: Sequence[str],
    report: MemoryReport,
    advice: Sequence[str],
) -> str:
    """Return the text of the file: what ran, the batch, the advice, the sizes with the largest tensors, the error."""
    sections = {
        "What ran": circumstances,
        "The batch": batch or ["(none: no step was running)"],
        "What to do": [f"- {one}" for one in advice],
        "Memory": str(report).splitlines(),
        "The error": [describe_error(error)],
    }
    return "\n".join("\n".join((title, "-" * len(title), *lines, "")) for title, lines in sections.items())


def write_files(folder: Path, rank: int, text: str, dump_snapshot: Callable[[Path], None] | None = None) -> list[Path]:
    """Write the report of a rank, and torch's snapshot if there is a function that writes it; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"out_of_memory-rank{rank}.txt"
    with atomic_write(path) as staged:
        staged.write_text(text, encoding="utf-8")
    if dump_snapshot is None:
        return [path]
    snapshot = path.with_suffix(".pickle")
    with atomic_write(snapshot) as staged:
        dump_snapshot(staged)
    return [path, snapshot]
