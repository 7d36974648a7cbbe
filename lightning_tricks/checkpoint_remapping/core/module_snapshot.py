"""`unchanged_on_error`: a module as it was, where what it runs at loading fails half-way."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._shared.tensors import is_sharded
from lightning_tricks._torch_compat.modules import loads_as_torch_does


@contextmanager
def unchanged_on_error(module: nn.Module) -> Iterator[Snapshot | None]:
    """Undo on an exception all that has changed in a module.

    Yields:
        The module as it was; None where loading is torch's alone and cannot fail, so that no copy is needed.
    """
    before = None if loads_as_torch_does(module) and all(map(_can_be_written, _tensors(module))) else Snapshot(module)
    try:
        yield before
    except BaseException:
        if before is not None:
            before.restore()
        raise


class Snapshot:
    """The attributes, the values of all tensors and the extra state of a module and of what is inside it."""

    def __init__(self, module: nn.Module) -> None:
        self._containers: list[tuple[Any, Any]] = []
        for part in module.modules():
            for value in (vars(part), *vars(part).values()):
                if type(value) in (dict, OrderedDict, list):
                    self._containers.append((value, copy.copy(value)))
        values = [v for _, saved in self._containers for v in (saved.values() if isinstance(saved, dict) else saved)]
        tensors = {id(value): value for value in values if isinstance(value, Tensor)}
        self._tensors = {key: (tensor, tensor.data, tensor.detach().clone()) for key, tensor in tensors.items()}
        with_state = [part for part in module.modules() if type(part).get_extra_state is not nn.Module.get_extra_state]
        self._extra = [(part, copy.deepcopy(part.get_extra_state())) for part in with_state]

    def not_taken(self, own: Mapping[str, Tensor], now: Mapping[str, Any], given: Mapping[str, Any]) -> list[str]:
        """Return the names of tensors that kept their values though others were given.

        Args:
            own: The module's tensors when the snapshot was taken.
            now: Their values after loading.
            given: What should have been loaded.
        """
        old = {name: self._tensors[id(own[name])][2] for name in given if id(own.get(name)) in self._tensors}
        kept = [name for name, value in old.items() if name not in now or _is_equal(now[name], value)]
        return [name for name in kept if not _is_equal(given[name].to(old[name]), old[name])]

    def restore(self) -> None:
        """Bring everything back."""
        for container, saved in self._containers:
            if isinstance(container, list):
                container[:] = saved
            else:
                container.clear()
                container.update(saved)
        with torch.no_grad():
            for tensor, data, values in self._tensors.values():
                with suppress(RuntimeError):  # what cannot be written was not
                    data.copy_(values)
                    if not is_sharded(tensor):
                        tensor.data = data
        for part, state in self._extra:
            part.set_extra_state(state)


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    yield from module.parameters()
    yield from module.buffers()


def _can_be_written(tensor: Tensor) -> bool:
    """Whether a tensor is no view of fewer elements, and none of another inference mode."""
    is_strided = tensor.layout == torch.strided and not is_sharded(tensor)
    is_expanded = is_strided and any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    return not is_expanded and (torch.is_inference_mode_enabled() or not tensor.is_inference())


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    if one.shape != other.shape or one.is_meta or other.is_meta:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())
