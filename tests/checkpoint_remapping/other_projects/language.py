"""Llama and its kin, of transformers and under the names of other projects, with the same outputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F  # noqa: N812

from tests.checkpoint_remapping.other_projects.wording import (
    HEADS,
    HIDDEN,
    LAYERS,
    Architecture,
    Worded,
    attention,
    linear,
    token_ids,
)

WIDTH, VOCABULARY, SIZE = 48, 50, HIDDEN // HEADS


class ScaleNorm(nn.Module):
    """An RMSNorm as torchtune and InternLM's trainers name it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (HIDDEN,), self.scale, 1e-6)


def _hugging_face(name: str, **arguments: Any) -> Callable[[], nn.Module]:
    config = {
        "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS, "intermediate_size": WIDTH, "max_position_embeddings": 64, "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "attn_implementation": "eager",
    }  # fmt: skip
    return lambda: getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**config | arguments)
    )


def _parts(norm: Callable[[], nn.Module], key_heads: int) -> dict[str, Any]:
    """Return every part that a decoder may have, for all of the ways to fuse them."""
    small = key_heads * SIZE
    sizes = {"q": (HIDDEN, HIDDEN), "k": (HIDDEN, small), "v": (HIDDEN, small), "qkv": (HIDDEN, HIDDEN + 2 * small)}
    sizes |= {"o": (HIDDEN, HIDDEN), "gate": (HIDDEN, WIDTH), "up": (HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
    sizes |= {"gate_up": (HIDDEN, 2 * WIDTH)}
    return {role: linear(*size, False) for role, size in sizes.items()} | {
        "embed": nn.Embedding(VOCABULARY, HIDDEN), "head": nn.Linear(HIDDEN, VOCABULARY, bias=False), "norm": norm(),
        "norm1": [norm() for _ in range(LAYERS)], "norm2": [norm() for _ in range(LAYERS)],
        "norm_q": [nn.RMSNorm(SIZE, 1e-6) for _ in range(LAYERS)],
        "norm_k": [nn.RMSNorm(SIZE, 1e-6) for _ in range(LAYERS)],
    }  # fmt: skip


def _decode(part: SimpleNamespace, ids: torch.Tensor, rotary: str, fused: str) -> torch.Tensor:
    x = part.embed(ids)
    for i in range(LAYERS):
        query, key, value = _query_key_value(part, i, part.norm1[i](x), fused)
        x = x + part.o[i](attention(_rotated(query, rotary), _rotated(key, rotary), value, causal=True))
        y = part.norm2[i](x)
        gate, up = part.gate_up[i](y).chunk(2, -1) if hasattr(part, "gate_up") else (part.gate[i](y), part.up[i](y))
        x = x + part.down[i](F.silu(gate) * up)
    return part.head(part.norm(x))


def _query_key_value(part: SimpleNamespace, i: int, x: torch.Tensor, fused: str) -> Any:
    if hasattr(part, "q"):
        query, key, value = part.q[i](x), part.k[i](x), part.v[i](x)
    else:
        together = part.qkv[i](x)
        small = (together.shape[-1] - HIDDEN) // 2
        if fused == "parts":
            query, key, value = together.split((HIDDEN, small, small), -1)
        else:  # the queries of a key, then the key and the value
            groups = small // SIZE
            blocks = together.unflatten(-1, (groups, -1, SIZE))
            query, key, value = (b.flatten(-3) for b in blocks.split((HEADS // groups, 1, 1), -2))
    if hasattr(part, "norm_q"):
        query = part.norm_q[i](query.unflatten(-1, (-1, SIZE))).flatten(-2)
        key = part.norm_k[i](key.unflatten(-1, (-1, SIZE))).flatten(-2)
    return query, key, value


def _rotated(x: torch.Tensor, rotary: str, theta: float = 10000.0) -> torch.Tensor:
    """Rotate pairs of elements: the halves of a head, as Hugging Face has them, or neighbors, as Meta has them."""
    angles = torch.arange(x.shape[1])[:, None] / theta ** (torch.arange(0, SIZE, 2) / SIZE)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    heads = x.unflatten(-1, (-1, SIZE))
    if rotary == "halves":
        one, two = heads.chunk(2, -1)
        return torch.cat([one * cos - two * sin, two * cos + one * sin], -1).flatten(-2)
    one, two = heads[..., ::2], heads[..., 1::2]
    return torch.stack([one * cos - two * sin, two * cos + one * sin], -1).flatten(-3)


def _rms() -> nn.Module:
    return nn.RMSNorm(HIDDEN, 1e-6)


def _other(names: str, rotary: str = "halves", fused: str = "parts", norm: Any = _rms, key_heads: int = HEADS) -> Any:
    """Return what builds a decoder under some names."""
    return lambda: Worded(_parts(norm, key_heads), names, partial(_decode, rotary=rotary, fused=fused))


def _architecture(hugging_face: Callable[[], nn.Module], **others: Callable[[], nn.Module]) -> Architecture:
    return Architecture(token_ids(), {"HF": hugging_face, **others}, {"HF": lambda model, ids: model(ids).logits})


META = """
    embed tok_embeddings,/layers.{i}.attention. q wq,k wk,v wv,o wo
    /layers.{i}. gate feed_forward.w1,down feed_forward.w2,up feed_forward.w3,norm1 attention_norm,norm2 ffn_norm
    / norm norm,head output
"""
TORCHTUNE = """
    embed tok_embeddings,/layers.{i}. q attn.q_proj,k attn.k_proj,v attn.v_proj,o attn.output_proj
    gate mlp.w1,down mlp.w2,up mlp.w3,norm1 sa_norm,norm2 mlp_norm,/ norm norm,head output
"""
LIT_GPT = """
    head lm_head,embed transformer.wte,/transformer.h.{i}. norm1 norm_1,qkv attn.attn,o attn.proj
    norm2 norm_2,gate mlp.fc_1,up mlp.fc_2,down mlp.proj,/ norm transformer.ln_f
"""
LIT_GPT_NEW = LIT_GPT.replace("attn.attn", "attn.qkv")
HUGGING_FACE = """
    embed model.embed_tokens,/model.layers.{i}. q self_attn.q_proj,k self_attn.k_proj,v self_attn.v_proj
    o self_attn.o_proj,gate mlp.gate_proj,up mlp.up_proj,down mlp.down_proj
    norm1 input_layernorm,norm2 post_attention_layernorm,/ norm model.norm,head lm_head
"""
INTERNLM2 = """
    embed model.tok_embeddings,/model.layers.{i}. qkv attention.wqkv,o attention.wo,gate feed_forward.w1
    up feed_forward.w3,down feed_forward.w2,norm1 attention_norm,norm2 ffn_norm,/ norm model.norm,head output
"""
BAICHUAN = HUGGING_FACE.replace("q self_attn.q_proj,k self_attn.k_proj,v self_attn.v_proj", "qkv self_attn.W_pack")
PHI3 = BAICHUAN.replace("W_pack", "qkv_proj").replace("gate mlp.gate_proj,up mlp.up_proj", "gate_up mlp.gate_up_proj")
# The gate is w2 here
QWEN1 = """
    embed transformer.wte,/transformer.h.{i}. norm1 ln_1,qkv attn.c_attn,o attn.c_proj,norm2 ln_2
    up mlp.w1,gate mlp.w2,down mlp.c_proj,/ norm transformer.ln_f,head lm_head
"""
NORMED = LIT_GPT_NEW.replace("o attn.proj", "norm_q attn.norm_q,norm_k attn.norm_k,o attn.proj")

ARCHITECTURES = {
    "Llama": _architecture(
        _hugging_face("Llama"),
        **{
            "Meta": _other(META, "neighbors"),
            "torchtune": _other(TORCHTUNE, "neighbors", norm=ScaleNorm),
            "lit-gpt": _other(LIT_GPT_NEW),
            "lit-gpt by heads": _other(LIT_GPT, fused="heads"),
            "Baichuan": _other(BAICHUAN),
            "InternLM2": _other(INTERNLM2, fused="heads"),
            "Phi-3": _other(PHI3),
            "Qwen": _other(QWEN1),
        },
    ),
    "Llama with shared keys": _architecture(
        _hugging_face("Llama", num_key_value_heads=2),
        **{"Meta": _other(META, "neighbors", key_heads=2), "lit-gpt": _other(LIT_GPT, fused="heads", key_heads=2)},
    ),
    "Phi-3": _architecture(_hugging_face("Phi3"), Llama=_other(HUGGING_FACE)),
    "Qwen3": _architecture(
        _hugging_face("Qwen3", num_key_value_heads=2, head_dim=SIZE), **{"lit-gpt": _other(NORMED, key_heads=2)}
    ),
}
