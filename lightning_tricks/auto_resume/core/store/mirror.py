"""The directory of a run in an object store, of which a folder on the local disk is the copy that training uses."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path, PureWindowsPath
from typing import Any

from lightning_tricks._shared.files import PARTIAL_SUFFIX
from lightning_tricks.auto_resume.core.checkpoint_folder import (
    CHECKPOINT_NAME,
    CORRUPT_SUFFIX,
    MANIFEST,
    PRIVATE_DIR,
    CheckpointFolder,
    Manifest,
    UnusableFolderError,
    fit_folders,
    load_manifest,
    open_intact,
    remove_path,
)
from lightning_tricks.auto_resume.core.store.lease import Lease
from lightning_tricks.auto_resume.core.store.object_store import ObjectStore, StoreError

STATE_FILE = "mirror.json"  # in the local private folder: what is sent, of which address, and why not
_RECORDS = re.compile(r"(run|start|status)\.json|rows-\d+\.csv")  # of the private folder, which travel
_FILES_RECORD = f"{PRIVATE_DIR}/files.json"  # the other files that this run has in the store
_SENDING, _FETCHING = "sending", "fetching"  # folders in the private one
_FIT = re.compile(rf"((?:fit\d+/)?){re.escape(PRIVATE_DIR)}/")

SECONDS_BETWEEN_LOOKS = 1.0

Say = Callable[[str], object]
GivesUp = Callable[[bool], bool]


class Mirror:
    """Copies what lies in a local folder to an object store, and back where the local folder lacks it.

    The order makes it safe: first the files beside the checkpoints, then those of a checkpoint, its manifest last.
    A checkpoint without manifest does not count; one that was fetched is compared with the SHA-256 of its manifest.
    Objects that this run has not sent are neither replaced nor removed. Where several nodes have a part of the shards,
    each sends its own, and the node of rank zero creates the manifest once all of them are there.

    Args:
        address: Of the directory in the store.
        scratch: The local folder.
    """

    def __init__(self, address: str, scratch: Path) -> None:
        self.store = ObjectStore(address)
        self.scratch = scratch
        self._root = CheckpointFolder(scratch)
        self._sent: dict[str, list[int]] = {}  # names of files beside the checkpoints -> size and time of change
        self._foreign: set[str] = set()  # names that others use in the store

    def open(self, lease: Lease, say: Say, *, is_again: bool) -> None:
        """Become the only writer, and let the local folder hold what the store has.

        Raises:
            LeaseLostError: If another process has written since, and a run goes on here (`is_again`).
            StoreError: If another process writes, the store or the disk refuses something, or the local folder has
                checkpoints of another run.
        """
        state, known = self._root.read_private(STATE_FILE), self._known_address()
        # Another run took over while nothing was sent here: what it wrote is newer.
        if is_again and state.get("owner") != lease.newest_number():
            raise lease.lost()
        owner_before = lease.acquire(say)
        self._sent = self._read_record()
        if not is_again:
            self._remove_incomplete()
            has_other = known != self.store.address or state.get("owner") != owner_before
            if has_other or not all(map(self._is_whole, fit_folders(self.scratch))):
                self.fetch(say, is_owner=True)
        self.note(owner=lease.number, attempt=0, problem="", lost=False)

    def open_part(self, chosen: tuple[str, str] | None, *, is_again: bool) -> str:
        """Let the local folder of another node than rank zero's hold the checkpoint that is resumed, and no other.

        Args:
            chosen: The beginning of its fit's names ("fit2/"), and its name; None for a run that begins.
            is_again: Whether a run goes on whose process was killed.

        Returns:
            Why that is impossible, or "".
        """
        self._known_address()
        self.store.sizes()  # a store that cannot be reached is an error before training
        for folder in () if is_again else fit_folders(self.scratch):
            folder.clear()
        self.note(attempt=0, problem="", lost=False)
        return self.fetch_checkpoint(CheckpointFolder(self.scratch / chosen[0]), chosen[1]) if chosen else ""

    def _known_address(self) -> str | None:
        """Return where the local folder was sent before; raise an error if it has checkpoints of another address."""
        known: str | None = self._root.read_private(STATE_FILE).get("address")
        if known != self.store.address and any(folder.manifests() for folder in fit_folders(self.scratch)):
            where = f"was sent to {known}" if known else "has not been sent anywhere"
            raise StoreError(
                f"{self.scratch} has checkpoints of a run that {where}, not to {self.store.address}. Give an empty "
                "scratch folder."
            )
        return known

    def _is_whole(self, folder: CheckpointFolder) -> bool:
        """Whether no other node has files of the newest local checkpoint of a fit."""
        newest = folder.manifests()[:1]
        return all((folder.private / each.file / name).exists() for each in newest for name in each.files)

    def note(self, **values: Any) -> None:
        """Write to the state file what is known of the copy."""
        state = {**self._root.read_private(STATE_FILE), "address": self.store.address, **values}
        self._root.write_private(STATE_FILE, state, flush=())

    # -- from the store

    def fetch(self, say: Say, *, is_owner: bool) -> None:
        """Let the local folder hold the newest intact checkpoint of each fit, and the files beside them.

        The owner of the store renames the manifests of damaged ones there.
        """
        objects = self.store.sizes()
        for folder in fit_folders(self.scratch):
            if unknown := [each.file for each in folder.manifests() if not any(each.file in name for name in objects)]:
                say(f"{folder.path} had checkpoints that {self.store.address} lacks, and which were removed: {unknown}")
            folder.clear()
        for prefix in _fits(objects):
            folder = CheckpointFolder(self.scratch / prefix)
            folder.private.mkdir(parents=True, exist_ok=True)
            self.fetch_records(prefix, folder, objects)
            for name in _complete(prefix, objects):
                if not (problem := self.fetch_checkpoint(folder, name)):
                    break
                say(problem)
                if is_owner:  # it counts no more, and its number stays taken
                    # An object store has no rename.
                    manifest = _start(prefix, name) + MANIFEST
                    self.store.write(manifest + CORRUPT_SUFFIX, self.store.read(manifest))
                    self.store.remove([manifest])
                    (folder.private / f"{name}{CORRUPT_SUFFIX}").mkdir(exist_ok=True)
        for name, (_, changed) in self._read_record().items():
            path = self.scratch / name
            with suppress(FileNotFoundError, OverflowError):
                self.store.get(name, path)
                os.utime(path, ns=(changed, changed))  # it need not be sent again

    def fetch_records(self, prefix: str, folder: CheckpointFolder, objects: Mapping[str, int]) -> None:
        """Fetch what is beside the checkpoints of a fit in its private folder."""
        start = f"{prefix}{PRIVATE_DIR}/"
        for name in objects:
            # By a pattern of names that this package writes: any other object there might be put anywhere.
            if name.startswith(start) and _RECORDS.fullmatch(name[len(start) :]):
                self.store.get(name, folder.private / name[len(start) :])

    def fetch_checkpoint(self, folder: CheckpointFolder, name: str) -> str:
        """Fetch a checkpoint; return why it is not intact, or ""."""
        problem = self.find_problem(folder, name)
        staged = folder.private / _FETCHING
        if not problem:
            # Renamed when complete: a kill in between leaves no half of a checkpoint under its name.
            (staged / PRIVATE_DIR / name).replace(folder.private / name)
        remove_path(staged)
        return problem and f"the checkpoint {self.address_of(folder.private / name)} cannot be used: {problem}."

    def find_problem(self, folder: CheckpointFolder, name: str) -> str:
        """Fetch a checkpoint to a place of its own, that of the one before; return why it is not intact, or ""."""
        start = _start(self.prefix_of(folder), name)
        staged = CheckpointFolder(folder.private / _FETCHING)
        remove_path(staged.path)
        target, file = staged.private / name, MANIFEST
        try:
            self.store.get(start + MANIFEST, target / MANIFEST)
            # First: it names the files, and the SHA-256 that each has to have.
            manifest, objects = load_manifest(target), self.store.sizes()
            for file, (digest, size) in manifest.files.items():
                before, of_node = folder.aside(name) / file, _of_node(start, file, digest)
                try:
                    open_intact(before, digest, size).close()
                    _link_or_copy(before, target / file)
                except (OSError, ValueError):  # it is not in the local folder
                    self.store.get(of_node if of_node in objects else start + file, target / file)
            return staged.find_problem(manifest)
        except FileNotFoundError:
            return f"{file} is missing"
        except UnusableFolderError as error:
            raise StoreError(str(error)) from error
        except ValueError as error:
            return str(error)

    # -- for people

    def fetch_manifests(self) -> None:
        """Let the local folder hold what tells how far the run is."""
        objects = self.store.sizes()
        for prefix in _fits(objects):
            manifests = [_start(prefix, each) + MANIFEST for each in _complete(prefix, objects)]
            for name in (f"{prefix}{PRIVATE_DIR}/status.json", *manifests):
                try:
                    self.store.get(name, self.scratch / name)
                except FileNotFoundError:  # removed for a newer one
                    remove_path((self.scratch / name).parent)

    def has(self, folder: CheckpointFolder, name: str) -> bool:
        """Whether the store has a checkpoint that is complete."""
        return _start(self.prefix_of(folder), name) + MANIFEST in self.store.sizes()

    def address_of(self, path: Path) -> str:
        """Return the address of what has a path in the local folder."""
        return f"{self.store.address}/{path.relative_to(self.scratch).as_posix()}".removesuffix("/.")

    def prefix_of(self, folder: CheckpointFolder) -> str:
        """Return what the names of a fit's objects begin with: "", "fit2/" and so on."""
        return "" if folder.path == self._root.path else f"{folder.path.name}/"

    # -- to the store

    def send(self, keep: int, lease: Lease, gives_up: GivesUp) -> None:
        """Send what has changed: files, and the newest checkpoint of each fit; then remove older checkpoints.

        Args:
            keep: The number of checkpoints of each fit to keep in the store.
            lease: Of the store.
            gives_up: Called while other nodes have not sent their part of a checkpoint, with whether there is a newer
                one; returns whether to wait no longer.

        Raises:
            LeaseLostError: If another process has become the owner.
            OSError: If the store or the disk refuses something.
        """
        linked = [(folder, self._link(folder)) for folder in fit_folders(self.scratch)]
        objects = self.store.sizes()
        self._send_files(objects, lease)  # after the links: at least as new as the checkpoints
        for folder, manifest in linked:
            if manifest is not None:
                self._send_checkpoint(folder, manifest, objects, lease, gives_up)
            prefix = self.prefix_of(folder)
            complete = _complete(prefix, objects)
            given_up = _incomplete(prefix, objects, before=complete[0]) if complete else []
            for old in (*complete[keep:], *given_up):
                self._remove_checkpoint(prefix, old, objects)
        self._remove_gone()  # the checkpoint before may have named them

    def _link(self, folder: CheckpointFolder) -> Manifest | None:
        """Let the newest checkpoint stay while it is sent, whatever is removed meanwhile; return its manifest."""
        staged = CheckpointFolder(folder.private / _SENDING)
        for _ in range(10):
            remove_path(staged.path)
            newest = next(iter(folder.manifests()), None)
            if newest is None:
                return None
            target = staged.private / newest.file
            target.mkdir(parents=True)
            with suppress(FileNotFoundError):  # it was removed for a newer one
                for name in newest.files:
                    with suppress(FileNotFoundError):  # of another node
                        _link_or_copy(folder.private / newest.file / name, target / name)
                _link_or_copy(folder.private / newest.file / MANIFEST, target / MANIFEST)
                return load_manifest(target)
        return None

    def send_part(self) -> None:
        """Send the local shards of the newest checkpoint of each fit, of which rank zero's node sends the rest."""
        for folder in fit_folders(self.scratch):
            if (manifest := self._link(folder)) is not None:
                start, objects = _start(self.prefix_of(folder), manifest.file), self.store.sizes()
                source = folder.private / _SENDING / PRIVATE_DIR / manifest.file
                for file, (digest, size) in manifest.shards.items() if start + MANIFEST not in objects else ():
                    path, name = source / file, _of_node(start, file, digest)
                    if path.exists() and objects.get(name) != size:
                        self.store.put(name, path)
            remove_path(folder.private / _SENDING)

    def _send_checkpoint(
        self, folder: CheckpointFolder, manifest: Manifest, objects: dict[str, int], lease: Lease, gives_up: GivesUp
    ) -> None:
        prefix = self.prefix_of(folder)
        start = _start(prefix, manifest.file)
        source = folder.private / _SENDING / PRIVATE_DIR / manifest.file
        data = (source / MANIFEST).read_bytes()
        is_there = start + MANIFEST in objects
        if not is_there:
            own = [file for file in manifest.files if (source / file).exists()]
            for file in own:
                lease.check()
                self.store.put(start + file, source / file)
            files, is_late = manifest.files.items(), False
            others = {_of_node(start, file, digest): size for file, (digest, size) in files if file not in own}
            while others.items() - objects.items():
                if is_late:
                    raise StoreError(f"other nodes have not sent their part of {manifest.file}")
                lease.check()
                time.sleep(SECONDS_BETWEEN_LOOKS)
                is_late = gives_up(any(newest.file != manifest.file for newest in folder.manifests()[:1]))
                objects.update(self.store.sizes())  # looks once more after that
        lease.renew()  # between the bytes and the name: nobody else has begun meanwhile
        if not is_there:
            # Only if there is none, for the moment between the check and this line: of two writers, one has it.
            is_there = not self.store.create(start + MANIFEST, data)
        if is_there and self.store.read(start + MANIFEST) != data:  # of loggers, at the end of the fit
            self.store.write(start + MANIFEST, data)
        objects[start + MANIFEST] = len(data)
        remove_path(folder.private / _SENDING)
        self.note(**{f"{prefix}newest": manifest.file}, step=manifest.step, sent=time.time())

    def _send_files(self, objects: Mapping[str, int], lease: Lease) -> None:
        """Send the files beside the checkpoints that have changed."""
        changed = {name: path for name, path in self._files() if self._sent.get(name) != _stat(path)}
        own = {name for name in changed if _FIT.match(name)}
        # An object of this name that no record of the run has may be anybody's.
        self._foreign |= {name for name in changed if name in objects and name not in self._sent} - own
        travelling = changed.keys() - own - self._foreign
        if new := travelling - self._sent.keys():  # recorded before: no object is left without an owner
            self._sent |= {name: [-1, 0] for name in new}
            self._write_record()
        for name in (*own, *travelling):  # first where the loggers began: else the next start begins other files
            lease.check()
            with suppress(FileNotFoundError):  # removed meanwhile
                self._sent[name] = self._send_file(name, changed[name])
        if travelling:
            self._write_record()

    def _remove_gone(self) -> None:
        """Remove the files of this run that are no longer in the local folder."""
        # Else checkpoints that ModelCheckpoint has removed would come back with the next machine. Only what this run
        # sent.
        if gone := self._sent.keys() - dict(self._files()):
            self.store.remove(gone)
            self._sent = {name: known for name, known in self._sent.items() if name not in gone}
            self._write_record()

    def _send_file(self, name: str, path: Path) -> list[int]:
        """Send a copy of a file, which may grow meanwhile; return its size and time of change."""
        before, copy = _stat(path), self._root.private / _SENDING / "file"
        copy.parent.mkdir(exist_ok=True)
        # An object cannot grow: a log file that is written while it is sent would have more bytes than were announced.
        shutil.copyfile(path, copy)
        self.store.put(name, copy)
        copy.unlink()
        return before

    def _files(self) -> Iterator[tuple[str, Path]]:
        """Yield the names and paths of what is sent beside the checkpoints."""
        for folder, folders, files in os.walk(self.scratch):
            is_private = Path(folder).name == PRIVATE_DIR
            # Of the private folder, records alone: checkpoints are sent in an order of their own, and locks stay here.
            if is_private:
                folders.clear()
            for file in files:
                path = Path(folder, file)
                name = path.relative_to(self.scratch).as_posix()
                is_record = _FIT.match(name) and _RECORDS.fullmatch(file)
                if (is_record if is_private else not file.endswith(PARTIAL_SUFFIX)) and path.is_file():
                    yield name, path

    def _remove_incomplete(self) -> None:
        """Remove what killed processes have sent of checkpoints that got no manifest."""
        objects = self.store.sizes()
        for prefix in _fits(objects):
            # They count for nobody, and would stay, and be paid for, for ever.
            for name in _incomplete(prefix, objects):
                self._remove_checkpoint(prefix, name, objects)

    def _remove_checkpoint(self, prefix: str, name: str, objects: Mapping[str, int]) -> None:
        start = _start(prefix, name)
        # Manifest first: what is left after a kill does not count as a checkpoint.
        own = (each for each in objects if each.startswith(start))
        self.store.remove(sorted(own, key=lambda each: not each.endswith(MANIFEST)))

    def _read_record(self) -> dict[str, list[int]]:
        try:
            # An object of a store is not trusted: it names files of this machine, which have to lie below the folder.
            files = json.loads(self.store.read(_FILES_RECORD))["files"]
            return {name: [int(size), int(changed)] for name, (size, changed) in files.items() if _is_below(name)}
        except (FileNotFoundError, AttributeError, KeyError, TypeError, ValueError):
            return {}

    def _write_record(self) -> None:
        files = {name: known for name, known in self._sent.items() if not _FIT.match(name)}
        self.store.write(_FILES_RECORD, json.dumps({"files": files}).encode())


