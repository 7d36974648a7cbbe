"""Architectures of many libraries by name, built without values: only names and shapes matter to `align`."""

from __future__ import annotations

import contextlib
import inspect
import logging
import os
import re
import signal
import textwrap
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing is downloaded; read when transformers is imported

import timm
import torch
import torchvision
import transformers
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from tests.checkpoint_remapping.perturbations import Architecture
from tests.small import without_warnings

MAX_PARAMETERS = {"timm": 30, "torchvision": 60}  # in millions; torchvision's models for detection have 40
MAX_TENSORS = 2000
_SECONDS = 120  # for one model


class NotBuiltError(Exception):
    """A model cannot be built without values, or is too large; says why."""


def architectures() -> dict[str, Callable[[], Architecture]]:
    """Return what builds each architecture, by `<library>/<name>`."""
    found: dict[str, Callable[[], nn.Module]] = {
        f"timm/{name}": partial(timm.create_model, name) for name in timm.list_models()
    }
    for name in torchvision.models.list_models():
        if not name.startswith("quantized_"):
            found[f"torchvision/{name}"] = partial(_torchvision, name)
    for name in MODEL_MAPPING_NAMES:
        found[f"transformers/{name}"] = partial(_hugging_face, name)
    found |= {"own/unet": UNet, "own/unet_without_attention": partial(UNet, attention=False)}
    return {name: partial(_described, name, build) for name, build in found.items()}


