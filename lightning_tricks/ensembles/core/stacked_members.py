"""Members whose parameters are stacked, so that all of them run at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call

from lightning_tricks._shared.modes import eval_mode
from lightning_tricks._shared.text import describe_error
from lightning_tricks.ensembles.core.members import Members, stack_outputs
from lightning_tricks.ensembles.core.stacked_layers import StackedLayer, stacked_type

# rows x parameters of a member, from which on a call for each member costs nothing beside its work
_MIN_SEQUENTIAL_WORK = 10_000_000
_TOLERANCES = {torch.float64: 1e-3, torch.float32: 1e-3}  # relative to the largest output; 0.05 for half precision


class StackedMembers(Members):
    """Members of one structure that run at once, as one module whose layers hold the parameters of all.

    The first call compares the result with that of the members one after another: a model that mixes rows of a batch
    outside its layers (`x - x.mean(0)`, the batch in another dimension) gives something else, and runs as a loop over
    the stacked parameters from then on.

    Args:
        members: Modules for which `why_not_stack` returns an empty string.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.n_members = len(members)
        self.net = _stacked(members)
        self._skeleton = [_to_meta(members[0])]  # in a list, so that it is no child
        self._views: list[nn.Module] = []
        self.n_parameters = sum(parameter.numel() for parameter in members[0].parameters())
        self._checked = False
        self.register_state_dict_post_hook(_split_state_dict)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_join_state_dict)  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return self.n_members

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_views": []}

    def __getitem__(self, index: int) -> nn.Module:
        """Return a member as a module that shares memory with the stack."""
        view = copy.deepcopy(self._skeleton[0])
        for name, tensor in self.member_tensors(range(len(self))[index]).items():
            _set_tensor(view, name, tensor.detach())
        return view.train(self.training)

    def stacked_layers(self) -> Iterator[tuple[str, StackedLayer]]:
        """Yield the layers with parameters, by their names in a member."""
        for name, layer in self.net.named_modules():
            if isinstance(layer, StackedLayer):
                yield name, layer

    def stacked_parameters(self) -> dict[str, tuple[StackedLayer, nn.Parameter]]:
        """Return the layer and the stacked parameter for each parameter's name in a member."""
        return {
            _key(path, name): (layer, parameter)
            for path, layer in self.stacked_layers()
            for name, parameter in layer.named_parameters(recurse=False)
        }

    def member_tensors(self, index: int) -> dict[str, Tensor]:
        """Return a member's parameters and buffers, as views of the stacked ones, by their names in it."""
        return {name: tensors[index] for name, tensors in self._tensors_by_name().items()}

    def member(self, index: int) -> nn.Module:
        """Return a copy of one member, which shares no memory with the stack."""
        member = copy.deepcopy(self._skeleton[0])
        for name, tensor in self.member_tensors(index).items():
            # fused optimizers of torch 2.15 take a parameter with other strides than its gradient for contiguous
            _set_tensor(member, name, tensor.detach().clone(memory_format=torch.contiguous_format))
        return member.train(self.training)

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run each member on its own rows (n x B, ...): outputs (n, B, ...)."""
        compiling = torch.compiler.is_compiling()
        if not self._checked and not compiling:
            self._compare_with_sequential(inputs)
        if self.reason or not (self._checked or compiling):
            return self._run_sequentially([self._split_rows(value).unbind() for value in inputs])
        return self._split_rows(self.net(*inputs))

    def forward_shared(self, *inputs: Tensor) -> Tensor:
        """Run all members on the same rows (B, ...): outputs (n, B, ...)."""
        n = self.n_members
        if not torch.is_grad_enabled() and len(inputs[0]) * self.n_parameters >= _MIN_SEQUENTIAL_WORK:
            return stack_outputs([view(*inputs) for view in self._member_views()])
        return cast(Tensor, self(*(value.expand(n, *value.shape).flatten(0, 1) for value in inputs)))

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._views = []
        return super()._apply(*args, **kwargs)  # type: ignore[no-untyped-call]

    def _tensors_by_name(self) -> dict[str, tuple[Tensor, ...]]:
        """Return each tensor, cut into those of the members by one operation, whose backward is one as well."""
        cut = {}
        for path, layer in self.stacked_layers():
            for name, tensor in _own_tensors(layer):
                cut[_key(path, name)] = layer.to_stored(name, tensor).unbind()
        return cut

    def _split_rows(self, rows: Tensor) -> Tensor:
        """Return rows (n x B, ...) as (n, B, ...)."""
        return rows.reshape(self.n_members, -1, *rows.shape[1:])  # in half the time of `unflatten`

    def _vary_rows(self, rows: Tensor) -> Tensor:
        """Return rows in another order for each member and, where they are no whole numbers, smaller for each."""
        parts = [part.roll(index, 0) for index, part in enumerate(self._split_rows(rows).unbind())]
        if rows.is_floating_point():
            parts = [part * (1 - index / (2 * self.n_members)) for index, part in enumerate(parts)]
        return torch.cat(parts)

    def _run_sequentially(self, inputs: Sequence[Sequence[Tensor]]) -> Tensor:
        tensors = self._tensors_by_name()
        self._skeleton[0].train(self.training)
        return stack_outputs(
            [
                functional_call(self._skeleton[0], {name: parts[index] for name, parts in tensors.items()}, own)
                for index, own in enumerate(zip(*inputs, strict=True))
            ]
        )

    def _member_views(self) -> list[nn.Module]:
        """Return members that share memory with the stack, made anew where it has moved."""
        first = next(self.net.parameters())
        if not self._views or next(self._views[0].parameters()).data_ptr() != first.data_ptr():
            self._views = list(self)
        if self._views[0].training != self.training:
            for view in self._views:
                view.train(self.training)
        return self._views

    def _compare_with_sequential(self, inputs: Sequence[Tensor]) -> None:
        """Compare with a loop, on rows that differ from member to member, of which mixing would show."""
        differ = len(inputs[0]) > self.n_members or any(value.is_floating_point() for value in inputs)
        if not differ:
            return  # one row of whole numbers: the next batch will tell
        self._checked = True
        with torch.no_grad(), eval_mode(self):
            varied = [self._vary_rows(value) for value in inputs]
            expected = self._run_sequentially([self._split_rows(value).unbind() for value in varied])
            try:
                given = self._split_rows(self.net(*varied))
                off = _describe_difference(given, expected)
            except (RuntimeError, ValueError, IndexError, AttributeError) as error:
                self.reason = f"with stacked layers the model raises {describe_error(error)}"
                return
        if off:
            self.reason = f"the model mixes rows of a batch outside its layers ({off})"


def _stacked(members: Sequence[nn.Module]) -> nn.Module:
    """Return a copy of the first member in which the layers with parameters are stacked."""
    kind = stacked_type(members[0])
    if not isinstance(kind, str):
        return kind(members)
    memo: dict[int, Any] = {}  # what the copy shall not copy
    parts = [dict(member.named_modules()) for member in members]
    for path, part in parts[0].items():
        if _own_tensors(part):
            kind = cast(type[StackedLayer], stacked_type(part))
            memo[id(part)] = kind([part, *(others[path] for others in parts[1:])])
    return copy.deepcopy(members[0], memo)


def _own_tensors(layer: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers that a layer itself holds, by name."""
    return [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]


