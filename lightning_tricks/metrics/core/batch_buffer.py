"""`BatchBuffer`: copies of batches that are concatenated and counted together, which costs less than one by one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._shared.tensors import clone_tensors, detach_tensors, outside_inference_mode

_MAX_ROWS = 4096
_MAX_BYTES = 4 * 2**20


class BatchBuffer:
    """Batches that wait to be counted together, at most 4 MiB of them.

    Each batch is copied, because the next step may overwrite what a step returned (CUDA graphs, buffers).

    Args:
        update: Is called with the concatenated batches: name -> value.
        accepted_inputs: The names that `update` accepts; others are ignored.
        clone: Whether `update` may keep or change what it is given.
    """

    def __init__(
        self, update: Callable[[Mapping[str, Any]], None], accepted_inputs: Collection[str], *, clone: bool
    ) -> None:
        self._update = update
        self._accepted_inputs = frozenset(accepted_inputs)
        self._clone = clone
        self._given: frozenset[str] = frozenset()
        self._names: list[str] = []
        self.clear()

    def clear(self) -> None:
        """Drop the batches that wait."""
        self._pending: list[list[Tensor]] = []
        self._signature: list[Any] = []
        self._num_rows = self._rows_per_batch = self._bytes_per_batch = 0

    def add(self, inputs: Mapping[str, Any]) -> None:
        """Copy a batch; count those that wait where there are enough of them, or where this one differs from them."""
        if self._accepted_inputs & inputs.keys() != self._given:  # an optional argument may come and go
            self.flush()
            self._given = self._accepted_inputs & inputs.keys()
            self._names = sorted(self._given)
        batch = [inputs[name] for name in self._names]
        try:
            signature = [(value.shape, value.dtype) for value in batch]
        except AttributeError:  # a number, or an object
            signature = []
        if signature != self._signature:
            self._change_signature(signature, batch)
        if not self._bytes_per_batch or self._bytes_per_batch > _MAX_BYTES:
            self.flush()
            self._update_at_once(batch)
            return
        self._pending.append([value.detach().clone() if value.requires_grad else value.clone() for value in batch])
        self._num_rows += self._rows_per_batch
        if self._num_rows >= _MAX_ROWS or len(self._pending) * self._bytes_per_batch >= _MAX_BYTES:
            self.flush()

    def flush(self) -> None:
        """Count the batches that wait."""
        if self._pending:
            columns = zip(*self._pending, strict=True)
            with outside_inference_mode():
                batch = {name: torch.cat(column) for name, column in zip(self._names, columns, strict=True)}
            self._pending, self._num_rows = [], 0
            self._update(batch)

    def _update_at_once(self, batch: list[Any]) -> None:
        with outside_inference_mode():
            values = map(clone_tensors if self._clone else detach_tensors, batch)
            self._update(dict(zip(self._names, values, strict=True)))

    def _change_signature(self, signature: list[Any], batch: list[Any]) -> None:
        """Note shapes and types of the batches from now on; count those that wait if they cannot be concatenated."""
        row_signature = [(shape[1:], dtype) for shape, dtype in signature if len(shape)]
        if row_signature != [(shape[1:], dtype) for shape, dtype in self._signature if len(shape)]:
            self.flush()
        self._signature = signature
        all_have_rows = len(row_signature) == len(batch) > 0
        self._bytes_per_batch = sum(value.numel() * value.element_size() for value in batch) if all_have_rows else 0
        self._rows_per_batch = len(batch[0]) if all_have_rows else 0
