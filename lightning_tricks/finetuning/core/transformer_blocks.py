"""Find the blocks of a transformer: where the output of an attention, and of a feed-forward network, is computed."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.nn.parameter import is_lazy

from lightning_tricks.finetuning.core.lora_layers import is_transposed_linear

_ATTENTION = re.compile(r"(attn|attention)\d*$", re.IGNORECASE)  # what the name of an attention ends in
_OUTPUTS = ("out_proj", "o_proj", "c_proj", "proj", "output.dense", "out_lin", "dense", "o", "Wo", "to_out.0")
_FEED_FORWARDS = (  # the layer that takes the input, and that which gives the output
    ("linear1", "linear2"),  # torch
    ("fc1", "fc2"),  # timm; OPT, BART, CLIP, ViT
    ("fc1_g", "fc2"),  # timm's SwiGLU
    ("intermediate.dense", "output.dense"),  # BERT, RoBERTa, Swin
    ("c_fc", "c_proj"),  # GPT-2
    ("gate_proj", "down_proj"),  # Llama, Mistral, Qwen, Gemma
    ("gate_up_proj", "down_proj"),  # Phi-3
    ("up_proj", "down_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),  # GPT-NeoX, BLOOM, Falcon
    ("fc_in", "fc_out"),  # GPT-J
    ("intermediate_dense", "output_dense"),  # wav2vec 2.0
    ("ffn", "ffn_output"),  # ALBERT
    ("lin1", "lin2"),  # DistilBERT, SAM
    ("wi", "wo"),  # T5
    ("wi_0", "wo"),
    ("Wi", "Wo"),  # ModernBERT
    ("w1", "w2"),  # DINOv2's SwiGLU, Llama's own code
)
_FEED_FORWARD = re.compile(r"^(mlp|ffn?|feed_?forward)$", re.IGNORECASE)  # the name of an nn.Sequential that is one


def find_blocks(modules: Mapping[str, nn.Module]) -> tuple[list[str], dict[str, str]]:
    """Find the sublayers of transformer blocks by structure and names.

    A block is a module that has a feed-forward network and an attention, but not inside another block. Other pairs of
    linear layers, as those of a head, do not count.

    Args:
        modules: All modules of a model by qualified name.

    Returns:
        The names of the modules that give the outputs of attentions; and name of the layer that gives the output of a
        feed-forward network -> the layer that takes its input.
    """
    found = {name: output for name, part in modules.items() if (output := _attention_output(name, part, modules))}
    attentions = list(found.values())
    inside = tuple(f"{name}." for name in found)  # where a network computes a bias of positions
    outside = [name for name in ("", *modules) if not f"{name}.".startswith(inside)]
    feed_forwards = {last: first for name in outside for first, last in _feed_forwards(name, modules)}
    around = {last: _common_module(last, attentions) for last in feed_forwards}
    blocks = {block for block in around.values() if block is not None}
    blocks = {block for block in blocks if not any(_lies_in(other, block) for other in blocks)}
    return (
        [name for name in attentions if any(_lies_in(name, block) for block in blocks)],
        {last: first for last, first in feed_forwards.items() if around[last] in blocks},
    )


def widths_of(module: nn.Module) -> tuple[int, int] | None:
    """Return the widths of the inputs and outputs of a linear layer or an attention; None for other modules.

    Raises:
        ValueError: If the layer is lazy, and has no shape yet.
    """
    layer: Any = module
    if isinstance(module, nn.MultiheadAttention):
        return module.embed_dim, module.embed_dim
    if reads_weights_of_its_parts(module):
        return layer.proj.in_features, layer.proj.out_features
    is_transposed = is_transposed_linear(module)
    if not is_transposed and not isinstance(module, nn.Linear):
        return None
    if is_lazy(layer.weight):
        raise ValueError(f"a {type(module).__name__} has no shape yet: run a batch through the model first.")
    return tuple(layer.weight.shape) if is_transposed else (layer.in_features, layer.out_features)


def reads_weights_of_its_parts(module: nn.Module) -> bool:
    """Whether a module is an attention that never calls its output projection."""
    swin: Any = sys.modules.get("torchvision.models.swin_transformer")
    return isinstance(module, (nn.MultiheadAttention, *([swin.ShiftedWindowAttention] if swin else [])))


def _attention_output(name: str, module: nn.Module, modules: Mapping[str, nn.Module]) -> str | None:
    if reads_weights_of_its_parts(module):
        return name
    if not _ATTENTION.search(name):
        return None
    return next((found for part in _OUTPUTS if _is_linear(modules.get(found := f"{name}.{part}"))), None)


def _feed_forwards(name: str, modules: Mapping[str, nn.Module]) -> list[tuple[str, str]]:
    pairs = [(f"{name}.{first}".lstrip("."), f"{name}.{last}".lstrip(".")) for first, last in _FEED_FORWARDS]
    if _FEED_FORWARD.match(name.rpartition(".")[2]) and isinstance(modules[name], nn.Sequential):
        linear = [f"{name}.{child}" for child, part in modules[name].named_children() if _is_linear(part)]
        pairs += [(linear[0], linear[-1])] if len(linear) > 1 else []
    for first, last in pairs:
        of_first, of_last = (
            widths_of(modules[part]) if _is_linear(modules.get(part)) else None for part in (first, last)
        )
        if of_first and of_last and of_first[0] == of_last[1]:
            return [(first, last)]
    return []


def _is_linear(module: nn.Module | None) -> bool:
    return module is not None and not reads_weights_of_its_parts(module) and widths_of(module) is not None


def _common_module(name: str, others: list[str]) -> str | None:
    """Return the smallest module with a named one and one of the others; "" is the model, None that there is none."""
    while name:
        name = name.rpartition(".")[0]
        if any(_lies_in(other, name) for other in others):
            return name
    return None


def _lies_in(name: str, module: str) -> bool:
    return name != module and (not module or name.startswith(f"{module}."))
