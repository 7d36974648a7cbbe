"""What a rank writes while it moves, and the comparison of what the ranks wrote: which one is behind, what differs.

A rank writes a file of fixed size in its memory, and its stacks when nothing moves.
"""

from __future__ import annotations

import faulthandler
import itertools
import json
import mmap
import os
import re
import sys
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.files import open_file
from lightning_tricks._shared.text import list_names, printable

RECORD_SUFFIX, STACKS_SUFFIX, PREVIOUS = ".hang", ".stacks", "previous"
_COUNTERS = ("moves", "epoch", "batch", "step", "batches", "backwards", "key", "ended", "stops", "stood", "stacks_size")
_MOST_RANKS = 2**20
_SIZE, _HEAD = 2**16, 2**9  # bytes: of all; and of time, counters and hook, which each move writes


_WATCHING: list[RankRecord] = []  # in this process


@cache
def protect_forks() -> None:
    """Stop the timer, also one of others, before this process forks: a child that sets it would wait for ever."""
    if sys.platform != "win32":
        stop = faulthandler.cancel_dump_traceback_later
        again = lambda: [*map(RankRecord._start_timer, _WATCHING)]  # noqa: E731
        os.register_at_fork(before=stop, after_in_parent=again, after_in_child=_WATCHING.clear)


class RankRecord:
    """Writes where a rank is, and lets its stacks be written when it does not move.

    What is there of a hang before is moved into the folder `previous`.

    Args:
        folder: The folder of all ranks.
        timeout: Seconds without a move after which the stacks are written; up to 5 %, at most a second, less.
        about: Plain values that do not change: the number of this `rank`, and others for the reader.

    Attributes:
        moves: To how many hooks the rank has come.
        epoch: The epoch.
        batch: The index of the last batch that began in this epoch, in its loader; -1 before the first.
        step: The number of optimizer steps before that batch.
        batches: How many batches have begun.
        backwards: How many backward passes have begun.
        stops: Whether the Trainer was told to stop.
        ended_by: What ended the run, after the words "the end of its run"; empty where nothing was wrong.

    Raises:
        OSError: If the files cannot be written.
    """

    def __init__(self, folder: Path, timeout: float, about: dict[str, Any]) -> None:
        self.moves = self.epoch = self.step = self.batches = self.backwards = 0
        self.batch, self.ended_by, self.stops = -1, "", False
        self._about = {"world_size": 1, **about, "timeout": timeout, "thread": threading.get_ident()}
        self._timeout, self._slack = timeout, min(1.0, timeout / 20)  # to start the timer at each move costs too much
        self._epochs: dict[str, int] = {}  # how many epochs of a stage have begun
        self._keys: dict[tuple[str, int, str], int] = {}  # stage, epoch and name -> index
        self._hook, self._key = "start", -1  # where it is, and the index of what was logged last
        self._ended, self._stood, self._stood_at, self._size = False, 0, "start", 0
        record, stacks = self._paths = [folder / f"rank{about['rank']}{s}" for s in (RECORD_SUFFIX, STACKS_SUFFIX)]
        self._new_folder = () if folder.exists() else (folder,)
        folder.mkdir(parents=True, exist_ok=True)
        is_of_hang = _has_stacks(record)
        for path in filter(Path.exists, self._paths):
            if is_of_hang:
                (folder / PREVIOUS).mkdir(exist_ok=True)
                path.replace(folder / PREVIOUS / path.name)
            else:
                path.unlink()
        with record.open("xb+") as file:
            file.truncate(_SIZE)
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._stacks = stacks.open("x", encoding="utf-8")
        self._write_names()
        self._moved, self._ticked = time.time(), time.monotonic()  # the first is shown; somebody may set that clock
        self._write()
        self._start_timer()
        _WATCHING.append(self)

    def move(self, hook: str) -> float:
        """Note that the rank has come to a hook.

        Returns:
            The seconds since the move before, if stacks were written meanwhile; 0 otherwise.
        """
        place, self._hook, self._moved = self._hook, hook, time.time()
        before, self._ticked = self._ticked, time.monotonic()
        self.moves += 1
        self._write()
        if self._ticked - self._started < self._slack:
            return 0.0
        self._start_timer()
        if self._stacks_size() == self._size:
            return 0.0
        stood = self._ticked - before
        self._stacks.write(f"\nThe rank moved on after {stood:.0f} s, at {place}.\n\n")
        self._stacks.flush()
        self._stood, self._stood_at, self._size = round(stood), place, self._stacks_size()
        self._write()
        return stood

    def log(self, stage: str, name: str) -> None:
        """Note that a value is about to be logged in a stage, such as "train"."""
        key = stage, self._epochs.get(stage, 0), name
        if key not in self._keys:
            self._keys[key] = len(self._keys)
            if not self._is_full:
                self._write_names()
        self._key = self._keys[key]
        self._write()

    def start_epoch(self, stage: str, epoch: int) -> None:
        """Note the epoch, and forget what was logged two epochs ago: another rank may still be in the one before."""
        self.epoch, self.batch = epoch, -1
        number = self._epochs[stage] = self._epochs.get(stage, 0) + 1
        kept = [key for key in self._keys if key[0] != stage or key[1] == number - 1]
        self._keys, self._key = {key: index for index, key in enumerate(kept)}, -1
        self._write_names()

    def close(self) -> None:
        """Stop the timer, and note that this rank has ended; the last one removes the files if none wrote stacks."""
        faulthandler.cancel_dump_traceback_later()
        if self in _WATCHING:
            _WATCHING.remove(self)
        for record in _WATCHING[-1:]:  # of a Trainer within which this one ran
            record._start_timer()
        self._ended, self._hook, self._moved = True, f"the end of its run{self.ended_by}", time.time()
        self._write()
        self._stacks.close()
        self._memory.close()
        with suppress(OSError, ValueError):  # another rank removes them just now, or has only begun
            self._clear_if_all_have_ended()
        for folder in self._new_folder:
            with suppress(OSError):  # other ranks write to it
                folder.rmdir()

    def _clear_if_all_have_ended(self) -> None:
        """Remove the files of all ranks of the folder, unless one is still there or has stood still."""
        paths = [self._paths[0].with_name(f"rank{rank}{RECORD_SUFFIX}") for rank in range(self._about["world_size"])]
        found = [path for path in paths if path.is_file()]  # the ranks of other nodes may have folders of their own
        if all(not _has_stacks(path) and read_record(path)["ended"] for path in found):
            for path in (*found, *(path.with_suffix(STACKS_SUFFIX) for path in found)):
                path.unlink(missing_ok=True)

    def _write(self) -> None:
        counters = f"{self.moves} {self.epoch} {self.batch} {self.step} {self.batches} {self.backwards} {self._key}"
        stood = f"{self._ended:d} {self.stops:d} {self._stood} {self._size} {self._stood_at}"
        self._memory[:_HEAD] = f"{self._moved} {counters} {stood} {self._hook}".encode().ljust(_HEAD)

    def _start_timer(self) -> None:
        faulthandler.dump_traceback_later(self._timeout, file=self._stacks)
        self._started = time.monotonic()

    def _stacks_size(self) -> int:
        return os.fstat(self._stacks.fileno()).st_size

    def _write_names(self) -> None:
        text = json.dumps({**self._about, "keys": [*self._keys], "epochs": self._epochs}).encode()
        self._is_full = len(text) > _SIZE - _HEAD  # of thousands of keys the first ones are enough
        if not self._is_full:
            self._memory[_HEAD : _HEAD + len(text)] = text


