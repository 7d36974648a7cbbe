"""What a run's fingerprints are made of: a header, columns, rows, and the resumes that were not exact."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

INTEGER = np.dtype("<i8")
KEY_LENGTH = 3  # numbers that identify a row: step, epoch, batch


class FingerprintRecordError(ValueError):
    """Raised for a file that is no record of RunFingerprint, and for two records that cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class RecordHeader:
    """How a run was recorded, and on which rank.

    Attributes:
        detail: "step" or "layer".
        every_n_train_steps: One of so many steps was recorded.
        rank: The rank whose batches and gradients were recorded.
        world_size: How many ranks the run had.
        version: The version of the file's format.
    """

    detail: str
    every_n_train_steps: int = 1
    rank: int = 0
    world_size: int = 1
    version: int = 1


class Column(NamedTuple):
    """What the fingerprints of a column were computed of.

    Attributes:
        kind: "data", "forward", "loss", "gradient" or "weights".
        name: The name of the part of the batch, of the layer or of the parameter; "" for all of them together.
        call: 1 for the first value of that kind and name within a batch, 2 for the second, ...
    """

    kind: str
    name: str = ""
    call: int = 1


@dataclass(frozen=True)
class Row:
    """The fingerprints of a batch.

    Attributes:
        step: How many optimizer steps were done when the batch began.
        epoch: The batch's epoch.
        batch_idx: The batch's index in the epoch; -1 for the initial weights of a fit.
        columns: What the fingerprints were computed of, in the order of a step.
        values: The fingerprint of each column, int64; 0 where there was no value.
    """

    step: int
    epoch: int
    batch_idx: int
    columns: tuple[Column, ...]
    values: NDArray[np.int64]

    @property
    def key(self) -> tuple[int, int, int]:
        """Step, epoch and batch index."""
        return self.step, self.epoch, self.batch_idx

    def as_dict(self) -> dict[Column, int]:
        """Return column -> fingerprint, without the columns that have no value."""
        return {column: int(value) for column, value in zip(self.columns, self.values, strict=True) if value}


class IncompleteResume(NamedTuple):
    """A resume that could not restore everything.

    Attributes:
        rows: How many rows were recorded before it.
        step: How many optimizer steps were done.
        epoch: The epoch that was resumed.
        not_restored: What differs from what was saved, such as "module.history".
    """

    rows: int
    step: int
    epoch: int
    not_restored: tuple[str, ...]


@dataclass(frozen=True)
class FingerprintRecord:
    """What was recorded of a rank: its header, in blocks of equal columns its rows, and the incomplete resumes."""

    header: RecordHeader
    blocks: list[tuple[tuple[Column, ...], NDArray[np.int64]]] = field(default_factory=list)
    incomplete_resumes: list[IncompleteResume] = field(default_factory=list)

    def __len__(self) -> int:
        return sum(len(table) for _, table in self.blocks)

    def __iter__(self) -> Iterator[Row]:
        for columns, table in self.blocks:
            for line in table:
                step, epoch, batch = (int(number) for number in line[:KEY_LENGTH])
                yield Row(step, epoch, batch, columns, line[KEY_LENGTH:])

    def digest(self) -> Any:
        """Return a hash of all rows, to which more may be added."""
        found = hashlib.sha256()
        for _, table in self.blocks:
            found.update(table.astype(INTEGER).tobytes())
        return found

    def first(self, rows: int) -> FingerprintRecord:
        """Return the record as it was after its first rows."""
        blocks, left = [], rows
        for columns, table in self.blocks:
            if left > 0:
                blocks.append((columns, table[:left]))
                left -= len(table)
        return replace(
            self, blocks=blocks, incomplete_resumes=[resume for resume in self.incomplete_resumes if resume.rows < rows]
        )
