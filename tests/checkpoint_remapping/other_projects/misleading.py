"""Networks whose projects use one number, or one word, for different parts: what is written is no evidence there."""

from __future__ import annotations

from types import SimpleNamespace as Part
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.checkpoint_remapping.other_projects.small import IMAGES, TOKENS, _lines
from tests.checkpoint_remapping.other_projects.wording import (
    HIDDEN,
    LAYERS,
    Architecture,
    attention,
    convs,
    layer_norms,
    linear,
    worded,
)

ARCHITECTURES: dict[str, Architecture] = {}


def _add(name: str, inputs: torch.Tensor, parts: Any, forward: Any, **projects: str) -> None:
    ARCHITECTURES[name] = Architecture(inputs, worded(parts, forward, **{k: _lines(v) for k, v in projects.items()}))


# Of a trunk's levels, the blocks behind it fuse the coarsest first: projects count them from there, or as the levels


def _depth_parts() -> dict[str, Any]:
    levels = [8, 12, 16, 20]
    return {
        "trunk": [nn.Conv2d(a, b, 3, padding=1) for a, b in zip([3, *levels[:-1]], levels, strict=True)],
        "blocks": convs(20, 20, count=2 * LAYERS),
        "lateral": [nn.Conv2d(size, 8, 1) for size in levels],
        "one": convs(8, 8, count=len(levels)),
        "two": convs(8, 8, count=len(levels)),
        "out": nn.Conv2d(8, 1, 1),
    }


def _depth(part: Part, x: torch.Tensor) -> torch.Tensor:
    levels = []
    for conv in part.trunk:
        x = F.relu(conv(x))
        levels.append(x)
    for block in part.blocks:
        levels[-1] = levels[-1] + F.relu(block(levels[-1])) / 4
    x = torch.zeros(())
    for level, lateral, one, two in zip(reversed(levels), reversed(part.lateral), part.one, part.two, strict=True):
        x = two(F.relu(one(F.relu(x + lateral(level)))))
    return part.out(x)


_LEVELS = "trunk body.levels.{i},blocks body.blocks.{i},out head,"
_add(
    "depth from the levels of a trunk", IMAGES, _depth_parts, _depth,
    coarsest_first=_LEVELS + "lateral reassemble.{i},one decoder.blocks.{i}.conv1,two decoder.blocks.{i}.conv2",
    finest_first=_LEVELS + "lateral neck.reassemble.{i},one neck.fusion_stage.layers.{r}.conv1,"
                           "two neck.fusion_stage.layers.{r}.conv2",
    refined=_LEVELS + "lateral scratch.layer{n}_rn,one scratch.refinenet{r}.conv1,two scratch.refinenet{r}.conv2",
    necks=_LEVELS + "lateral neck.project.{i},one neck.blocks.{i}.conv1,two neck.blocks.{i}.conv2",
    levels=_LEVELS + "lateral pyramid.inputs.{i},one pyramid.stages.{r}.0,two pyramid.stages.{r}.1",
    convs=_LEVELS + "lateral lateral_convs.{i},one smooth_convs.{r}.conv1,two smooth_convs.{r}.conv2",
)  # fmt: skip


# Norms of a block, numbered as they come or as they belong


def _sandwich_parts() -> dict[str, Any]:
    norms = {role: layer_norms() for role in ("before_attn", "after_attn", "before_mlp", "after_mlp")}
    return {"q": linear(), "k": linear(), "v": linear(), "o": linear(), "up": linear(HIDDEN, 96),
            "down": linear(96), "stem": nn.Linear(HIDDEN, HIDDEN), "head": nn.Linear(HIDDEN, 5), **norms}  # fmt: skip


def _sandwich(part: Part, x: torch.Tensor) -> torch.Tensor:
    x = part.stem(x)
    for i in range(LAYERS):
        y = part.before_attn[i](x)
        x = x + part.after_attn[i](part.o[i](attention(part.q[i](y), part.k[i](y), part.v[i](y))))
        x = x + part.after_mlp[i](part.down[i](F.gelu(part.up[i](part.before_mlp[i](x)))))
    return part.head(x.mean(1))


