"""`SharedStateGroup`: one metric that updates itself, and others that compute from its states."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_tricks._shared.tensors import to_double
from lightning_tricks.metrics.core.metric_groups import MemberKey, MetricGroup, State, joined_rows, set_states
from lightning_tricks.metrics.core.metric_table import can_concat_batches, metrics_in, task_of


class SharedStateGroup(MetricGroup):
    """A metric that updates itself, and others with the same states, which are copied from it."""

    def __init__(self, members: Mapping[MemberKey, Metric]) -> None:
        super().__init__(members)
        self._updated = next(iter(self.members.values()))
        self._task = task_of(self._updated)
        self.can_concat_batches = can_concat_batches(self._updated)
        self._is_double = False
        self._is_stacked = [False] * len(metrics_in(self._updated))  # whether states are those of several ranks
        self._earlier: State | None = None  # such states, which an update would misunderstand
        for metric in self.members.values():
            for part in metrics_in(metric):
                part.validate_args = False  # `check_batch` checks the first batch

    def update(self, inputs: Mapping[str, Any]) -> None:
        """Update the one metric."""
        if any(self._is_stacked):
            earlier = self.state()
            self.load([])
            self._earlier = earlier
        given = {name: self._convert_input(name, inputs[name]) for name in self.accepted_inputs if name in inputs}
        self._updated.update(**given)

    def state(self) -> State:
        """Return the states of the one metric and of those that it wraps."""
        own = [
            {"updates": _update_count(part), "states": {name: getattr(part, name) for name in part._defaults}}
            | ({"stacked": True} if is_stacked else {})
            for part, is_stacked in zip(metrics_in(self._updated), self._is_stacked, strict=True)
        ]
        return own if self._earlier is None else self._merge([self._earlier, own])

    def load(self, states: Sequence[State], samples: Sequence[int] = ()) -> None:
        """Replace the states by those of several parts of the data, merged as each `dist_reduce_fx` says."""
        whole, self._earlier = self._merge(states, samples), None
        self._is_stacked = [merged["stacked"] for merged in whole]
        self._updated.reset()
        for part, merged in zip(metrics_in(self._updated), whole, strict=True):
            if merged["updates"]:
                for name, state in merged["states"].items():
                    setattr(part, name, state)
                part._update_count, part._computed = merged["updates"], None
                if hasattr(part, "_num_vals_seen"):
                    part._num_vals_seen = merged["updates"]

    def _merge(self, states: Sequence[State], samples: Sequence[int] = ()) -> State:
        """Return one state for those of several parts of the data."""
        merged = []
        for position, part in enumerate(metrics_in(self._updated)):
            seen = [state[position] for state in states if state[position]["updates"]]
            counts = samples if len(seen) == len(states) else ()
            stacked = [state.get("stacked", False) for state in seen]
            values: dict[str, Any] = {}
            for name, reduction in part._reductions.items() if seen else ():
                found = [state["states"][name] for state in seen]
                values[name] = merge_state(found, reduction, stacked, counts)  # type: ignore[arg-type]
            can_stack = any(part._reductions[name] is None and isinstance(one, Tensor) for name, one in values.items())
            updates = sum(state["updates"] for state in seen)
            is_stacked = any(stacked) or (len(seen) > 1 and can_stack)
            merged.append({"updates": updates, "states": values, "stacked": is_stacked})
        return merged

    def set_member_states(self) -> None:
        """Copy the states of the one metric to the other members."""
        if self._earlier is not None:
            self.load([self.state()])
        states = {name: getattr(self._updated, name) for name in self._updated._defaults}
        for metric in self.members.values():
            if metric is not self._updated:
                set_states(metric, states)

    def num_invalid(self) -> Tensor | int:
        """Return how many numbers were invalid, as far as the metric counts them."""
        count: Any = getattr(self._updated, "num_invalid", None)  # of our own metrics
        return count() if count is not None else 0

    def _convert_input(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if name == "target" and self._task is not None and self._task.kind in ("binary", "multiclass", "multilabel"):
            return value.long()
        if not value.is_floating_point():
            return value
        if self._task is not None and self._task.kind == "regression" and value.device.type != "mps":
            if not self._is_double:
                self._updated.set_dtype(torch.float64)  # so that sums do not depend on the batch size
                self._is_double = True
            return value.double()
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value


def _update_count(part: Metric) -> int:
    """Return how often a metric was updated; of its wrappers, torchmetrics' `Running` alone has states, and counts."""
    return part.update_count or getattr(part, "_num_vals_seen", 0)


def merge_state(
    parts: Sequence[Any], reduction: Callable[[Tensor], Tensor] | None, stacked: Sequence[bool], samples: Sequence[int]
) -> Any:
    """Merge one state of a metric over ranks or over the parts of an epoch, as its `dist_reduce_fx` says.

    Args:
        parts: The state's values, each a tensor or a list of tensors, of those that have seen data.
        reduction: What torchmetrics made of `dist_reduce_fx`.
        stacked: Which of them are already such stacks as a `dist_reduce_fx` of None makes.
        samples: How many samples each part has, where ranks may have taken turns; empty if they have not.

    Returns:
        A tensor, or a list of tensors where the parts are lists.
    """
    if len(parts) == 1:
        return parts[0]
    name = getattr(reduction, "__name__", "")
    if isinstance(parts[0], list):
        return joined_rows(parts, samples)
    if name == "dim_zero_cat":
        rows = [[part.reshape(-1) if part.ndim == 0 else part] for part in parts]
        return torch.cat(joined_rows(rows, samples))
    if reduction is None:
        pairs = zip(parts, stacked, strict=True)
        return torch.cat([part if is_stacked else part[None] for part, is_stacked in pairs])
    whole = torch.stack(list(parts))
    if name == "dim_zero_mean":  # of whole numbers as well, such as a `data_range`
        return to_double(whole).mean(0).to(whole.dtype)
    return reduction(whole)
