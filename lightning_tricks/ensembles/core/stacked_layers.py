"""Layers that hold the parameters of several members, stacked, and run all of them in one call.

Activations keep their usual shape, the members' rows one after another: (n x B, ...), first those of member 0. To
everything without parameters that is a batch like any other, so that a model's own `forward` runs as it is.

Source: Wen et al., arXiv 2002.06715, for the idea that one call serves all members.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional


def own_tensors(layer: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the parameters and buffers that a layer itself holds, by name."""
    return [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]


class StackedLayer(nn.Module):
    """The same layer of n members: their parameters and buffers, stacked along a new first dimension.

    Args:
        layers: The layers to stack, one of each member.
    """

    layer_types: tuple[type[nn.Module], ...] = ()
    sequential_is_faster_on_cpu = False  # a loop is faster there
    transposed: tuple[str, ...] = ()  # stored as (n, columns, rows)
    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, layers: Sequence[Any]) -> None:
        super().__init__()
        self.n_members = len(layers)
        self.layer = [copy.deepcopy(layers[0]).to("meta")]  # its options; in a list, so that it is not a child
        with torch.no_grad():
            for name, parameter in layers[0].named_parameters(recurse=False):
                stacked = torch.stack([self.to_stored(name, getattr(layer, name)) for layer in layers])
                self.register_parameter(name, nn.Parameter(stacked, requires_grad=parameter.requires_grad))
            for name, _ in layers[0].named_buffers(recurse=False):
                stacked = torch.stack([getattr(layer, name) for layer in layers])
                self.register_buffer(name, stacked, persistent=name in layers[0].state_dict())
        for name in ("weight", "bias"):
            if not hasattr(self, name):
                self.register_parameter(name, None)

    @classmethod
    def why_not_stack(cls, layer: Any) -> str:
        """Return why layers like this one cannot be stacked, or nothing."""
        return ""

    def to_stored(self, name: str, tensor: Tensor) -> Tensor:
        """Turn a member's tensor into the form in which it is stored, or back."""
        return tensor.mT if name in self.transposed else tensor

    def run_each(self, rows: Tensor) -> Tensor:
        """Run the layers one after another, each on its member's rows, with the same result as `forward`."""
        tensors = {name: self.to_stored(name, tensor).unbind() for name, tensor in own_tensors(self)}
        layer = self.layer[0].train(self.training)
        parts = enumerate(self.by_member(rows))
        return torch.cat(
            [functional_call(layer, {name: cut[index] for name, cut in tensors.items()}, part) for index, part in parts]
        )

    def by_member(self, rows: Tensor) -> Tensor:
        """Return the rows as (n, B, ...)."""
        return rows.reshape(self.n_members, -1, *rows.shape[1:])

    def rescaled(self, normal: Tensor, shape: Sequence[int]) -> Tensor:
        """Return normalised rows times the weights plus the biases, where there are any, in a shape (n, ...)."""
        if self.weight is None:
            return normal
        shift = 0.0 if self.bias is None else self.bias.view(shape)
        return (self.by_member(normal) * self.weight.view(shape) + shift).flatten(0, 1)

    def as_channels(self, rows: Tensor) -> Tensor:
        """Return rows (n x B, C, ...) as (B, n x C, ...): the members' channels side by side."""
        return self.by_member(rows).transpose(0, 1).flatten(1, 2)

    def from_channels(self, channels: Tensor) -> Tensor:
        """Return (B, n x C, ...) as rows (n x B, C, ...)."""
        by_member = channels.reshape(len(channels), self.n_members, -1, *channels.shape[2:])
        return by_member.transpose(0, 1).flatten(0, 1)

    def extra_repr(self) -> str:
        """Return the number of members and the layer, for `repr`."""
        return f"{self.n_members} x {self.layer[0]}"


