"""Exceptions for checkpoints that cannot be used."""

from __future__ import annotations

from textwrap import wrap

_MOST_LINES, _COLUMNS = 15, 100  # of a message


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as asked; the message says why and what to do."""

    def __init__(self, message: str) -> None:
        lines = wrap(message, _COLUMNS)
        if len(lines) > _MOST_LINES:  # of very long names
            message = " ".join(wrap(message, _COLUMNS, max_lines=_MOST_LINES, placeholder="..."))
        super().__init__(message)


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
