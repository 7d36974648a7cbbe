"""A checkpoint in memory, which is read once and used several times."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

from lightning_tricks._torch_compat.tensors import tensor_version
from lightning_tricks.auto_resume.core.safe_loading import plain_tensors, split_arguments


class KeptCheckpoint:
    """Keeps what was read from a checkpoint, and gives copies to hooks, which may change what they are given.

    The copies share the memory of the tensors, whose versions tell whether somebody changed one in place. A checkpoint
    with objects that may change without notice is not kept.

    Args:
        values: What was read.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = values
        self._arguments, self._others = split_arguments(values)
        tensors = plain_tensors(self._others)
        self._versions = [(one, tensor_version(one)) for one in tensors or ()]
        self._can_be_kept = tensors is not None and not any(one.requires_grad for one in tensors)

    @property
    def is_intact(self) -> bool:
        """Whether the values are certainly those that were read."""
        return self._can_be_kept and all(tensor_version(one) == version for one, version in self._versions)

    @property
    def values(self) -> Mapping[str, Any]:
        """The values, which must not be changed."""
        return self._values

    def copy(self) -> dict[str, Any]:
        """Return a copy of all containers, with tensors of their own that share their memory."""
        others = deepcopy(self._others, {id(one): one.detach() for one, _ in self._versions})
        return {key: self._arguments[key] if key in self._arguments else others[key] for key in self._values}