class StackedLinear(StackedLayer):
    """`nn.Linear` of n members, as one batched matrix product; weight (n, in, out), whose gradient needs no copy."""

    layer_types = (nn.Linear,)
    transposed = ("weight",)

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows (n x B, ..., in) to (n x B, ..., out)."""
        weight = cast(Tensor, self.weight)
        inputs = rows.reshape(self.n_members, -1, rows.shape[-1])
        if self.bias is None:
            outputs = torch.bmm(inputs, weight)
        else:
            outputs = torch.baddbmm(self.bias.unsqueeze(1), inputs, weight)
        return outputs.view(*rows.shape[:-1], -1)


class StackedConv(StackedLayer):
    """`nn.Conv1d`, `nn.Conv2d` or `nn.Conv3d` of n members, as one grouped convolution."""

    layer_types = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
    sequential_is_faster_on_cpu = True

    @classmethod
    def why_not_stack(cls, layer: Any) -> str:
        """Return why layers like this one cannot be stacked, or nothing."""
        return "" if layer.padding_mode == "zeros" else f"its padding_mode is {layer.padding_mode!r}"

    def forward(self, rows: Tensor) -> Tensor:
        """Map rows (n x B, C, ...) to (n x B, channels, ...)."""
        layer, weight = self.layer[0], cast(Tensor, self.weight)
        convolution: Callable[..., Tensor] = getattr(functional, f"conv{weight.ndim - 3}d")
        bias = None if self.bias is None else self.bias.flatten()
        groups = self.n_members * layer.groups
        channels = self.as_channels(rows)
        return self.from_channels(
            convolution(channels, weight.flatten(0, 1), bias, layer.stride, layer.padding, layer.dilation, groups)
        )


class StackedBatchNorm(StackedLayer):
    """`nn.BatchNorm1d`, `2d` or `3d` of n members: statistics of each member's own rows."""

    layer_types = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)

    @classmethod
    def why_not_stack(cls, layer: Any) -> str:
        """Return why layers like this one cannot be stacked, or nothing."""
        return "" if layer.momentum is not None else "its momentum is None, a cumulative average"

    def forward(self, rows: Tensor) -> Tensor:
        """Normalise rows (n x B, C, ...)."""
        layer = self.layer[0]
        tracked = layer.track_running_stats
        if self.training and tracked:
            cast(Tensor, self.num_batches_tracked).add_(1)
        parts = (self.running_mean, self.running_var) if tracked else (None, None)
        mean, var, weight, bias = (
            None if part is None else cast(Tensor, part).view(-1) for part in (*parts, self.weight, self.bias)
        )
        by_batch = self.training or not tracked
        return self.from_channels(
            functional.batch_norm(self.as_channels(rows), mean, var, weight, bias, by_batch, layer.momentum, layer.eps)
        )


class StackedLayerNorm(StackedLayer):
    """`nn.LayerNorm` of n members."""

    layer_types = (nn.LayerNorm,)

    def forward(self, rows: Tensor) -> Tensor:
        """Normalise the last dimensions of rows (n x B, ...)."""
        shape = self.layer[0].normalized_shape
        normal = functional.layer_norm(rows, shape, eps=self.layer[0].eps)
        return self.rescaled(normal, (self.n_members, *[1] * (rows.ndim - len(shape)), *shape))


class StackedGroupNorm(StackedLayer):
    """`nn.GroupNorm` of n members."""

    layer_types = (nn.GroupNorm,)

    def forward(self, rows: Tensor) -> Tensor:
        """Normalise groups of channels of rows (n x B, C, ...)."""
        normal = functional.group_norm(rows, self.layer[0].num_groups, eps=self.layer[0].eps)
        return self.rescaled(normal, (self.n_members, 1, -1, *[1] * (rows.ndim - 2)))


class StackedEmbedding(StackedLayer):
    """`nn.Embedding` of n members, as one table."""

    layer_types = (nn.Embedding,)

    @classmethod
    def why_not_stack(cls, layer: Any) -> str:
        """Return why layers like this one cannot be stacked, or nothing."""
        options = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False}
        return ", ".join(f"it has {name}" for name, off in options.items() if getattr(layer, name) not in (off, None))

    def forward(self, rows: Tensor) -> Tensor:
        """Look up indices (n x B, ...)."""
        weight = cast(Tensor, self.weight)
        first = torch.arange(0, weight[..., 0].numel(), weight.shape[1], device=rows.device)
        indices = self.by_member(rows) + first.view(-1, *[1] * rows.ndim)
        return functional.embedding(indices.flatten(0, 1), weight.flatten(0, 1))


_STACKED: Mapping[type[nn.Module], type[StackedLayer]] = {
    layer_type: stacked for stacked in StackedLayer.__subclasses__() for layer_type in stacked.layer_types
}


def stacked_type(layer: nn.Module) -> type[StackedLayer] | str:
    """Return the class that stacks layers of this one's type, or why they cannot be stacked."""
    kind = _STACKED.get(type(layer))
    if kind is None:
        return f"{type(layer).__name__} has no stacked form"
    reason = kind.why_not_stack(layer)
    return f"{type(layer).__name__}: {reason}" if reason else kind
