"""Members whose parameters are stacked, so that all of them run at once."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from lightning_tricks.ensembles.core.comparison import compare_with_loop, place_tensors
from lightning_tricks.ensembles.core.members import Members, SequentialMembers, own_inputs, stack_outputs
from lightning_tricks.ensembles.core.same_values import different_attributes
from lightning_tricks.ensembles.core.stacked_layers import StackedLayer, own_tensors, stacked_type

# rows x parameters of a member, from which on a call for each member costs nothing beside its work
_MIN_SEQUENTIAL_WORK = 10_000_000


class StackedMembers(Members):
    """Members of one structure that run at once, as one module whose layers hold the parameters of all.

    The first call in training, and that in evaluation, is compared with the members one after another: a model that
    mixes rows of a batch outside its layers (`x - x.mean(0)`, the batch in another dimension) gives something else, and
    runs as a loop over the stacked parameters from then on.

    Args:
        members: Modules for which `why_not_stack` returns an empty string.

    Attributes:
        compared: The modes that were compared: of training, and of gradients.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.n_members = len(members)
        self.net = _stacked(members)
        # copies without memory; in a list, so that they are not children
        self.skeletons = [copy.deepcopy(member).to("meta") for member in members]
        self._views: dict[int, nn.Module] = {}  # the members that were handed out
        self._shown: dict[str, bool] = {}  # which parameters these trained at first
        self._is_released = True
        self.n_parameters = sum(parameter.numel() for parameter in members[0].parameters())
        self.compared: set[tuple[bool, bool]] = set()
        self.register_state_dict_post_hook(_split_state_dict)  # type: ignore[no-untyped-call]
        self.register_load_state_dict_pre_hook(_join_state_dict)  # type: ignore[no-untyped-call]

    def __len__(self) -> int:
        return self.n_members

    def __getstate__(self) -> dict[str, Any]:
        self.release()
        return {**self.__dict__, "_views": {}}

    def __getitem__(self, index: int) -> nn.Module:
        """Return a member as a module that shares memory with the stack, the same one each time.

        Freezing its parameters takes effect when a fit starts (`adopt_frozen_parameters`).
        """
        index = range(len(self))[index]
        self._update_views()
        view = self._views.get(index)
        if view is None:
            view = self._views[index] = self._as_in_stack(self._copied_skeleton(index))
        first = next(view.parameters())
        if first.is_meta or first.data_ptr() != next(self.net.parameters())[index].data_ptr():  # new, or has moved
            for name, tensor in self.member_tensors(index).items():
                _set_tensor(view, name, tensor.detach())
        return self.in_mode(view)

    def adopt_frozen_parameters(self) -> str:
        """Freeze the parameters that are frozen in the members that `__getitem__` has returned, and train the others.

        Returns:
            Why members cannot be trained at once, if they train different parameters, or nothing.
        """
        self._update_views()
        flags = {name: {parameter.requires_grad} for name, parameter in self.net.named_parameters()}
        if self._views:
            members = [self._views.get(index, self.net) for index in range(len(self))]
            flags = {name: {member.get_parameter(name).requires_grad for member in members} for name in flags}
        for name, found in flags.items():
            if len(found) > 1:
                return f"{name} is frozen in some members and trained in others"
        for name, parameter in self.net.named_parameters():
            parameter.requires_grad_(flags[name].pop())
            self._shown[name] = parameter.requires_grad
        return ""

    def _update_views(self) -> None:
        """Freeze in the members that were handed out the parameters that were frozen in the stack since."""
        flags = {name: parameter.requires_grad for name, parameter in self.net.named_parameters()}
        for name in (name for name, flag in flags.items() if self._shown.get(name, flag) != flag):
            for view in self._views.values():
                view.get_parameter(name).requires_grad_(flags[name])
        self._shown = flags

    def stacked_tensors(self) -> Iterator[tuple[str, StackedLayer, str, Tensor]]:
        """Yield the stacked parameters and buffers: the name in a member, the layer, the name there, and the tensor."""
        for path, layer in self.net.named_modules():
            if isinstance(layer, StackedLayer):
                yield from ((f"{path}.{name}".lstrip("."), layer, name, tensor) for name, tensor in own_tensors(layer))

    def member_tensors(self, index: int) -> dict[str, Tensor]:
        """Return a member's parameters and buffers, as views of the stacked ones, by their names in it."""
        return {name: tensors[index] for name, tensors in self.tensors_by_name().items()}

    def member(self, index: int) -> nn.Module:
        """Return a copy of one member, which shares no memory with the stack."""
        member = self._copied_skeleton(index)
        for name, tensor in self.member_tensors(index).items():
            # fused optimizers of torch 2.15 take a parameter with other strides than its gradient for contiguous
            _set_tensor(member, name, tensor.detach().clone(memory_format=torch.contiguous_format))
        return self._as_in_stack(member, self._views.get(index))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run each member on its own rows (n x B, ...): outputs (n, B, ...)."""
        if not torch.compiler.is_compiling():
            self.compare(*inputs)
        if self._runs_at_once:
            return self.split_rows(self.net(*inputs))
        return self._run_sequentially(list(zip(*(self.split_rows(value).unbind() for value in inputs), strict=True)))

    def running_modules(self) -> list[nn.Module]:
        """Return the modules that `forward` calls: the one for all members, or else one for each."""
        return [self.net] if self._runs_at_once else self.skeletons

    def forward_shared(self, *inputs: Tensor) -> Tensor:
        """Run all members on the same rows (B, ...): outputs (n, B, ...)."""
        if self._is_loop_for(inputs):
            return self._run_sequentially([own_inputs(inputs) for _ in range(len(self))])
        return cast(Tensor, self(*self._repeated(inputs)))

    @property
    def is_compared(self) -> bool:
        """Whether members were compared in the present mode."""
        return (self.training, torch.is_grad_enabled()) in self.compared

    @property
    def _runs_at_once(self) -> bool:
        return self.is_compared and not self.reason

    def compare(self, *inputs: Tensor, shared: bool = False) -> None:
        """Run copies at once and one after another, where that was not done in this mode, and set `reason`.

        Args:
            *inputs: The arguments of `forward`; or, if `shared`, of `forward_shared`.
            shared: Whether members have the same rows.
        """
        if self.reason or self.is_compared or (shared and self._is_loop_for(inputs)):
            return
        reason = compare_with_loop(self, self._repeated(inputs) if shared else inputs)
        if reason is not None:
            self.compared.add((self.training, torch.is_grad_enabled()))
            self.reason = reason

    def tensors_by_name(self) -> dict[str, tuple[Tensor, ...]]:
        """Return each tensor, cut into those of the members by one operation, whose backward is one as well."""
        return {key: layer.to_stored(name, tensor).unbind() for key, layer, name, tensor in self.stacked_tensors()}

    def split_rows(self, rows: Tensor) -> Tensor:
        """Return rows (n x B, ...) as (n, B, ...)."""
        return rows.reshape(self.n_members, -1, *rows.shape[1:])  # in half the time of `unflatten`

    def _repeated(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Return rows (B, ...) once for each member, (n x B, ...)."""
        return [value.expand(self.n_members, *value.shape).flatten(0, 1) for value in inputs]

    def _is_loop_for(self, inputs: Sequence[Tensor]) -> bool:
        """Whether members run one after another on the same rows, because there are many, or none."""
        rows = inputs[0].shape[0]  # a symbol in `torch.export`, which `len` would make a number
        return rows == 0 or (not torch.is_grad_enabled() and rows * self.n_parameters >= _MIN_SEQUENTIAL_WORK)

    def in_mode(self, member: nn.Module) -> nn.Module:
        """Give the parts of a member the modes and the Trainer that they have in the stack."""
        for path, part in self.net.named_modules():
            own = member.get_submodule(path)
            own.training = part.training
            if "_trainer" in vars(part):  # of a LightningModule, which no copy of it holds
                vars(own)["_trainer"] = vars(part)["_trainer"]
        return member

    def _as_in_stack(self, member: nn.Module, like: nn.Module | None = None) -> nn.Module:
        """Let the parts of a member have the modes, and its parameters the gradients, that they have in the stack."""
        for name, parameter in (like or self.net).named_parameters():
            member.get_parameter(name).requires_grad_(parameter.requires_grad)
        return self.in_mode(member)

    def _run_sequentially(self, inputs: Sequence[Sequence[Tensor]]) -> Tensor:
        """Run each member on its own inputs; it keeps its tensors until `release`, as it may be run again backwards."""
        tensors, outputs = self.tensors_by_name(), []
        self._is_released = False
        for index, (skeleton, own) in enumerate(zip(self.skeletons, inputs, strict=True)):
            place_tensors(self.in_mode(skeleton), {name: parts[index] for name, parts in tensors.items()})
            if "log" in vars(self.net):  # that of the ensemble
                vars(skeleton)["log"] = vars(self.net)["log"]
            outputs.append(skeleton(*own))
        if not torch.is_grad_enabled():
            self.release()
        return stack_outputs(outputs)

    def release(self) -> None:
        """Let the skeletons hold no tensors of the stack any more; to be called after the backward pass."""
        if self._is_released:
            return
        self._is_released = True
        for skeleton in self.skeletons:
            for part in skeleton.modules():
                vars(part).pop("log", None)
            empty: dict[str, Tensor] = {
                name: nn.Parameter(torch.empty_like(value, device="meta"), value.requires_grad)
                for name, value in skeleton.named_parameters(remove_duplicate=False)
            }
            buffers = skeleton.named_buffers(remove_duplicate=False)
            empty |= {name: torch.empty_like(value, device="meta") for name, value in buffers}
            place_tensors(skeleton, empty)

    def _copied_skeleton(self, index: int) -> nn.Module:
        self.release()
        return copy.deepcopy(self.skeletons[index])