def _described(name: str, build: Callable[[], nn.Module]) -> Architecture:
    with without_warnings():
        model = _built(build)
    tensors = {n: tensor for n, tensor in model.state_dict(keep_vars=True).items() if isinstance(tensor, torch.Tensor)}
    parameters = sum(tensor.numel() for tensor in {id(p): p for p in model.parameters()}.values())
    library, _, name = name.partition("/")
    if parameters > 10**6 * MAX_PARAMETERS.get(library, 10**6):
        raise NotBuiltError(f"more than {MAX_PARAMETERS[library]} M parameters")
    if len(tensors) > MAX_TENSORS:
        raise NotBuiltError(f"more than {MAX_TENSORS} tensors")
    if len(tensors) < 2:
        raise NotBuiltError("fewer than two tensors")
    once = dict({id(tensor): (n, tensor) for n, tensor in reversed(tensors.items())}.values())  # its first name
    tensors = {n: torch.empty_like(tensor, device="meta") for n, tensor in tensors.items() if n in once}
    learned = {n for n, _ in model.named_parameters(remove_duplicate=False)}
    learned |= {n for n in tensors if n.endswith(("running_mean", "running_var"))}
    kinds = {n: type(module).__name__ for n, module in model.named_modules(remove_duplicate=False)}
    return Architecture(library, name, tensors, kinds, frozenset(learned & tensors.keys()))


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    """Build a model on the meta device or, where it computes with values, its parameters alone there."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"it takes longer than {_SECONDS} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(_SECONDS)
    try:
        with contextlib.suppress(Exception), torch.device("meta"):
            return build()
        with _parameters_without_values():
            return build()
    except NotBuiltError:
        raise
    except Exception as error:  # each model has its own
        reason = textwrap.shorten(str(error).partition(". ")[0], 90, placeholder=" ...")
        raise NotBuiltError(f"{type(error).__name__}: {reason}") from error
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def _parameters_without_values() -> Iterator[None]:
    def moved(_: nn.Module, __: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)

    hook = register_module_parameter_registration_hook(moved)
    try:
        yield
    finally:
        hook.remove()


def _torchvision(name: str) -> nn.Module:
    builder = torchvision.models.get_model_builder(name)
    arguments = {"weights_backbone": None, "init_weights": False}
    known = inspect.signature(builder).parameters
    return builder(weights=None, **{key: value for key, value in arguments.items() if key in known})


# Small sizes, by patterns of the names that configurations have for them
_DEPTHS = r"(num|n)_.*(layers?|blocks)$|(^|_)(layers|n_layer|depth)$"
_SIZES = {
    r"(kv|key_value)_heads$|num_kv_heads": 2,
    r"heads?$": 4,
    r"(intermediate|ffn|inner|mlp).*(size|dim)$|^d_ff$|^ffn_dim$|^n_inner$": 96,
    r"^(hidden_size|d_model|n_embd|embed_dim|hidden_dim|dim|embedding_size|model_dim|emb_dim)$": 48,
    r"^(head_dim|prediction_length)$": 12,
    r"vocab_size$": 301,
    r"max_position_embeddings$|n_positions$": 64,
    r"^(num_experts|n_routed_experts|num_local_experts|moe_num_experts)$": 4,
    r"^(num_experts_per_tok|top_k|moe_k)$": 2,
    _DEPTHS: 3,
}
_NEEDED = ("head_dim", "vocab_size", "prediction_length")  # what is None by default, and may not be


def _hugging_face(name: str) -> nn.Module:
    """Build one of a family: small, else only shallow, else as its configuration is by default."""
    logging.getLogger("transformers").setLevel(logging.CRITICAL)
    kind = transformers.CONFIG_MAPPING[name]
    default = {key: value for key, value in kind().to_dict().items() if key != "model_type"}
    errors = []
    for sizes in (_SIZES, {_DEPTHS: 3}, {}):
        try:
            model = transformers.AutoModel.from_config(kind(**_small(default, sizes)) if sizes else kind())
            if len(model.state_dict()) <= MAX_TENSORS:
                return model
        except Exception as error:  # each family has its own conditions
            errors.append(error)
    raise errors[0] if errors else NotBuiltError(f"more than {MAX_TENSORS} tensors")


def _small(config: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """Return the arguments of a configuration with smaller numbers."""
    small: dict[str, Any] = {}
    for key, value in config.items():
        found = next((size for pattern, size in sizes.items() if re.search(pattern, key)), None)
        if isinstance(value, dict) and (key.endswith("_config") or "model_type" in value):
            small[key] = _small(value, sizes)
        elif found and ((value is None and key in _NEEDED) or (type(value) is int and value > found)):
            small[key] = found
        elif key == "model_type":
            small[key] = value
    return small


# A model of diffusion, named as in diffusers, which the tests do not install


class _Resnet(nn.Module):
    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(4, inside)
        self.conv1 = nn.Conv2d(inside, outside, 3)
        self.time_emb_proj = nn.Linear(128, outside)
        self.norm2 = nn.GroupNorm(4, outside)
        self.conv2 = nn.Conv2d(outside, outside, 3)
        if inside != outside:
            self.conv_shortcut = nn.Conv2d(inside, outside, 1)


class _Attention(nn.Module):
    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.to_q = nn.Linear(width, width, bias=False)
        self.to_k = nn.Linear(context, width, bias=False)
        self.to_v = nn.Linear(context, width, bias=False)
        self.to_out = nn.ModuleList([nn.Linear(width, width), nn.Dropout()])


class _TransformerBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attn1 = _Attention(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.attn2 = _Attention(width, 64)
        self.norm3 = nn.LayerNorm(width)
        self.ff = nn.ModuleDict({"net": nn.ModuleList([nn.Linear(width, 8 * width), nn.Linear(4 * width, width)])})


class _Transformer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.GroupNorm(4, width)
        self.proj_in = nn.Conv2d(width, width, 1)
        self.transformer_blocks = nn.ModuleList([_TransformerBlock(width)])
        self.proj_out = nn.Conv2d(width, width, 1)


class _Level(nn.Module):
    def __init__(self, sizes: list[tuple[int, int]], attention: bool, resample: str) -> None:
        super().__init__()
        width = sizes[-1][1]
        if attention:
            self.attentions = nn.ModuleList(_Transformer(width) for _ in sizes)
        self.resnets = nn.ModuleList(_Resnet(*size) for size in sizes)
        if resample:
            self.add_module(resample, nn.ModuleList([nn.ModuleDict({"conv": nn.Conv2d(width, width, 3)})]))


class UNet(nn.Module):
    def __init__(self, attention: bool = True) -> None:
        super().__init__()
        self.conv_in = nn.Conv2d(4, 32, 3)
        self.time_embedding = nn.ModuleDict({"linear_1": nn.Linear(32, 128), "linear_2": nn.Linear(128, 128)})
        self.down_blocks = nn.ModuleList([
            _Level([(32, 32), (32, 32)], attention, "downsamplers"),
            _Level([(32, 64), (64, 64)], attention, "downsamplers"),
            _Level([(64, 64), (64, 64)], False, ""),
        ])  # fmt: skip
        self.up_blocks = nn.ModuleList([
            _Level([(128, 64), (128, 64), (128, 64)], False, "upsamplers"),
            _Level([(128, 64), (128, 64), (96, 64)], attention, "upsamplers"),
            _Level([(96, 32), (64, 32), (64, 32)], attention, ""),
        ])  # fmt: skip
        self.mid_block = _Level([(64, 64), (64, 64)], attention, "")
        self.conv_norm_out = nn.GroupNorm(4, 32)
        self.conv_out = nn.Conv2d(32, 4, 3)
