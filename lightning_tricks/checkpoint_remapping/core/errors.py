"""What can be wrong with a checkpoint, as exceptions."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint that cannot be used as asked; the message says why and what to do."""


class UnsafeCheckpointError(CheckpointError):
    """A file that asks for code to be run. None was."""


class NotACheckpointError(CheckpointError):
    """A file that holds no weights, or not all of it: a web page, a cut-off download, an optimizer's state."""


class MissingCheckpointError(NotACheckpointError, FileNotFoundError):
    """A path where nothing is."""

    def __str__(self) -> str:
        return str(self.args[0])


class AmbiguousAlignmentError(CheckpointError):
    """Two assignments of tensors to names are equally good, and one of them is wrong."""


class NothingLoadedError(CheckpointError):
    """Not one tensor of a checkpoint has a place in the model."""