def _stacked(members: Sequence[nn.Module]) -> nn.Module:
    """Return a copy of the first member in which the layers with parameters are stacked."""
    kind = stacked_type(members[0])
    if not isinstance(kind, str):
        return kind(members)
    memo: dict[int, Any] = {}  # stacked layers, which take the places of those of the first member
    parts = [dict(member.named_modules()) for member in members]
    for path, part in parts[0].items():
        if own_tensors(part):
            kind = cast(type[StackedLayer], stacked_type(part))
            memo[id(part)] = kind([part, *(others[path] for others in parts[1:])])
    return copy.deepcopy(members[0], memo)


def _set_tensor(module: nn.Module, name: str, tensor: Tensor) -> None:
    path, _, own = name.rpartition(".")
    part = module.get_submodule(path)
    old = getattr(part, own)
    setattr(part, own, nn.Parameter(tensor, old.requires_grad) if isinstance(old, nn.Parameter) else tensor)


def _split_state_dict(stack: Any, state: dict[str, Any], prefix: str, metadata: Any) -> None:
    """Give a stack's state dict the keys and shapes of the members'."""
    cut: dict[str, Tensor] = {}
    for key, layer, name, _ in stack.stacked_tensors():
        stored = state.pop(f"{prefix}net.{key}", None)
        if stored is not None:
            cut[key] = layer.to_stored(name, stored)
    order = stack.skeletons[0].state_dict()
    for index in range(stack.n_members):
        # contiguous, which safetensors asks for
        state.update({f"{prefix}{index}.{name}": cut[name][index].contiguous() for name in order})


