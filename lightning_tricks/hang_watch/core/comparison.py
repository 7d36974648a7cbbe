"""The comparison of what ranks wrote: which one is behind, and what differs."""

from __future__ import annotations

import itertools
import os
import re
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.files import open_file
from lightning_tricks._shared.text import list_names, printable
from lightning_tricks.hang_watch.core.record import PREVIOUS, RECORD_SUFFIX, STACKS_SUFFIX, read_record

_MAX_BYTES = 2**20  # of a file of stacks, from its end
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
_TRAINER = re.compile(r"lightning/(pytorch/)?(loops|trainer|strategies)/")
# What lies above the code of a user: libraries, and this package
_LIBRARIES = re.compile(rf"site-packages|dist-packages|/lib/python|<frozen|{re.escape(str(Path(__file__).parents[2]))}")


@dataclass(frozen=True)
class HangReport:
    """Where each rank is, and what can be said about it.

    Attributes:
        ranks: For each rank that wrote a record what is in it, and `frames`: the calls of the thread that trains when
            it stood still, the innermost first; none if it did not, or has moved on. Then they are `earlier`, and
            `lasted` says how long and at which hook it stood.
        findings: Sentences about the ranks.
    """

    ranks: list[dict[str, Any]]
    findings: list[str]

    def __str__(self) -> str:
        """Return the sentences, and a line for each rank."""
        return "\n".join(map(printable, [*self.findings, *map(_describe, self.ranks)]))


def compare_ranks(folder: str | os.PathLike[str]) -> HangReport:
    """Compare the records that the ranks of a run wrote to a folder.

    Args:
        folder: The `dirpath` of `HangWatch`.

    Raises:
        ValueError: If `folder` is an address, or a file in it is not a record.
        OSError: If there is no record in the folder, or a file cannot be read.
    """
    path = Path(check_path("folder", folder, "a folder")).expanduser()
    if not path.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}. Give the dirpath of HangWatch.")
    found = {file.with_suffix(STACKS_SUFFIX): read_record(file) for file in path.glob(f"rank*{RECORD_SUFFIX}")}
    ranks = [{**rank, **_last_stacks(file, rank)} for file, rank in found.items()]
    if not ranks:
        earlier = f" Files of an earlier start are in {path / PREVIOUS}." if (path / PREVIOUS).is_dir() else ""
        raise FileNotFoundError(
            f"{folder} has no rank*{RECORD_SUFFIX}: HangWatch removes these files if no rank stood still.{earlier}"
        )
    world_size = max(ranks, key=lambda rank: rank["moved"])["world_size"]
    ranks = [rank for rank in ranks if rank["rank"] < world_size]  # others are of a run before, on more ranks
    ranks.sort(key=lambda rank: rank["rank"])
    missing = {*range(world_size)} - {rank["rank"] for rank in ranks}
    standing = sum(bool(rank["frames"]) for rank in ranks)
    before = f", {count} did before" if (count := sum(bool(rank["earlier"]) for rank in ranks)) else ""
    findings = [f"{standing} of {world_size} ranks stood still for {ranks[0]['timeout']:g} s{before}."]
    findings += [f"There is no record of {_ranks(missing)}."] if missing else []
    running = [rank for rank in ranks if not rank["ended"]]
    ended = [rank["rank"] for rank in ranks if rank not in running]
    findings += [f"Ended: {_ranks(ended)}."] if ended and running else []
    least = min(((rank["batches"], rank["moves"]) for rank in running), default=None)
    behind = [rank["rank"] for rank in running if (rank["batches"], rank["moves"]) == least]
    findings += [f"Behind: {_ranks(behind)}."] if len(behind) < len(running) else []
    for name, what in (("batches", "Batches started"), ("backwards", "Backward passes")):
        values = sorted({rank[name] for rank in ranks})
        counts = (f"{value} on {_ranks(rank['rank'] for rank in ranks if rank[name] == value)}" for value in values)
        findings += [f"{what}: {', '.join(counts)}."] if len(values) > 1 else []
    if len({rank["batches"] for rank in ranks}) > 1:
        findings.append(
            "If their loaders have different numbers of batches: EndTogether() ends each epoch on all ranks."
        )
    return HangReport(ranks, findings + _differing_keys(ranks))


def _differing_keys(ranks: list[dict[str, Any]]) -> list[str]:
    """Compare what was logged in the epoch, of each stage, to which all ranks have come."""
    found = []
    for stage in dict.fromkeys(stage for rank in ranks for stage in rank["epochs"]):
        epoch = min(rank["epochs"].get(stage, 0) for rank in ranks)
        logged = {rank["rank"]: [name for *of, name in rank["keys"] if of == [stage, epoch]] for rank in ranks}
        for name in dict.fromkeys(name for names in logged.values() for name in names):
            if without := [rank for rank, names in logged.items() if name not in names]:
                found.append(f"Only {_ranks(logged.keys() - without)} logged {name!r} in {stage} epoch {epoch - 1}.")
    return found


def _ranks(numbers: Iterable[int]) -> str:
    numbers = sorted(numbers)
    return f"{'ranks' if len(numbers) > 1 else 'rank'} {list_names(map(str, numbers), 8)}"


def _describe(rank: dict[str, Any]) -> str:
    when = time.strftime("%H:%M:%S", time.localtime(rank["moved"]))
    place = f"epoch {rank['epoch']}, step {rank['step']}"
    if rank["batch"] >= 0:
        place = f"batch {rank['batch']} of {place}"
    frame = f", in {_own_frame(rank['frames'])}" if rank["frames"] else ""
    logged = f", last logged {rank['key']!r}" if rank["key"] else ""
    earlier = f"; stood still earlier for {rank['lasted']}, in {_own_frame(rank['earlier'])}" if rank["earlier"] else ""
    return f"  rank {rank['rank']}: {when} {rank['hook']}, {place}{frame}{logged}{earlier}"


def _own_frame(frames: list[tuple[str, int, str]]) -> str:
    """Return the innermost call of one's own code that the Trainer has made, or else of any."""
    made = itertools.takewhile(lambda frame: not _TRAINER.search(frame[0]), frames)
    path, line, function = next((frame for frame in made if not _LIBRARIES.search(frame[0])), frames[0])
    return f"{function} ({Path(path).name}:{line})"


def _last_stacks(path: Path, rank: dict[str, Any]) -> dict[str, Any]:
    """Return the calls of its thread, or else of the main one, where a rank stood still, and whether it still does."""
    last, size, thread = "", 0, rank.get("thread", 0)
    if path.is_file():
        with open_file(path) as file:
            size = path.stat().st_size
            file.seek(max(0, size - _MAX_BYTES))
            last = file.read(_MAX_BYTES).decode(errors="replace").rpartition("Timeout (")[2]
    threads = re.split(r"^Thread 0x0*", last, flags=re.MULTILINE)
    calls = next((calls for calls in threads if calls.startswith(f"{thread:x} ")), threads[-1])  # the main one is last
    frames = [(name, int(line), function) for name, line, function in _FRAME.findall(calls)]
    if size and size <= rank["stacks_size"]:
        return {"frames": [], "earlier": frames, "lasted": f"{rank['stood']} s, at {rank['stood_at']}"}
    return {"frames": frames, "earlier": [], "lasted": ""}