def _to_meta(member: nn.Module) -> nn.Module:
    """Return a copy that holds the structure and no memory."""
    return copy.deepcopy(member).to("meta")


def _set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, own = name.rpartition(".")
    part = module.get_submodule(path)
    old = getattr(part, own)
    setattr(part, own, nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor)


def _split_state_dict(stack: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Give a stack's state dict the keys and shapes of the members'."""
    cut: dict[str, Tensor] = {}
    for path, layer in stack.stacked_layers():
        for name, _ in _own_tensors(layer):
            stored = state.pop(_key(f"{prefix}net", path, name), None)
            if stored is not None:
                cut[_key(path, name)] = layer.to_stored(name, stored)
    order = stack._skeleton[0].state_dict()
    for index in range(stack.n_members):
        # contiguous, which safetensors asks for
        state.update({f"{prefix}{index}.{name}": cut[name][index].contiguous() for name in order})


def _join_state_dict(stack: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Turn the members' tensors back into the stacked ones."""
    for path, layer in stack.stacked_layers():
        for name, _ in _own_tensors(layer):
            keys = [_key(f"{prefix}{index}", path, name) for index in range(stack.n_members)]
            tensors = [state.pop(key) for key in keys if key in state]
            if len(tensors) == len(keys) and len({tensor.shape for tensor in tensors}) == 1:
                stored = torch.stack([layer.to_stored(name, tensor) for tensor in tensors])
                state[_key(f"{prefix}net", path, name)] = stored


def _key(*parts: str) -> str:
    """Return a qualified name; the path of a module itself is empty."""
    return ".".join(filter(None, parts))


def _describe_difference(given: Tensor, expected: Tensor) -> str:
    if given.shape != expected.shape:
        return f"outputs of shape {tuple(given.shape)} instead of {tuple(expected.shape)}"
    tolerance = _TOLERANCES.get(given.dtype, 0.05)
    given, expected = given.nan_to_num().float(), expected.nan_to_num().float()
    off, largest = (given - expected).abs().max(), expected.abs().max()
    if off > tolerance * largest.clamp(min=1e-6):
        return f"outputs are {off:.2g} off, of {largest:.2g}"
    return ""
