"""Manifests: what is known of a checkpoint without reading it, in a JSON file beside it."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lightning_tricks._shared.lightning_name import lightning_package

FORMAT = 2  # of the manifests and of what AutoResume adds to a checkpoint
CHECKPOINT_KEY = "auto_resume"  # of what AutoResume adds to a checkpoint
CHECKPOINT_NAME = re.compile(r"(\d{6,})-epoch=\d+-step=\d+\.ckpt")
MAIN_SHARD = "meta.pt"  # in a checkpoint that is a folder, what is not sharded; so Lightning names it
SHARD_NAME = re.compile(r"\.metadata(\.tmp)?|__\d+_\d+\.distcp")
_MAX_MANIFEST_BYTES = 1 << 24


class NewerFormatError(ValueError):
    """A checkpoint was written by a later release, in a format that this release does not know."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What is known of a checkpoint without reading it.

    Attributes:
        file: Name of the checkpoint, beside its manifest.
        sha256: SHA-256 of the file's bytes, as hexadecimal digits.
        bytes: Size of the file.
        epoch: Number of completed epochs.
        step: Number of optimizer steps (`trainer.global_step`).
        batches: Number of batches of the current epoch that were trained on.
        finished: Whether the fit was complete.
        written: Time of the save, in seconds since the Unix epoch.
        modified: Modification time of the file, in nanoseconds; 0 if unknown.
        loggers: Positions of the run's loggers, one record each.
        run: What distinguishes this run from others: names -> plain values.
        versions: Versions of Python and the libraries.
        shards: Of a checkpoint that is a folder, the files beside its main one, to which `sha256`, `bytes` and
            `modified` belong: names -> SHA-256 and size.
        format: Format of this record.
    """

    file: str
    sha256: str
    bytes: int
    epoch: int
    step: int
    batches: int
    finished: bool
    written: float
    modified: int = 0
    loggers: Sequence[Mapping[str, Any]] = field(default_factory=list)
    run: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    shards: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    format: int = FORMAT

    @property
    def number(self) -> int:
        """Number of the checkpoint in its directory; a later one has a larger number."""
        return int(self.file.partition("-")[0])

    @property
    def main_file(self) -> str:
        """Path of the file that is read first, relative to the directory of the checkpoint."""
        return f"{self.file}/{MAIN_SHARD}" if self.shards else self.file

    @property
    def all_files(self) -> dict[str, tuple[str, int]]:
        """The files that the checkpoint consists of, the main one last: paths -> SHA-256 and size."""
        return {f"{self.file}/{name}": of for name, of in self.shards.items()} | {
            self.main_file: (self.sha256, self.bytes)
        }


def load_manifest(path: Path, file: str | None = None) -> Manifest:
    """Read a manifest.

    Args:
        path: Path of the manifest.
        file: Name that the checkpoint must have; None allows the name of any checkpoint.

    Raises:
        OSError: If it cannot be read.
        TypeError: If it lacks a field.
        ValueError: If it names a file that cannot be a checkpoint beside it, or a field is invalid.
    """
    values = load_json(path)
    manifest = Manifest(**{known.name: values[known.name] for known in fields(Manifest) if known.name in values})
    counts = (manifest.epoch, manifest.step, manifest.batches, manifest.modified, manifest.format)
    is_valid = (
        isinstance(manifest.file, str)
        and CHECKPOINT_NAME.fullmatch(manifest.file) is not None
        and manifest.file == (file or manifest.file)
        and isinstance(manifest.shards, dict)
        and all(SHARD_NAME.fullmatch(name) for name in manifest.shards)
        and all(re.fullmatch("[0-9a-f]{64}", digest) for digest, _ in manifest.all_files.values())
        and all(
            type(count) is int and count >= 0 for count in (*counts, *(size for _, size in manifest.all_files.values()))
        )
        and isinstance(manifest.finished, bool)
        and isinstance(manifest.written, int | float)
        and isinstance(manifest.run, dict)
        and isinstance(manifest.versions, dict)
        and isinstance(manifest.loggers, list)
    )
    if not is_valid:
        raise ValueError(f"{path} is not a manifest of a checkpoint beside it.")
    return manifest


def load_json(path: Path) -> dict[str, Any]:
    """Read the mapping that a JSON file of limited size holds."""
    if not path.is_file() or path.stat().st_size > _MAX_MANIFEST_BYTES:
        raise ValueError(f"{path} is missing or too large to be a record.")
    values = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(values, dict):
        raise TypeError(f"{path} does not hold a mapping.")
    return values


@cache
def installed_versions() -> Mapping[str, str]:
    """Return the versions on which exact results depend: of Python, torch, Lightning and this package."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version(), "torch": torch.__version__}
    for name, package in (("lightning", lightning_package()), ("lightning_tricks", "lightning_tricks")):
        try:
            found[name] = version(package)
        except PackageNotFoundError:
            continue
    return found