def _has_stacks(record: Path) -> bool:
    stacks = record.with_suffix(STACKS_SUFFIX)
    return stacks.is_file() and stacks.stat().st_size > 0


def read_record(path: Path) -> dict[str, Any]:
    """Return what a rank has written: what it is about, when it moved, counters, the names of hook and logged value.

    Where the rank stood still and moved on, `stood` has the seconds, `stood_at` the hook, and `stacks_size` the size of
    its file of stacks then. `keys` are the stage, the number of the epoch and the name of each value that was logged in
    this epoch of a stage or the one before; `epochs` are the numbers of epochs that have begun, by stage.

    Raises:
        ValueError: If the file is no such record.
        OSError: If it cannot be read.
    """
    with open_file(path) as file:
        data = file.read(_SIZE).decode("ascii", "replace")
    try:
        moved, *numbers, stood_at, hook = data[:_HEAD].rstrip().split(" ", len(_COUNTERS) + 2)
        place: dict[str, Any] = dict(zip(_COUNTERS, map(int, numbers), strict=True))
        found, _ = json.JSONDecoder().raw_decode(data[_HEAD:])
        logged = dict(enumerate(found["keys"])).get(place["key"], ("", 0, ""))[2]
        if not 0 <= found["rank"] < found["world_size"] < _MOST_RANKS:
            raise ValueError
        return {**found, **place, "moved": float(moved), "hook": hook, "stood_at": stood_at, "key": logged}
    except (ValueError, KeyError, IndexError, TypeError, RecursionError) as error:
        raise ValueError(f"{os.fspath(path)} is not a record of HangWatch.") from error


_MAX_BYTES = 2**20  # of a file of stacks, from its end
_FRAME = re.compile(r'File "(.*)", line (\d+) in (.*)')
_TRAINER = re.compile(r"lightning/(pytorch/)?(loops|trainer|strategies)/")
# What lies above the code of a user: libraries, and this package
_LIBRARIES = re.compile(rf"site-packages|dist-packages|/lib/python|<frozen|{re.escape(str(Path(__file__).parents[1]))}")


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
    stopping = [rank["rank"] for rank in ranks if rank["stops"]]
    if 0 < len(stopping) < len(ranks):
        findings.append(
            f"trainer.should_stop is set on {_ranks(stopping)} alone: set it on all ranks, by a value that they share."
        )
    elif len({rank["batches"] for rank in ranks}) > 1:
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
