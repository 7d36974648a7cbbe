"""The weights and buffers of a module, and how they are put back."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks._shared.tensors import local_part, named_tensors, outside_inference_mode


def weights_and_buffers(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of a module, also those that no state dict has.

    Args:
        module: The module; what FSDP2 has gathered of it is freed.

    Returns:
        Name -> the tensor itself, without gradients. Of a DTensor it is the part that this rank holds. Parameters that
        are not initialized yet are left out.
    """
    tensors = named_tensors(module).items()
    return {name: local_part(tensor.detach()) for name, tensor in tensors if not is_lazy(tensor)}


def put_back_(module: nn.Module, kept: Mapping[str, Tensor]) -> list[str]:
    """Copy weights and buffers back into a module, if it still has all of them and no others.

    A buffer may have got another size.

    Args:
        module: The module that is changed in place.
        kept: Copies of what `weights_and_buffers` returned, on any device.

    Returns:
        The names that only one side has, and those of weights of another shape; nothing is changed if there are any.

    Examples:
        >>> layer = nn.Linear(2, 1)
        >>> kept = {name: tensor.clone() for name, tensor in weights_and_buffers(layer).items()}
        >>> _ = nn.init.zeros_(layer.weight)
        >>> put_back_(layer, kept), bool(layer.weight.any())
        ([], True)
    """
    with outside_inference_mode():
        now = weights_and_buffers(module)
        buffers = dict(module.named_buffers())
        differing = [name for name in {**kept, **now} if (name in kept) is not (name in now)]
        differing += [n for n, t in now.items() if n in kept and n not in buffers and t.shape != kept[n].shape]
        for name, tensor in now.items() if not differing else ():
            is_expanded = tensor.layout is torch.strided and 0 in tensor.stride()  # no memory for each value
            if name in buffers and (is_expanded or tensor.shape != kept[name].shape):
                buffers[name].data = kept[name].to(tensor.device)
            else:
                tensor.copy_(kept[name])
    return differing
