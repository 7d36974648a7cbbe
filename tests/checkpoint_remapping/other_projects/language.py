"""Language models that decode, of transformers and under the names of other projects."""

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
    layer_norms,
    linear,
    token_ids,
)

WIDTH, VOCABULARY, SIZE = 48, 50, HIDDEN // HEADS


class ScaleNorm(nn.Module):
    """An RMSNorm as torchtune and InternLM's trainers name it."""

    def __init__(self, leaf: str = "scale") -> None:
        super().__init__()
        self.leaf = leaf
        self.register_parameter(leaf, nn.Parameter(torch.ones(HIDDEN)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (HIDDEN,), getattr(self, self.leaf), 1e-6)


def _hugging_face(name: str, head: str = "ForCausalLM", **arguments: Any) -> Callable[[], nn.Module]:
    config = {
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "intermediate_size": WIDTH,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "attn_implementation": "eager",
    }
    return lambda: getattr(transformers, name + head)(getattr(transformers, f"{name}Config")(**config | arguments))


def _parts(norm: Callable[[], list[nn.Module]], bias: bool = False, key_heads: int = HEADS) -> dict[str, Any]:
    """Return every part that a decoder may have, for all of the ways to fuse them."""
    small = key_heads * SIZE
    one_norm = norm()
    return {
        "embed": nn.Embedding(VOCABULARY, HIDDEN),
        "positions": nn.Embedding(64, HIDDEN),
        "position_table": nn.Parameter(torch.zeros(1, 64, HIDDEN)),
        "norm1": norm(),
        "norm2": norm(),
        "q": linear(HIDDEN, HIDDEN, bias),
        "k": linear(HIDDEN, small, bias),
        "v": linear(HIDDEN, small, bias),
        "qkv": linear(HIDDEN, HIDDEN + 2 * small, bias),
        "o": linear(bias=bias),
        "norm_q": [nn.RMSNorm(SIZE, 1e-6) for _ in range(LAYERS)],
        "norm_k": [nn.RMSNorm(SIZE, 1e-6) for _ in range(LAYERS)],
        "mask": [torch.ones(1, 1, 64, 64).tril() for _ in range(LAYERS)],
        "norm": one_norm[0],
        "head": nn.Linear(HIDDEN, VOCABULARY, bias=False),
        "router": linear(HIDDEN, 4, False),
        **_feed_forward_parts(bias),
        "gates": [nn.ModuleList(nn.Linear(HIDDEN, WIDTH, False) for _ in range(4)) for _ in range(LAYERS)],
        "ups": [nn.ModuleList(nn.Linear(HIDDEN, WIDTH, False) for _ in range(4)) for _ in range(LAYERS)],
        "downs": [nn.ModuleList(nn.Linear(WIDTH, HIDDEN, False) for _ in range(4)) for _ in range(LAYERS)],
    }


def _feed_forward_parts(bias: bool) -> dict[str, Any]:
    return {
        "gate": linear(HIDDEN, WIDTH, bias),
        "up": linear(HIDDEN, WIDTH, bias),
        "gate_up": linear(HIDDEN, 2 * WIDTH, bias),
        "down": linear(WIDTH, HIDDEN, bias),
        "wide": linear(HIDDEN, 4 * HIDDEN, bias),
        "narrow": linear(4 * HIDDEN, HIDDEN, bias),
    }


def _decode(
    part: SimpleNamespace,
    ids: torch.Tensor,
    rotary: str = "",
    fused: str = "parts",
    activation: Callable[[torch.Tensor], torch.Tensor] = F.silu,
    parallel: bool = False,
) -> torch.Tensor:
    x = part.embed(ids)
    if hasattr(part, "positions"):
        x = x + part.positions.weight[: ids.shape[1]]
    if hasattr(part, "position_table"):
        x = x + part.position_table[:, : ids.shape[1]]
    for i in range(LAYERS):
        query, key, value = _query_key_value(part, i, part.norm1[i](x), fused)
        if rotary:
            query, key = _rotated(query, rotary), _rotated(key, rotary)
        attended = part.o[i](attention(query, key, value, causal=True))
        if parallel:
            x = x + attended + _feed_forward(part, i, part.norm2[i](x), activation)
        else:
            x = x + attended
            x = x + _feed_forward(part, i, part.norm2[i](x), activation)
    return part.head(part.norm(x)) if hasattr(part, "head") else part.norm(x)


def _query_key_value(part: SimpleNamespace, i: int, x: torch.Tensor, fused: str) -> Any:
    if hasattr(part, "q"):
        query, key, value = part.q[i](x), part.k[i](x), part.v[i](x)
    elif fused == "parts":
        together = part.qkv[i](x)
        small = (together.shape[-1] - HIDDEN) // 2
        query, key, value = together.split((HIDDEN, small, small), -1)
    else:  # head by head, each with its query, key and value; or the queries of a key, then the key and the value
        together = part.qkv[i](x)
        groups = (together.shape[-1] - HIDDEN) // 2 // SIZE
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


def _feed_forward(part: SimpleNamespace, i: int, x: torch.Tensor, activation: Any) -> torch.Tensor:
    if hasattr(part, "router"):
        weights, experts = part.router[i](x).softmax(-1).topk(2)
        weights = weights / weights.sum(-1, keepdim=True)
        every = zip(part.gates[i], part.ups[i], part.downs[i], strict=True)
        outputs = torch.stack([down(F.silu(gate(x)) * up(x)) for gate, up, down in every], -2)
        chosen = outputs.gather(-2, experts[..., None].expand(*experts.shape, HIDDEN))
        return (chosen * weights[..., None]).sum(-2)
    if hasattr(part, "gate_up"):
        gate, up = part.gate_up[i](x).chunk(2, -1)
        return part.down[i](activation(gate) * up)
    if hasattr(part, "gate"):
        return part.down[i](activation(part.gate[i](x)) * part.up[i](x))
    return part.narrow[i](activation(part.wide[i](x)))


def _rms() -> list[nn.Module]:
    return [nn.RMSNorm(HIDDEN, 1e-6) for _ in range(LAYERS)]


def _scale() -> list[nn.Module]:
    return [ScaleNorm() for _ in range(LAYERS)]


def _other(
    names: str, norm: Any = _rms, bias: str = "", key_heads: int = HEADS, tied: bool = False, **how: Any
) -> Callable[[], nn.Module]:
    """Return what builds a decoder under some names, with a bias in all layers, or in query, key and value alone."""

    def build() -> nn.Module:
        parts = _parts(norm, bool(bias), key_heads)
        if bias == "query, key and value":
            parts |= {role: linear(HIDDEN, HIDDEN, False) for role in ("o",)} | _feed_forward_parts(False)
        if tied:
            parts["head"].weight = parts["embed"].weight
        return Worded(parts, names, partial(_decode, **how))

    return build


def _logits(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).logits


def _hidden(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    return model(ids).last_hidden_state


def _architecture(hugging_face: Callable[[], nn.Module], **others: Callable[[], nn.Module]) -> Architecture:
    return Architecture(token_ids(), {"HF": hugging_face, **others}, {"HF": _logits})


META = """
    embed tok_embeddings
    q layers.{i}.attention.wq
    k layers.{i}.attention.wk
    v layers.{i}.attention.wv
    o layers.{i}.attention.wo
    gate layers.{i}.feed_forward.w1
    down layers.{i}.feed_forward.w2
    up layers.{i}.feed_forward.w3
    norm1 layers.{i}.attention_norm
    norm2 layers.{i}.ffn_norm
    norm norm
    head output
"""
TORCHTUNE = """
    embed tok_embeddings
    q layers.{i}.attn.q_proj
    k layers.{i}.attn.k_proj
    v layers.{i}.attn.v_proj
    o layers.{i}.attn.output_proj
    gate layers.{i}.mlp.w1
    down layers.{i}.mlp.w2
    up layers.{i}.mlp.w3
    norm1 layers.{i}.sa_norm
    norm2 layers.{i}.mlp_norm
    norm norm
    head output
"""
LIT_GPT = """
    head lm_head
    embed transformer.wte
    norm1 transformer.h.{i}.norm_1
    qkv transformer.h.{i}.attn.attn
    o transformer.h.{i}.attn.proj
    norm2 transformer.h.{i}.norm_2
    gate transformer.h.{i}.mlp.fc_1
    up transformer.h.{i}.mlp.fc_2
    down transformer.h.{i}.mlp.proj
    norm transformer.ln_f
"""
LIT_GPT_NEW = LIT_GPT.replace("attn.attn", "attn.qkv")
HUGGING_FACE = """
    embed model.embed_tokens
    q model.layers.{i}.self_attn.q_proj
    k model.layers.{i}.self_attn.k_proj
    v model.layers.{i}.self_attn.v_proj
    o model.layers.{i}.self_attn.o_proj
    gate model.layers.{i}.mlp.gate_proj
    up model.layers.{i}.mlp.up_proj
    down model.layers.{i}.mlp.down_proj
    norm1 model.layers.{i}.input_layernorm
    norm2 model.layers.{i}.post_attention_layernorm
    norm model.norm
    head lm_head
"""
# Two of a kind that differ in the words of the feed-forward alone; the names of query and key say nothing of rotations
W_GATE = (
    HUGGING_FACE.replace("model.layers", "blocks")
    .replace("mlp.gate_proj", "ffn.w_gate")
    .replace("mlp.up_proj", "ffn.w_up")
    .replace("mlp.down_proj", "ffn.w_down")
)
W123 = (
    HUGGING_FACE.replace("mlp.gate_proj", "mlp.w1").replace("mlp.up_proj", "mlp.w3").replace("mlp.down_proj", "mlp.w2")
)
FC123 = (
    HUGGING_FACE.replace("mlp.gate_proj", "mlp.fc_1")
    .replace("mlp.up_proj", "mlp.fc_2")
    .replace("mlp.down_proj", "mlp.proj")
)
INTERNLM2 = """
    embed model.tok_embeddings
    qkv model.layers.{i}.attention.wqkv
    o model.layers.{i}.attention.wo
    gate model.layers.{i}.feed_forward.w1
    up model.layers.{i}.feed_forward.w3
    down model.layers.{i}.feed_forward.w2
    norm1 model.layers.{i}.attention_norm
    norm2 model.layers.{i}.ffn_norm
    norm model.norm
    head output
"""
BAICHUAN = "\n".join(line for line in HUGGING_FACE.split("\n") if not line.strip().startswith(("k ", "v "))).replace(
    "    q model.layers.{i}.self_attn.q_proj", "    qkv model.layers.{i}.self_attn.W_pack"
)
# The gate is w2 here
QWEN1 = """
    embed transformer.wte
    norm1 transformer.h.{i}.ln_1
    qkv transformer.h.{i}.attn.c_attn
    o transformer.h.{i}.attn.c_proj
    norm2 transformer.h.{i}.ln_2
    up transformer.h.{i}.mlp.w1
    gate transformer.h.{i}.mlp.w2
    down transformer.h.{i}.mlp.c_proj
    norm transformer.ln_f
    head lm_head
"""
PHI3 = """
    embed model.embed_tokens
    o model.layers.{i}.self_attn.o_proj
    qkv model.layers.{i}.self_attn.qkv_proj
    gate_up model.layers.{i}.mlp.gate_up_proj
    down model.layers.{i}.mlp.down_proj
    norm1 model.layers.{i}.input_layernorm
    norm2 model.layers.{i}.post_attention_layernorm
    norm model.norm
    head lm_head
"""


def _experts(names: str, gate: str, up: str, down: str, router: str) -> str:
    """Return names with four experts instead of one feed-forward."""
    return (
        "\n".join(line for line in names.split("\n") if not line.strip().startswith(("gate ", "up ", "down ")))
        + f"\nrouter {router}\ngates {gate}\nups {up}\ndowns {down}"
    )


NANO_GPT = """
    embed transformer.wte
    positions transformer.wpe
    norm1 transformer.h.{i}.ln_1
    qkv transformer.h.{i}.attn.c_attn
    o transformer.h.{i}.attn.c_proj
    norm2 transformer.h.{i}.ln_2
    wide transformer.h.{i}.mlp.c_fc
    narrow transformer.h.{i}.mlp.c_proj
    norm transformer.ln_f
    head lm_head
"""
MASKED = NANO_GPT.replace("    qkv", "    mask transformer.h.{i}.attn.bias\n    qkv")
OLD_MIN_GPT = """
    position_table pos_emb
    embed tok_emb
    norm1 blocks.{i}.ln1
    norm2 blocks.{i}.ln2
    mask blocks.{i}.attn.mask
    k blocks.{i}.attn.key
    q blocks.{i}.attn.query
    v blocks.{i}.attn.value
    o blocks.{i}.attn.proj
    wide blocks.{i}.mlp.0
    narrow blocks.{i}.mlp.2
    norm ln_f
    head head
"""
NEOX = """
    embed gpt_neox.embed_in
    norm1 gpt_neox.layers.{i}.input_layernorm
    norm2 gpt_neox.layers.{i}.post_attention_layernorm
    qkv gpt_neox.layers.{i}.attention.query_key_value
    o gpt_neox.layers.{i}.attention.dense
    wide gpt_neox.layers.{i}.mlp.dense_h_to_4h
    narrow gpt_neox.layers.{i}.mlp.dense_4h_to_h
    norm gpt_neox.final_layer_norm
    head embed_out
"""
NEOX_SEPARATE = NEOX.replace(
    "    qkv gpt_neox.layers.{i}.attention.query_key_value",
    "    q gpt_neox.layers.{i}.attention.q_proj\n    k gpt_neox.layers.{i}.attention.k_proj\n"
    "    v gpt_neox.layers.{i}.attention.v_proj",
)
LIT_PYTHIA = """
    head lm_head
    embed transformer.wte
    norm1 transformer.h.{i}.norm_1
    qkv transformer.h.{i}.attn.attn
    o transformer.h.{i}.attn.proj
    norm2 transformer.h.{i}.norm_2
    wide transformer.h.{i}.mlp.fc
    narrow transformer.h.{i}.mlp.proj
    norm transformer.ln_f
"""


_HALVES, _NEIGHBORS = {"rotary": "halves"}, {"rotary": "neighbors"}
_GPT = {"norm": layer_norms, "bias": "all", "activation": partial(F.gelu, approximate="tanh")}
_PYTHIA = {"rotary": "halves", "norm": layer_norms, "bias": "all", "activation": F.gelu, "parallel": True}
_LLAMA = {
    "Meta": _other(META, **_NEIGHBORS),
    "torchtune": _other(TORCHTUNE, _scale, **_NEIGHBORS),
    "lit-gpt": _other(LIT_GPT_NEW, **_HALVES),
    "lit-gpt by heads": _other(LIT_GPT, fused="heads", **_HALVES),
    "w_gate": _other(W_GATE, **_HALVES),
    "w1, w2, w3": _other(W123, **_HALVES),
    "fc_1, fc_2": _other(FC123, **_HALVES),
    "Baichuan": _other(BAICHUAN, **_HALVES),
    "InternLM2": _other(INTERNLM2, fused="heads", **_HALVES),
    "Phi-3": _other(PHI3, **_HALVES),
}
_SHARED = {"key_heads": 2, **_HALVES}

ARCHITECTURES = {
    "Llama": _architecture(_hugging_face("Llama"), **_LLAMA),
    "Llama with shared keys": _architecture(
        _hugging_face("Llama", num_key_value_heads=2),
        **{
            "Meta": _other(META, key_heads=2, **_NEIGHBORS),
            "lit-gpt": _other(LIT_GPT, fused="heads", **_SHARED),
            "w1, w2, w3": _other(W123, **_SHARED),
            "InternLM2": _other(INTERNLM2, fused="heads", **_SHARED),
        },
    ),
    "Mistral": _architecture(
        _hugging_face("Mistral", num_key_value_heads=2, sliding_window=None),
        **{"Mistral": _other(META, key_heads=2, **_NEIGHBORS), "fc_1, fc_2": _other(FC123, **_SHARED)},
    ),
    "Qwen2": _architecture(
        _hugging_face("Qwen2", num_key_value_heads=HEADS),
        **{
            "Qwen": _other(QWEN1, bias="query, key and value", **_HALVES),
            "w1, w2, w3": _other(W123, bias="query, key and value", **_HALVES),
            "fc_1, fc_2": _other(FC123, bias="query, key and value", **_HALVES),
        },
    ),
    "Qwen3": _architecture(
        _hugging_face("Qwen3", num_key_value_heads=2, head_dim=SIZE),
        **{
            "lit-gpt": _other(
                LIT_GPT_NEW.replace(
                    "    o ",
                    "    norm_q transformer.h.{i}.attn.norm_q\n    norm_k transformer.h.{i}.attn.norm_k\n    o ",
                ),
                **_SHARED,
            ),
            "w1, w2, w3": _other(
                W123 + "norm_q model.layers.{i}.attention.q_norm\nnorm_k model.layers.{i}.attention.k_norm", **_SHARED
            ),
        },
    ),
    "Phi-3": _architecture(
        _hugging_face("Phi3", head="ForCausalLM", pad_token_id=0),
        **{"Llama": _other(HUGGING_FACE, **_HALVES), "w1, w2, w3": _other(W123, **_HALVES)},
    ),
    "Mixtral": _architecture(
        _hugging_face(
            "Mixtral",
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=None,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        ),
        **{
            "HF 4": _other(
                _experts(
                    HUGGING_FACE,
                    *(f"model.layers.{{i}}.block_sparse_moe.experts.{{e}}.w{n}" for n in (1, 3, 2)),
                    "model.layers.{i}.block_sparse_moe.gate",
                ),
                **_HALVES,
            ),
            "Mistral": _other(
                _experts(
                    META,
                    *(f"layers.{{i}}.feed_forward.experts.{{e}}.w{n}" for n in (1, 3, 2)),
                    "layers.{i}.feed_forward.gate",
                ),
                **_NEIGHBORS,
            ),
            "words": _other(
                _experts(
                    HUGGING_FACE,
                    *(f"model.layers.{{i}}.moe.{word}_projs.{{e}}" for word in ("gate", "up", "down")),
                    "model.layers.{i}.moe.router",
                ),
                **_HALVES,
            ),
        },
    ),
    "GPT-2": _architecture(
        _hugging_face("GPT2", "LMHeadModel", n_inner=None, tie_word_embeddings=True),
        **{
            "nanoGPT": _other(NANO_GPT, tied=True, **_GPT),
            "nanoGPT with masks": _other(MASKED, tied=True, **_GPT),
        },
    ),
    "GPT-2, untied": _architecture(
        _hugging_face("GPT2", "LMHeadModel"),
        **{"minGPT": _other(MASKED, **_GPT), "minGPT of 2020": _other(OLD_MIN_GPT, **_GPT)},
    ),
    "Pythia": _architecture(
        _hugging_face("GPTNeoX", rotary_pct=1.0, use_parallel_residual=True, intermediate_size=4 * HIDDEN),
        **{
            "separate": _other(NEOX_SEPARATE, **_PYTHIA),
            "lit-gpt": _other(LIT_PYTHIA, fused="heads", **_PYTHIA),
        },
    ),
}
