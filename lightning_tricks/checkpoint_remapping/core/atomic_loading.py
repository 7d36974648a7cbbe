"""Load tensors into a module: a failure leaves it unmodified, and tied tensors stay tied."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._shared.modules import parts_with_extra_state
from lightning_tricks._shared.tensors import is_on_meta, is_sharded, named_tensors
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.modules import loads_as_torch_does, set_state_dict_versions, state_dict_versions
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError
from lightning_tricks.checkpoint_remapping.core.matching.alignment_search import tied_names


def load_tensors(module: nn.Module, tensors: dict[str, Any], assign: bool | None = None) -> None:
    """Load the tensors of a plan, or leave the module unmodified; `assign` is the argument of `load_weights`.

    Raises:
        CheckpointError: If `load_state_dict` of the module raises, or does not take a name of its `state_dict`.
    """
    tied = tied_names(named_tensors(module, remove_duplicate=False))
    with unchanged_on_error(module) as before:
        _load(module, tensors, assign, before)
        _tie_again(module, tied, tensors)


def _load(module: nn.Module, tensors: dict[str, Any], assign: bool | None, before: Snapshot | None) -> None:
    """Copy tensors into the module's, or assign those that replace tensors on the meta device."""
    model_tensors = module.state_dict(keep_vars=True)
    assigned: dict[str, Any] = {}
    copied: dict[str, Any] = {}
    for name, tensor in tensors.items():
        without_values = is_on_meta(model_tensors.get(name))
        if assign or (without_values and assign is None):
            assigned[name] = _like(model_tensors.get(name), tensor)
        elif not without_values:
            copied[name] = tensor
    method = f"{type(module).__name__}.load_state_dict"
    for part, is_assigned in ((assigned, True), (copied, False)):
        if part:
            # With the module's own versions, or it would convert tensors that have its names and shapes already
            state = OrderedDict(part)
            set_state_dict_versions(state, state_dict_versions(module.state_dict()))
            try:
                result = module.load_state_dict(state, strict=False, **({"assign": True} if is_assigned else {}))
            except Exception as error:
                if before is None:
                    raise
                raise CheckpointError(
                    f"{method} raised {type(error).__name__}: {str(error)[:1000]} The module was not modified. Fix "
                    "the code that it runs, or load into a part with submodule=...."
                ) from error
            lost = [name for name in getattr(result, "unexpected_keys", ()) if not name.endswith("_extra_state")]
            lost += [name for name in getattr(result, "missing_keys", ()) if name in part]
            lost += before.not_taken(model_tensors, module.state_dict(), part) if before else []
            if lost:
                raise CheckpointError(
                    f"{method} did not take {list_names(dict.fromkeys(lost))}, although state_dict() has such names: a "
                    "hook or a method of the module drops or renames tensors in only one of them. The module was "
                    "not modified. Use the same names in both, or load into a part with submodule=...."
                )


def _tie_again(module: nn.Module, groups: list[list[str]], loaded: Collection[str]) -> None:
    """Give the names of each group one tensor again, after those that were loaded have replaced some of them."""
    own = named_tensors(module, remove_duplicate=False) if groups else {}
    for names in groups:
        first = next((own[name] for name in names if name in loaded), None)
        for name in names:
            if first is not None and own[name] is not first:
                owner, _, leaf = name.rpartition(".")
                setattr(module.get_submodule(owner), leaf, first)


def _like(own: Any, tensor: Any) -> Any:
    """Return a tensor in the precision and on the device of the model's; one on the meta device has none."""
    if not (isinstance(own, torch.Tensor) and isinstance(tensor, torch.Tensor)):
        return tensor
    return tensor.to(own.dtype) if own.is_meta else tensor.to(own.device, own.dtype)


@contextmanager
def unchanged_on_error(module: nn.Module) -> Iterator[Snapshot | None]:
    """Undo on an exception all that has changed in a module.

    Yields:
        The module as it was; None where loading is torch's alone and cannot fail, so that no copy is needed.
    """
    can_be_written = all(map(_can_be_written, chain(module.parameters(), module.buffers())))
    before = None if loads_as_torch_does(module) and can_be_written else Snapshot(module)
    try:
        yield before
    except BaseException:
        if before is not None:
            before.restore()
        raise


class Snapshot:
    """The attributes, the values of the tensors and the extra state of a module and its submodules."""

    def __init__(self, module: nn.Module) -> None:
        self._containers: list[tuple[Any, Any]] = []
        for part in module.modules():
            for value in (vars(part), *vars(part).values()):
                if type(value) in (dict, OrderedDict, list):
                    self._containers.append((value, copy.copy(value)))
        values = [v for _, saved in self._containers for v in (saved.values() if isinstance(saved, dict) else saved)]
        tensors = {id(value): value for value in values if isinstance(value, Tensor)}
        self._tensors = {key: (tensor, tensor.data, tensor.detach().clone()) for key, tensor in tensors.items()}
        with_state = parts_with_extra_state(module).values()
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
                with suppress(RuntimeError):  # it was not changed either
                    data.copy_(values)
                    if not is_sharded(tensor):
                        tensor.data = data
        for part, state in self._extra:
            part.set_extra_state(state)


def _can_be_written(tensor: Tensor) -> bool:
    """Whether a tensor is neither expanded from fewer elements nor made in another inference mode."""
    is_strided = tensor.layout == torch.strided and not is_sharded(tensor)
    is_expanded = is_strided and any(s == 0 and n > 1 for s, n in zip(tensor.stride(), tensor.shape, strict=True))
    return not is_expanded and (torch.is_inference_mode_enabled() or not tensor.is_inference())


def _is_equal(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    if one.shape != other.shape or one.is_meta or other.is_meta:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())