def _join_state_dict(stack: Any, state: dict[str, Any], prefix: str, *args: Any) -> None:
    """Turn the members' tensors back into the stacked ones."""
    for key, layer, name, _ in stack.stacked_tensors():
        keys = [f"{prefix}{index}.{key}" for index in range(stack.n_members)]
        tensors = [state.pop(own) for own in keys if own in state]
        if len(tensors) == len(keys) and len({tensor.shape for tensor in tensors}) == 1:
            state[f"{prefix}net.{key}"] = torch.stack([layer.to_stored(name, tensor) for tensor in tensors])


def as_members(members: Sequence[nn.Module], vectorize: bool | str = "auto", why_not: str = "") -> Members:
    """Put members into the module that runs them faster.

    Args:
        members: At least one.
        vectorize: "auto" stacks members that gain by it: members of one structure without convolutions, for which a
            loop is faster on a CPU. True stacks all members that can be stacked, False none.
        why_not: A reason against stacking that the members themselves do not show.

    Returns:
        A `StackedMembers`, or a `SequentialMembers` that bears the reason.
    """
    if vectorize is False or len(members) == 1:
        return SequentialMembers(members)
    reason = why_not or why_not_stack(members)
    if not reason and vectorize == "auto":
        kinds = map(stacked_type, members[0].modules())
        if any(not isinstance(kind, str) and kind.sequential_is_faster_on_cpu for kind in kinds):
            return SequentialMembers(members, "separate convolutions are faster than one for all members")
    return SequentialMembers(members, reason) if reason else StackedMembers(members)


def as_sequential(members: Members, reason: str = "") -> SequentialMembers:
    """Return the same members, with their values, to be run one after another."""
    if isinstance(members, SequentialMembers):
        return members
    return SequentialMembers([members.member(index) for index in range(len(members))], reason)


def why_not_stack(members: Sequence[nn.Module]) -> str:
    """Return why members cannot be stacked, or nothing.

    They must be of one structure, and all their parameters in layers that have a stacked form.
    """
    first, *others = members
    names = [name for name, _ in first.named_parameters(remove_duplicate=False)]
    if len(names) != len(list(first.parameters())):
        return "layers share a parameter"
    if not names:
        return "the members have no parameters"
    for path, module in first.named_modules():
        where = f" ({path})" if path else ""
        if any(getattr(module, hooks) for hooks in _HOOKS):
            return f"{type(module).__name__} has hooks{where}"
        if own_tensors(module) and isinstance(kind := stacked_type(module), str):
            return f"{kind}{where}"
    for index, other in enumerate(others, start=1):
        difference = _different_structure(first, other)
        if difference is not None:
            return f"member {index} has another structure than member 0{difference}"
    parameters = [id(value) for member in members for _, value in member.named_parameters(remove_duplicate=False)]
    return "members share a parameter" if len(set(parameters)) < len(parameters) else ""


_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def _different_structure(first: nn.Module, other: nn.Module) -> str | None:
    """Return where modules have other types, options, shapes, or other parameters that are trained; None if nowhere."""
    parts, others = ([*module.named_modules()] for module in (first, other))
    if [(path, type(part)) for path, part in parts] != [(path, type(part)) for path, part in others]:
        return ""
    counterparts = {(id(part), id(same)) for (_, part), (_, same) in zip(parts, others, strict=True)}
    for (path, part), (_, same) in zip(parts, others, strict=True):
        if _tensors(part) != _tensors(same):
            return f" ({path})" if path else ""
        for name in different_attributes(part, same, counterparts):
            return f" ({path}.{name})" if path else f" ({name})"
    return None


def _tensors(part: nn.Module) -> list[Any]:
    return [
        (name, None if nn.parameter.is_lazy(tensor) else tensor.shape, tensor.dtype, tensor.requires_grad)
        for name, tensor in own_tensors(part)
    ]
