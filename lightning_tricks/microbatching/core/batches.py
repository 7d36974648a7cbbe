"""Batches of any structure: the number of their rows, their parts, and what the parts returned as one whole.

And the number of their targets, with gradients of the mean over the targets of several batches and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import fields, is_dataclass
from itertools import pairwise
from numbers import Real
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from lightning_tricks._shared.tensors import tensors_in, to_double
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.foreach import foreach_mul_, group_by_device_and_dtype

_UNIT = 2**20  # Lightning adds up whole batch sizes, and sums of class weights are none
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


def count_rows(batch: Any) -> int:
    """Return the number of rows of a batch: the first dimension of its tensors, or the length of its lists of samples.

    Args:
        batch: A tensor or array, a dict, tuple, list, named tuple or dataclass of them, nested, or a list of samples.

    Raises:
        ValueError: If its parts do not agree on a number of rows, or cannot be cut into rows.
    """
    if numbers := _row_numbers(batch):
        return numbers[0]
    lengths = [f"{name} has {length}" for name, length in lengths_in(batch, "batch").items()]
    reason = "it holds no tensor with rows" if numbers is None else f"lengths differ ({list_names(lengths, 6)})"
    raise ValueError(
        f"A batch cannot be cut into rows: {reason}. Give all tensors with rows the same first dimension, or "
        "pass the samples as a list, and keep values that all rows share in the module."
    )


def cut_batch(batch: Any, parts: int) -> tuple[list[Any], list[int]]:
    """Cut a batch into parts whose numbers of rows differ by at most one.

    Args:
        batch: As `count_rows` takes it. Tensors without dimensions, numbers and strings are the same in each part.
        parts: Their number, at most the number of rows.

    Returns:
        The parts, which are views, and their numbers of rows.
    """
    rows = count_rows(batch)
    limits = [*pairwise(rows * index // parts for index in range(parts + 1))]
    return [take_rows(batch, rows, slice(*limit)) for limit in limits], [stop - start for start, stop in limits]


def copy_batch(batch: Any) -> Any:
    """Return a batch in new containers with copies of its tensors, so that a step may change what it likes."""
    if isinstance(batch, Tensor | np.ndarray):
        return batch.detach().clone() if isinstance(batch, Tensor) else batch.copy()
    if _is_plain(batch):
        return copy(batch)
    return _with_parts(batch, {key: copy_batch(part) for key, part in _parts(batch).items()})


def lengths_in(value: Any, name: str = "") -> dict[str, int]:
    """Return the lengths of tensors, arrays and lists in a batch or in what a step has returned, by place."""
    length, place = _length(value), "{}.{}" if is_dataclass(value) else "{}[{!r}]"
    found = {} if length is None else {name: length}
    for key, part in ({} if _is_plain(value) else _parts(value)).items():
        found |= lengths_in(part, place.format(name, key))
    return found


def take_rows(batch: Any, rows: int, chosen: slice) -> Any:
    """Return some rows of a batch that has `rows` of them, in new containers."""
    if isinstance(batch, Tensor) and batch.layout is torch.sparse_coo:
        return batch.narrow_copy(0, chosen.start, chosen.stop - chosen.start)
    if isinstance(batch, Tensor | np.ndarray):
        return batch[chosen] if batch.ndim else batch
    if _is_plain(batch):
        return batch[chosen] if len(batch) == rows else batch
    if _is_list(batch) and len(batch) == rows and (_are_labelled(batch) or rows not in (_common_numbers(batch) or ())):
        return batch[chosen]  # samples
    return _with_parts(batch, {key: take_rows(part, rows, chosen) for key, part in _parts(batch).items()})


def _parts(value: Any) -> dict[Any, Any]:
    """Return what a container holds, by key, name or index."""
    if isinstance(value, Mapping):
        return dict(value)
    if is_dataclass(value):
        return {field.name: getattr(value, field.name) for field in fields(value)}
    return dict(enumerate(value)) if isinstance(value, list | tuple) and not isinstance(value, PackedSequence) else {}


def _is_plain(value: Any) -> bool:
    """Whether a value is a list of numbers or words, such as the tokens of a text."""
    return _is_list(value) and len(value) > 0 and all(isinstance(part, _PLAIN) for part in value)


def _length(value: Any) -> int | None:
    """Return the length of a list, or of a tensor or array with dimensions; None of any other value."""
    return len(value) if isinstance(value, list) or (isinstance(value, Tensor | np.ndarray) and value.ndim) else None


def _with_parts(value: Any, parts: Mapping[Any, Any]) -> Any:
    """Return a container like another one, with other parts."""
    if not parts:
        return value
    if isinstance(value, list | tuple):
        return type(value)(parts.values()) if _is_list(value) else type(value)(*parts.values())
    made = copy(value)
    for key, part in parts.items():
        if isinstance(value, Mapping):
            made[key] = part
        else:
            object.__setattr__(made, key, part)  # it may be frozen
    return made


def _is_list(value: Any) -> bool:
    """Whether a value is a list, or a tuple whose elements have no names."""
    return isinstance(value, list | tuple) and not hasattr(value, "_fields")


def _row_numbers(value: Any) -> list[int] | None:
    """Return what the number of rows may be, the likeliest first; None for what has no rows."""
    if isinstance(value, Tensor) and (value.is_nested or value.layout not in (torch.strided, torch.sparse_coo)):
        raise ValueError(f"A batch cannot be cut into rows: it holds a tensor of the layout {value.layout}.")
    if isinstance(value, Tensor | np.ndarray):
        return [len(value)] if value.ndim else None
    if _is_plain(value):
        return None
    parts = _parts(value)
    if not parts:
        if next(tensors_in((value, getattr(value, "__dict__", {}))), None) is None:
            return None
        raise ValueError(f"A batch cannot be cut into rows: it holds a {type(value).__name__}. Give tensors instead.")
    columns = _common_numbers(parts.values())
    if not _is_list(value):
        return columns
    samples = [len(value)] if _are_alike(value) else []
    return [*samples, *(columns or ())] if _are_labelled(value) else [*(columns or ()), *samples]


def _common_numbers(values: Iterable[Any]) -> list[int] | None:
    all_numbers = [numbers for numbers in map(_row_numbers, values) if numbers is not None]
    return [n for n in all_numbers[0] if all(n in numbers for numbers in all_numbers)] if all_numbers else None


def _are_alike(values: Sequence[Any]) -> bool:
    """Whether values may be samples: tensors of one type and number of dimensions, or containers of one kind."""

    def form(value: Any) -> tuple[Any, ...]:
        if isinstance(value, Tensor | np.ndarray):
            return type(value), value.ndim, value.dtype
        return type(value), tuple(value) if isinstance(value, Mapping) else isinstance(value, tuple) and len(value)

    return len({*map(form, values)}) == 1


def _are_labelled(values: Sequence[Any]) -> bool:
    """Whether values are alike, with a number in each, as a label is in a sample."""
    return _are_alike(values) and all(
        any(isinstance(part, int | float) or (isinstance(part, Tensor) and not part.ndim) for part in parts.values())
        for parts in map(_parts, values)
    )


def join_rows(parts: Sequence[Any], sizes: Sequence[int], without_rows: Container[str] = (), name: str = "") -> Any:
    """Join what a step has returned for the parts of a batch to what it would return for the whole.

    Rows are put together; other floating-point and complex values are averaged over the rows, and integers are added.

    Args:
        parts: What was returned, alike for all parts.
        sizes: Their numbers of rows.
        without_rows: The names of values that have no rows, although their length may be that of a part.
        name: How the values are called among these.
    """
    first = parts[0]
    if len(parts) == 1 or len({*map(type, parts)}) > 1:
        return parts[-1]
    if isinstance(first, np.ndarray | np.number | int | float | complex):
        joined = join_rows([torch.as_tensor(np.asarray(part)) for part in parts], sizes, without_rows, name).numpy()
        return joined[()] if isinstance(first, np.ndarray | np.number) else joined.item()
    have_rows = name not in without_rows and [*map(_length, parts)] == [*sizes]
    if isinstance(first, Tensor):
        if have_rows and len({part.shape[1:] for part in parts}) == 1:
            return torch.cat(list(parts))
        if any(part.shape != first.shape for part in parts) or first.dtype == torch.bool:
            return parts[-1]
        return weighted_mean(parts, sizes) if first.is_floating_point() or first.is_complex() else sum(parts)
    if isinstance(first, list) and have_rows:
        return [element for part in parts for element in part]
    values = [_parts(part) for part in parts]
    if any(each.keys() != values[0].keys() for each in values):
        return parts[-1]
    place = "{}.{}" if is_dataclass(first) else "{}[{!r}]"
    return _with_parts(
        parts[-1],
        {key: join_rows([v[key] for v in values], sizes, without_rows, place.format(name, key)) for key in values[0]},
    )


def weighted_mean(values: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """Return the weighted mean of tensors of one shape, computed in double precision, in their type."""
    doubles = [value.to(torch.complex128) if value.is_complex() else to_double(value) for value in values]
    total: Any = sum(value * weight for value, weight in zip(doubles, weights, strict=True))
    return torch.as_tensor(total / sum(weights), dtype=values[0].dtype)


class LoggedValues:
    """Merges what was logged for the parts of a batch.

    Attributes:
        losses: The losses of the parts, where they are not merged by their rows; what is equal to them is merged alike.
        targets: The numbers of targets of the parts, of which each loss is the mean; none where the losses are sums.
        without_rows: The keys with which the same batch size is logged for any number of rows.
        are_losses: For each key whether its values are the losses, where `targets` are given; filled in.
    """

    def __init__(self) -> None:
        self.losses: list[Tensor] = []
        self.targets: Sequence[Tensor] = ()
        self.without_rows: Container[str] = ()
        self.are_losses: dict[str, bool] = {}

    def merge(
        self, key: str, values: Sequence[Tensor], rows: Sequence[int], batch_sizes: Sequence[int | None], reduction: str
    ) -> tuple[Tensor, int | Tensor | None]:
        """Merge what was logged under a key for the parts of a batch.

        Args:
            key: The key.
            values: The values.
            rows: The numbers of rows of the parts.
            batch_sizes: The batch sizes that were logged with them; None where none was.
            reduction: "mean", "sum", "max" or "min".

        Returns:
            The value for the whole batch, and its batch size, None where none was logged.
        """
        known = [size for size in batch_sizes if size is not None]
        are_counts = len(known) == len(values) and key not in self.without_rows
        size = sum(known) if are_counts else known[0] if known else None
        floats = [value if value.dtype in (torch.float32, torch.float64) else value.float() for value in values]
        is_mean = reduction in ("mean", "avg")
        if is_mean and (mean := self._mean_over_targets(key, floats)) is not None:
            return mean[0], mean[1] if size is None else size
        if len(values) == 1:
            return values[0], size
        stacked = torch.stack(floats)
        if not is_mean:
            merged = getattr(torch, {"max": "amax", "min": "amin"}.get(reduction, reduction))(stacked, dim=0)
        else:
            merged = weighted_mean(floats, known if are_counts else rows)
            if len(self.losses) == len(values) and not self.targets:
                losses = torch.stack(self.losses).to(stacked)
                merged = torch.where(torch.isclose(stacked, losses, rtol=1e-5, atol=0).all(), stacked.sum(0), merged)
        return merged, size

    def _mean_over_targets(self, key: str, values: Sequence[Tensor]) -> tuple[Tensor, Tensor] | None:
        """Return the mean of values over the targets, and their number, if the values are the losses."""
        if not self.targets or len(values) != len(self.losses) or values[0].ndim or not self.are_losses.get(key, True):
            return None
        targets, stacked = torch.stack([*self.targets]), torch.stack([*values])
        total = targets.sum()
        if key not in self.are_losses:
            losses = torch.stack(self.losses).to(stacked)
            are_losses = bool(torch.isclose(stacked.where(targets > 0, stacked.nan_to_num()), losses, 1e-5, 0).all())
            if total > 0:  # or another batch tells more
                self.are_losses[key] = are_losses
            if not are_losses:
                return None
        means = without_targets_zero(stacked, targets)
        mean = means[0] if len(means) == 1 else (means * targets).sum() / positive(total)
        return mean.to(stacked.dtype), (total * _UNIT).round().long()


Count = Callable[[Any], Tensor | float] | Literal["labels"]


def count_targets(count: Count, batch: Any, device: torch.device) -> Tensor:
    """Return the number of targets of a batch on a device, in double precision; shape ()."""
    if not callable(count) and not (isinstance(batch, Mapping) and count in batch):
        raise TypeError(
            f'count="labels" needs a batch with batch["labels"], got a {type(batch).__name__}: give a callable of the '
            "batch, such as count=lambda batch: (batch[1] != -100).sum()."
        )
    found: Any = count(batch) if callable(count) else (batch[count] != -100).sum()
    if isinstance(found, Real):
        found = torch.full((), found, device=device)  # type: ignore[call-overload]
    if not isinstance(found, Tensor) or found.ndim:
        raise TypeError(f"count must return an int or a tensor of shape (), got {found!r:.60}.")
    return to_double(found.detach().to(device, non_blocking=True))


class TargetMean:
    """Keeps accumulated gradients those of the mean over all targets so far.

    A window is what one optimizer step accumulates. After its last batch, whose gradients DDP averages over the ranks,
    they are those of the mean over the targets of all ranks. A loss is multiplied by its share of the targets so far,
    at most 1, and in the last batch by at most the number of ranks: in fp16, a scaled loss overflows no sooner than
    that of one batch alone.

    Args:
        count: As `count_targets` takes it.
        device: The device of the loss.

    Attributes:
        targets: The number of targets of the window so far, on this rank; None at its start.
        part: That of the part of a batch whose loss is computed; None before the first.
        scale: What the loss of the batch is multiplied by.
        is_checked: Whether the number of targets of the batch is to be compared with those of its loss.
        checks: How often it was.
    """

    def __init__(self, count: Count, device: torch.device) -> None:
        self._count, self._device = count, device
        self._batches = self.checks = 0
        self.targets: Tensor | None = None
        self.part: Tensor | None = None

    def begin(self, batch: Any, ranks: int, *, begins_window: bool) -> None:
        """Count a batch.

        Args:
            batch: The batch.
            ranks: The number of ranks whose gradients are averaged after this batch; all of them call it.
            begins_window: Whether there are no gradients yet.
        """
        self.is_checked = self._batches & (self._batches - 1) == 0 and not 0 < self._batches < 32
        self._batches += 1
        self.targets = None if begins_window else self.targets  # at once: a batch may have no loss to rescale by
        self._batch, self._before = self.count(batch), self.targets
        self._after = self._batch if self._before is None else self._batch + self._before
        self._total = self._after / ranks
        self._sum = torch.distributed.all_reduce(self._total, async_op=True) if ranks > 1 else None

    def count(self, batch: Any) -> Tensor:
        """Return the number of targets of a batch or a part of it."""
        return count_targets(self._count, batch, self._device)

    def count_parts(self, parts: Sequence[Any]) -> tuple[list[Tensor], list[Any]]:
        """Return the numbers of targets of the parts of the batch, and their shares."""
        if len(parts) == 1:
            return [self._batch], [1.0]
        return (counts := [*map(self.count, parts)]), [count / positive(self._batch) for count in counts]

    def rescale_(self, gradients: Iterable[Tensor]) -> None:
        """Multiply the gradients of the batches before by their share; call it once for each batch."""
        if self._sum is not None:
            self._sum.wait()
        self.targets, total = self._after, positive(self._total)
        self.scale = self._batch / total
        if self._before is not None and (given := [*gradients]):
            grouped: Any = group_by_device_and_dtype([given])
            for (device, _), ((alike,), _) in grouped.items():
                foreach_mul_(alike, (positive(self._before) / total).to(device))

    def changed_loss(self, loss: Tensor) -> Tensor:
        """Return the loss of the part; zero where it is a mean over no targets, which is NaN."""
        return loss if self.part is None else without_targets_zero(loss, self.part)


def positive(count: Tensor) -> Tensor:
    """Return a number of targets to divide by: what has none is zero, and stays it."""
    return count.where(count > 0, 1)


def without_targets_zero(means: Tensor, targets: Tensor) -> Tensor:
    """Return means over targets, with zeros where there are none."""
    return means.where(targets > 0, 0)
