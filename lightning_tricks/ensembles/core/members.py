"""The members of an ensemble as one module: the interface of all containers of members, and members that run in turn.

All containers have the same state dict, that of a `ModuleList` of the members, so that each can load the files of the
others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._shared.tensors import named_tensors


class Members(nn.Module):
    """Members of an ensemble: n modules that take the same inputs.

    Attributes:
        reason: Why they do not run at once, where that was asked for or could have been.
    """

    reason = ""

    def __len__(self) -> int:
        raise NotImplementedError

    def __getitem__(self, index: int) -> nn.Module:
        """Return a member: itself if members run one after another, or else one that shares memory with it."""
        return self.member(range(len(self))[index])

    def __iter__(self) -> Iterator[nn.Module]:
        return (self[index] for index in range(len(self)))

    def member(self, index: int) -> nn.Module:
        """Return one member as a separate module: itself if members run one after another, or else a copy."""
        raise NotImplementedError

    def running_modules(self) -> list[nn.Module]:
        """Return the modules that `forward` calls, whose rows are those of the members one after another."""
        return list(self.children())

    def member_tensors(self, index: int) -> dict[str, Tensor]:
        """Return a member's parameters and buffers by their names in it; they share memory with it."""
        raise NotImplementedError

    @torch.no_grad()
    def copy_member_(self, index: int, values: Mapping[str, Tensor]) -> None:
        """Give a member the values of tensors by their names in it, such as those of another member."""
        for name, tensor in self.member_tensors(index).items():
            tensor.copy_(values[name])

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run each member on its own rows.

        Args:
            *inputs: Rows of the members one after another, (n x B, ...).

        Returns:
            Outputs of shape (n, B, ...).
        """
        raise NotImplementedError

    def forward_shared(self, *inputs: Tensor) -> Tensor:
        """Run all members on the same rows.

        Args:
            *inputs: The inputs of one batch, each of shape (B, ...).

        Returns:
            Outputs of shape (n, B, ...).
        """
        raise NotImplementedError


class SequentialMembers(Members):
    """Members that run one after another; they may be of different structure.

    Args:
        members: At least one.
        reason: Why they are not stacked, or nothing.
    """

    def __init__(self, members: Sequence[nn.Module], reason: str = "") -> None:
        super().__init__()
        self.reason = reason
        self.n_members = len(members)
        for index, member in enumerate(members):
            self.add_module(str(index), member)

    def __len__(self) -> int:
        return self.n_members

    def member(self, index: int) -> nn.Module:
        """Return one member, itself."""
        return self.get_submodule(str(index))

    def only(self, indices: Sequence[int]) -> SequentialMembers:
        """Return some of the members, themselves, as a container of their own."""
        return SequentialMembers([self.member(index) for index in indices])

    def member_tensors(self, index: int) -> dict[str, Tensor]:
        """Return a member's parameters and buffers by their names in it."""
        return named_tensors(self.member(index))

    def forward(self, *inputs: Tensor) -> Tensor:
        """Run each member on its own rows (n x B, ...): outputs (n, B, ...)."""
        rows = [value.unflatten(0, (len(self), -1)).unbind() for value in inputs]
        return stack_outputs([member(*own) for member, *own in zip(self.children(), *rows, strict=True)])

    def forward_shared(self, *inputs: Tensor) -> Tensor:
        """Run all members on the same rows (B, ...): outputs (n, B, ...)."""
        return stack_outputs([member(*own_inputs(inputs)) for member in self.children()])


def own_inputs(inputs: Sequence[Any]) -> list[Any]:
    """Return copies of inputs that several members share: a member may change its inputs in place."""
    return [value.clone() if isinstance(value, Tensor) else value for value in inputs]


def refuse_lazy(members: Sequence[nn.Module], argument: str = "estimator") -> None:
    """Refuse members whose parameters have no shape yet, where their values are copied or frozen before a first call.

    Raises:
        ValueError: If there is one.
    """
    for index, member in enumerate(members):
        if any(nn.parameter.is_lazy(value) for value in member.parameters()):
            where = f"{argument}[{index}]" if len(members) > 1 else argument
            raise ValueError(f"{where} has lazy layers, which have no shape yet: run it once before.")


def stack_outputs(outputs: Sequence[Any]) -> Tensor:
    """Stack the outputs of members, (n, B, ...).

    Raises:
        TypeError: If members return something else than a tensor.
        ValueError: If their outputs differ in shape.
    """
    first = outputs[0]
    if not isinstance(first, Tensor):
        raise TypeError(
            f"members must return a tensor, got {type(first).__name__}: wrap the model in a module with a "
            "forward that returns only the logits or predictions."
        )
    if any(output.shape != first.shape for output in outputs):
        shapes = ", ".join(str(tuple(output.shape)) for output in outputs)
        raise ValueError(f"members must return outputs of one shape, got {shapes}.")
    return torch.stack(list(outputs))