def _block(path: str, q: str, k: str, v: str, o: str, up: str, down: str, cross: bool = False) -> str:
    own = f"q {path}.attn.{q},k {path}.attn.{k},v {path}.attn.{v},o {path}.attn.{o}"
    other = f"cq {path}.cross_attn.{q},ck {path}.cross_attn.{k},cv {path}.cross_attn.{v},co {path}.cross_attn.{o},"
    return f"stem stem,head head,up {path}.mlp.{up},down {path}.mlp.{down},{own},{other if cross else ''}"


_TIMM = ("blocks.{i}", "q", "k", "v", "proj", "fc1", "fc2")
_OTHER = ("layers.{i}", "query", "key", "value", "out_proj", "linear1", "linear2")


def _norms(**names: str) -> str:
    return ",".join(f"{role} layers.{{i}}.{name}" for role, name in names.items())


_add(
    "norms before and behind", TOKENS, _sandwich_parts, _sandwich,
    in_order=_block(*_TIMM) + "before_attn blocks.{i}.norm1,after_attn blocks.{i}.norm2,before_mlp blocks.{i}.norm3,"
                              "after_mlp blocks.{i}.norm4",
    post_last=_block(*_OTHER) + _norms(before_attn="ln_1", before_mlp="ln_2", after_attn="ln_3", after_mlp="ln_4"),
    post=_block(*_OTHER) + _norms(before_attn="ln_1", before_mlp="ln_2", after_attn="post_ln_1", after_mlp="post_ln_2"),
    behind_first=_block(*_OTHER) + _norms(after_attn="norm1", after_mlp="norm2", before_attn="pre_norm1",
                                          before_mlp="pre_norm2"),
    gemma=_block(*_OTHER) + _norms(before_attn="input_layernorm", after_attn="post_attention_layernorm",
                                   before_mlp="pre_feedforward_layernorm", after_mlp="post_feedforward_layernorm"),
    words=_block(*_OTHER) + _norms(before_attn="attention_norm", after_attn="attention_post_norm",
                                   before_mlp="ffn_norm", after_mlp="ffn_post_norm"),
)  # fmt: skip


def _cross_parts() -> dict[str, Any]:
    cross = {f"c{role}": linear() for role in "qkvo"}
    own = {role: linear() for role in "qkvo"}
    norms = {role: layer_norms() for role in ("norm_self", "norm_cross", "norm_mlp")}
    return {**own, **cross, **norms, "up": linear(HIDDEN, 96), "down": linear(96),
            "stem": nn.Linear(HIDDEN, HIDDEN), "head": nn.Linear(HIDDEN, 5)}  # fmt: skip


def _crossing(part: Part, x: torch.Tensor) -> torch.Tensor:
    memory, x = x.flip(1), part.stem(x)
    for i in range(LAYERS):
        y = part.norm_self[i](x)
        x = x + part.o[i](attention(part.q[i](y), part.k[i](y), part.v[i](y)))
        y = part.norm_cross[i](x)
        x = x + part.co[i](attention(part.cq[i](y), part.ck[i](memory), part.cv[i](memory)))
        x = x + part.down[i](F.gelu(part.up[i](part.norm_mlp[i](x))))
    return part.head(x.mean(1))


_add(
    "norms of a block that attends twice", TOKENS, _cross_parts, _crossing,
    in_order=_block(*_TIMM, cross=True) + "norm_self blocks.{i}.norm1,norm_cross blocks.{i}.norm2,"
                                          "norm_mlp blocks.{i}.norm3",
    added=_block(*_OTHER, cross=True) + _norms(norm_self="ln_1", norm_mlp="ln_2", norm_cross="ln_3"),
    added_by_name=_block(*_OTHER, cross=True) + _norms(norm_self="ln_1", norm_mlp="ln_2", norm_cross="ln_cross"),
)  # fmt: skip
