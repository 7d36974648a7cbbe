"""Exponential moving averages of weights, which follow the steps of the optimizers that own them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._shared.checks import check_count, check_fraction
from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.tensors import (
    full_tensor,
    gather_objects,
    is_sharded,
    local_part,
    named_tensors,
    outside_inference_mode,
    to_double,
)
from lightning_tricks._torch_compat.foreach import foreach_add_, foreach_lerp_, foreach_mul_, foreach_sub

_HALF = (torch.float16, torch.bfloat16)


def decay_at(update: int, decay: float, *, warmup: bool = True) -> float:
    """Return the decay of an update of an average.

    Args:
        update: The number of updates before this one. The first one copies the weights.
        decay: The largest decay, in [0, 1).
        warmup: Whether it is `(1 + update) / (10 + update)` as long as that is less.

    Examples:
        >>> [round(decay_at(update, 0.9999), 3) for update in (0, 1, 10, 1000, 100_000)]
        [0.0, 0.182, 0.55, 0.991, 1.0]
    """
    rising = (1 + update) / (10 + update) if warmup else decay
    return min(decay, rising) if update > 0 else 0.0


class MovingAverage(nn.Module):
    """Exponential moving averages of named tensors, as its parameters.

    The average of a tensor begins with the tensor itself, at the first update; of half precision it is kept in float32,
    where a change of 1 / 10,000 is not lost. Updates are counted by the optimizers that step the tensors.

    Args:
        decay: How much of the average an update keeps, in [0, 1); 0 follows the weights.
        warmup: Whether the decay rises to `decay`, as `decay_at` says.
        every_n_steps: The number of steps of an optimizer from one update to the next.

    Attributes:
        held: What is trained, while a module has the averages.

    Raises:
        TypeError, ValueError: If an argument has another type or is out of range.

    Examples:
        >>> layer, average = nn.Linear(1, 1, bias=False), MovingAverage(0.5, warmup=False)
        >>> average.follow(0, dict(layer.named_parameters()))
        >>> for value in (1.0, 2.0, 4.0):
        ...     _ = nn.init.constant_(layer.weight, value)
        ...     average.update(0)
        >>> with average.swapped_in(layer):
        ...     print(layer.weight.item())
        2.75
    """

    def __init__(self, decay: float, *, warmup: bool = True, every_n_steps: int = 1) -> None:
        super().__init__()
        self.decay, self.warmup = check_fraction("decay", decay), warmup
        self.every_n_steps = check_count("every_n_steps", every_n_steps)
        self.held: dict[str, Tensor] | None = None
        self._is_sharded = False
        self.load_counts({"steps": {}, "skipped": {}, "starts": {}})

    def counts(self) -> dict[str, dict[Any, Any]]:
        """Return the steps of each optimizer, how many were skipped, and after how many steps each average begins."""
        return {"steps": dict(self._steps), "skipped": dict(self._skipped), "starts": dict(self._starts)}

    def load_counts(self, counts: Mapping[str, Mapping[Any, Any]]) -> None:
        """Go back to what `counts` returned; averages that began later are dropped, and `follow` has to be called."""
        self._steps = defaultdict[int, int](int, counts["steps"])
        self._skipped = dict[int, Tensor](counts["skipped"])
        self._starts = {n: start for n, start in counts["starts"].items() if _key(n) in self._parameters}
        self._numbers: dict[str, int] = {}  # of the optimizers, as far as they are followed
        for key in self._parameters.keys() - set(map(_key, self._starts)):
            del self._parameters[key]
        self._cohorts: dict[int, dict[int, tuple[list[Tensor], list[Tensor]]]] = {}  # what began together, by start

    def averages(self) -> dict[str, Tensor]:
        """Return the averages by the names of their tensors, without those that had no update yet."""
        begun = [n for n, start in self._starts.items() if self._steps.get(self._numbers.get(n, -1), start + 1) > start]
        return {name: self.get_parameter(_key(name)).detach() for name in begun}

    def load_averages(self, averages: Mapping[str, Tensor]) -> None:
        """Copy averages by name; each has to be among the counts that are loaded next."""
        for name, average in averages.items():
            dtype = torch.float32 if average.dtype in _HALF else average.dtype
            copy = nn.Parameter(average.detach().to(dtype, copy=True), requires_grad=False)
            self.register_parameter(_key(name), copy)

    def follow(self, number: int, tensors: Mapping[str, Tensor]) -> None:
        """Say which tensors an optimizer steps, all of them each time; those without an average get one.

        Args:
            number: The number of the optimizer.
            tensors: Name -> tensor.
        """
        begun = self.averages()
        for name in [name for name, one in self._numbers.items() if one == number and name not in begun]:
            del self._starts[name], self._numbers[name]  # it may have been frozen before its first step
        self._numbers.update(dict.fromkeys(tensors, number))
        cohorts = self._cohorts[number] = {}
        for name, tensor in tensors.items():
            if name not in self._starts:
                self._starts[name] = self._steps[number]
                self.load_averages({name: tensor})
            average = self.get_parameter(_key(name))
            average.data = average.data.to(tensor.device)  # a checkpoint is read on the CPU
            values, averages = cohorts.setdefault(self._starts[name], ([], []))
            values.append(tensor)
            averages.append(average)
        self._is_sharded = any(map(is_sharded, tensors.values()))

    @torch.no_grad()
    def update(self, number: int, found_inf: Tensor | None = None) -> None:
        """Count a step of an optimizer, and update the averages of its tensors if it is time.

        Args:
            number: The number of the optimizer.
            found_inf: A tensor of one element that is not zero if the optimizer has skipped the step on its device, as
                fused ones do at the request of a GradScaler; it is not read.
        """
        self._steps[number] += 1
        if found_inf is not None:
            found_inf = to_double(found_inf).reshape(())
            self._skipped[number] = self._skipped.get(number, 0) + found_inf.sign()
        for start, (tensors, averages) in self._cohorts[number].items():
            weight = self._weight(number, start, found_inf)
            if self._is_sharded:  # each rank averages what it holds, without the dispatch of DTensors
                tensors, averages = [*map(local_part, tensors)], [*map(local_part, averages)]
            values = [tensor.float() if tensor.dtype in _HALF else tensor for tensor in tensors]
            if isinstance(weight, Tensor):
                changes = foreach_sub(values, averages)
                foreach_mul_(changes, weight.to(averages[0].dtype))
                foreach_add_(averages, changes)
            elif weight:
                foreach_lerp_(averages, values, weight)

    def _weight(self, number: int, start: int, found_inf: Tensor | None) -> float | Tensor:
        """Return the weight of the present values: 1 up to the first update, and 0 between two updates."""
        steps = self._steps[number] - self._skipped.get(number, 0)
        every = self.every_n_steps
        updates, is_due = steps // every - start // every, steps % every == 0
        if not isinstance(updates, Tensor):
            return 1 - decay_at(updates - 1, self.decay, warmup=self.warmup) if is_due or updates < 1 else 0.0
        decay = (updates / (9 + updates) if self.warmup else torch.ones_like(updates)).clamp(max=self.decay)
        is_due = is_due & (found_inf is None or found_inf == 0) | (updates < 1)
        return torch.where(is_due, torch.where(updates > 1, 1 - decay, 1.0), 0.0)

    def share_of_first(self) -> float:
        """Return the largest share that the weights of the first update have in an average, if others followed."""
        shares = [0.0]
        for number, called in self._steps.items():
            steps = int(called - self._skipped.get(number, 0))
            decays = (decay_at(n, self.decay, warmup=self.warmup) for n in range(1, steps // self.every_n_steps))
            shares.append(prod(decays) if steps > self.every_n_steps else 0.0)
        return max(shares)

    def swap_in(self, module: nn.Module) -> None:
        """Copy the averages into a module, unless it has them, and hold its own values."""
        if self.held is not None:
            return
        with outside_inference_mode():
            averages = self.averages()  # of which a module may have lost some
            tensors = {name: tensor for name, tensor in named_tensors(module).items() if name in averages}
            self.held = {name: tensor.detach().clone() for name, tensor in tensors.items()}
            for name, tensor in tensors.items():
                tensor.copy_(averages[name])

    @contextmanager
    def swapped_in(self, module: nn.Module) -> Iterator[None]:
        """Let a module have the averages until the context is left, also by an error."""
        self.swap_in(module)
        try:
            yield
        finally:
            held, self.held = self.held or {}, None
            with outside_inference_mode():
                for name, tensor in named_tensors(module).items():
                    if name in held:
                        tensor.copy_(held[name])

    def split(self, module: nn.Module, state_dict: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return two state dicts of a module, with the averages and with what is trained.

        Args:
            module: The module, with the averages in it or not.
            state_dict: Its present state dict; of a sharded module all ranks have to give theirs.
        """
        tensors, averages = named_tensors(module), self.averages()
        names = {_place(tensors[name]): name for name in averages if name in tensors}  # a hook may rename entries
        names.pop(None, None)
        own = {strip_compile_prefix(name): first for name, first in _first_names(module).items()}  # of copies
        averaged, trained = dict(state_dict), dict(state_dict)
        other, values = (averaged, averages) if self.held is None else (trained, self.held)
        values = as_in(state_dict, values)
        for key, value in state_dict.items():
            name = isinstance(value, Tensor) and names.get(_place(value), own.get(strip_compile_prefix(key)))
            if name in values:
                other[key] = values[name].to(value.device, value.dtype)
        return averaged, trained

    def others(self, module: nn.Module, state_dict: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return the averages that a state dict does not have bit for bit, such as float32 of half precision."""
        averages = as_in(state_dict, self.averages())
        averages |= {name: averages[first] for name, first in _first_names(module).items() if first in averages}
        same = [_is_same(state_dict.get(name), average) for name, average in averages.items()]
        if any(map(is_sharded, averages.values())):  # each rank compares its part, and all have to store theirs
            same = [all(each) for each in zip(*gather_objects(same), strict=True)]
        return {name: average for (name, average), is_there in zip(averages.items(), same, strict=True) if not is_there}


def as_in(state_dict: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors as a state dict has its own: sharded, or whole on rank zero alone, as others have an empty one.

    Args:
        state_dict: Of this rank.
        tensors: DTensors, or others, which are returned as they are; all ranks have to give them.
    """
    if any(map(is_sharded, filter(torch.is_tensor, state_dict.values()))) or not any(map(is_sharded, tensors.values())):
        return dict(tensors)
    whole = ((name, full_tensor(tensor)) for name, tensor in tensors.items())  # one after another
    return {name: tensor.cpu() for name, tensor in whole if state_dict}


def batch_statistics(module: nn.Module, owners: Mapping[int, int]) -> dict[str, int]:
    """Return to which optimizer the running means and variances of a module belong, name -> number.

    It is the one that steps parameters of the same layer, or else of the smallest part of the module that has some.

    Args:
        module: The module.
        owners: The `id` of each parameter that is stepped -> the number of its optimizer.

    Examples:
        >>> net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, affine=False))
        >>> batch_statistics(net, {id(net[0].weight): 0})
        {'1.running_mean': 0, '1.running_var': 0}
    """
    found = dict[str, int]()
    for name, _ in module.named_buffers():
        parts = name.split(".")
        for depth in range(len(parts) - 1, -1, -1) if parts[-1] in ("running_mean", "running_var") else ():
            parameters = module.get_submodule(".".join(parts[:depth])).parameters()
            if numbers := {owners[id(parameter)] for parameter in parameters if id(parameter) in owners}:
                found[name] = min(numbers)
                break
    return found


def _key(name: str) -> str:
    return "/" + name.replace(".", "/")  # the name of a parameter has no dot


def _first_names(module: nn.Module) -> dict[str, str]:
    """Return each name of a parameter or buffer, of which a tied one has several, and the first that it has."""
    tensors = named_tensors(module, remove_duplicate=False)
    first = {id(tensor): name for name, tensor in reversed(tensors.items())}
    return {name: first[id(tensor)] for name, tensor in tensors.items()}


def _place(tensor: Tensor) -> tuple[int, torch.Size] | None:
    part = local_part(tensor)
    return (part.data_ptr(), tensor.shape) if part.numel() else None  # ranks may have no part


def _is_same(value: Any, average: Tensor) -> bool:
    is_alike = isinstance(value, Tensor) and value.dtype == average.dtype
    return is_alike and torch.equal(local_part(value).to(average.device), local_part(average))
