"""Exceptions for checkpoints that cannot be used."""

from __future__ import annotations

_LONGEST = 1300  # characters of a message, which fit in 15 lines of 100 columns unless words are very long


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as asked; the message says why and what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(message if len(message) <= _LONGEST else f"{message[:_LONGEST]}...")  # of very long names


class UnsafeCheckpointError(CheckpointError):
    """A file that asks for code to be run. No code was run."""


class NotACheckpointError(CheckpointError):
    """A file without weights, or an incomplete one: a web page, a truncated download, the state of an optimizer."""


class MissingCheckpointError(NotACheckpointError, FileNotFoundError):
    """A checkpoint that does not exist, or that cannot be downloaded."""

    def __str__(self) -> str:
        return str(self.args[0])


class AmbiguousAlignmentError(CheckpointError):
    """Several assignments of a file's tensors to a model's names are equally good."""


class NothingLoadedError(CheckpointError):
    """No tensor of a checkpoint fits the model."""