def _start(prefix: str, checkpoint: str) -> str:
    """Return what the names of a checkpoint's objects begin with."""
    return f"{prefix}{PRIVATE_DIR}/{checkpoint}/"


def _fits(objects: Mapping[str, int]) -> list[str]:
    """Return what the names of each fit's objects begin with: "", "fit2/" and so on."""
    return sorted({found[1] for name in objects if (found := _FIT.match(name))})


def _checkpoints(prefix: str, objects: Mapping[str, int]) -> list[str]:
    """Return the names of a fit's checkpoints of which there is anything, newest first."""
    start = f"{prefix}{PRIVATE_DIR}/"
    names = {name[len(start) :].partition("/")[0] for name in objects if name.startswith(start)}
    return sorted(filter(CHECKPOINT_NAME.fullmatch, names), key=lambda name: int(name.partition("-")[0]), reverse=True)


def _complete(prefix: str, objects: Mapping[str, int]) -> list[str]:
    """Return the names of a fit's checkpoints that have a manifest, newest first."""
    return [name for name in _checkpoints(prefix, objects) if _start(prefix, name) + MANIFEST in objects]


def _incomplete(prefix: str, objects: Mapping[str, int], before: str | None = None) -> list[str]:
    """Return the names of a fit's checkpoints that have no manifest; all, or those that are older than another one."""
    names, ends = _checkpoints(prefix, objects), (MANIFEST, MANIFEST + CORRUPT_SUFFIX)
    names = names[names.index(before) :] if before else names
    return [name for name in names if not {_start(prefix, name) + end for end in ends} & objects.keys()]


def _of_node(start: str, file: str, digest: str) -> str:
    """Return the name of an object that another node than rank zero's sends."""
    # With its SHA-256: what a process of an earlier start still sends, as it has no lease, is never taken for it.
    return f"{start}{file}.{digest}"


def _is_below(name: str) -> bool:
    """Whether a name that was read stays within the folder."""
    path = PureWindowsPath(name)  # of both kinds of slashes
    return bool(path.parts) and not ({"..", PRIVATE_DIR} & {*path.parts}) and not path.anchor


def _stat(path: Path) -> list[int]:
    with suppress(FileNotFoundError):
        # Size and time of change: to hash each file at each save would read them all.
        status = path.stat()
        return [status.st_size, status.st_mtime_ns]
    return [0, 0]


def _link_or_copy(source: Path, target: Path) -> None:
    try:
        # A link costs nothing, and keeps the bytes when the folder removes its name.
        os.link(source, target)
    except FileNotFoundError:
        raise
    except OSError:  # a file system without links
        shutil.copyfile(source, target)
