"""Decoders: Llama and its kin, and GPT-2."""

from __future__ import annotations

from lightning_tricks.checkpoint_remapping.core.matching.conversion import Naming
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import HALVES, NEIGHBORS

_HUGGING_FACE_ENDS = """
    /
    embed [model.]embed_tokens
    norm [model.]norm
    head? lm_head
"""
_HUGGING_FACE_NORMS = """
    /[model.]layers.{i}.
    norm1 input_layernorm
    norm2 post_attention_layernorm
    o self_attn.o_proj
"""
_HUGGING_FACE_ATTENTION = """
    q self_attn.q_proj
    k self_attn.k_proj
    v self_attn.v_proj
"""
_HUGGING_FACE_FEED_FORWARD = """
    gate mlp.gate_proj
    up mlp.up_proj
    down mlp.down_proj
"""
_HUGGING_FACE = _HUGGING_FACE_NORMS + _HUGGING_FACE_ATTENTION + _HUGGING_FACE_FEED_FORWARD + _HUGGING_FACE_ENDS
_HUGGING_FACE_QWEN = (
    _HUGGING_FACE_NORMS
    + "".join(f"{x} self_attn.{x}_proj.weight=\n{x}_bias self_attn.{x}_proj.bias=\n" for x in "qkv")
    + _HUGGING_FACE_FEED_FORWARD
    + _HUGGING_FACE_ENDS
)
_HUGGING_FACE_NORMS_OF_HEADS = """
    /[model.]layers.{i}.
    norm_q self_attn.q_norm
    norm_k self_attn.k_norm
"""
_PHI_3 = (
    _HUGGING_FACE_NORMS + "q,k,v self_attn.qkv_proj\ngate,up mlp.gate_up_proj\ndown mlp.down_proj" + _HUGGING_FACE_ENDS
)
_BAICHUAN = _HUGGING_FACE_NORMS + "q,k,v self_attn.W_pack" + _HUGGING_FACE_FEED_FORWARD + _HUGGING_FACE_ENDS
_META = """
    /
    embed tok_embeddings
    norm norm
    head? output
    /layers.{i}.
    q attention.wq
    k attention.wk
    v attention.wv
    o attention.wo
    norm1 attention_norm
    norm2 ffn_norm
    gate feed_forward.w1
    down feed_forward.w2
    up feed_forward.w3
"""
_TORCHTUNE = """
    /
    embed tok_embeddings
    norm norm
    head? output
    /layers.{i}.
    q attn.q_proj
    k attn.k_proj
    v attn.v_proj
    o attn.output_proj
    norm1 sa_norm
    norm2 mlp_norm
    gate mlp.w1
    down mlp.w2
    up mlp.w3
"""
# Since 2025; before, the fused matrix was called `attn.attn` and kept head by head
_LIT_GPT = """
    /
    embed transformer.wte
    norm transformer.ln_f
    head? lm_head
    /transformer.h.{i}.
    q,k,v attn.qkv
    o attn.proj
    norm1 norm_1
    norm2 norm_2
    gate mlp.fc_1
    up mlp.fc_2
    down mlp.proj
"""
_LIT_GPT_NORMS_OF_HEADS = "norm_q attn.norm_q\nnorm_k attn.norm_k"
# The gate is w2. Query, key and value have a bias, others do not: without one, it may be another project that says w1
_QWEN = """
    /
    embed transformer.wte
    norm transformer.ln_f
    head? lm_head
    /transformer.h.{i}.
    q,k,v attn.c_attn.weight=
    q_bias,k_bias,v_bias attn.c_attn.bias=
    o attn.c_proj
    norm1 ln_1
    norm2 ln_2
    up mlp.w1
    gate mlp.w2
    down mlp.c_proj
"""
_GPT_2 = """
    /
    embed [transformer.]wte
    positions [transformer.]wpe
    norm [transformer.]ln_f
    head? lm_head
    /[transformer.]h.{i}.
    norm1 ln_1
    q,k,v attn.c_attn T
    o attn.c_proj T
    norm2 ln_2
    wide mlp.c_fc T
    narrow mlp.c_proj T
"""
_MIN_GPT_OF_2020 = """
    /
    embed tok_emb
    positions pos_emb=
    norm ln_f
    head? head
    /blocks.{i}.
    norm1 ln1
    k attn.key
    q attn.query
    v attn.value
    o attn.proj
    norm2 ln2
    wide mlp.0
    narrow mlp.2
"""

FAMILIES = {
    "Llama": (
        Naming(_HUGGING_FACE, HALVES),
        Naming(_PHI_3, HALVES),
        Naming(_BAICHUAN, HALVES),
        Naming(_LIT_GPT, HALVES),
        Naming(_META, NEIGHBORS, computed=r"(^|\.)rope\.freqs$"),
        Naming(_TORCHTUNE, NEIGHBORS),
    ),
    "Llama with norms of queries and keys": (
        Naming(_HUGGING_FACE + _HUGGING_FACE_NORMS_OF_HEADS, HALVES),
        Naming(_LIT_GPT + _LIT_GPT_NORMS_OF_HEADS, HALVES),
    ),
    "Qwen": (Naming(_HUGGING_FACE_QWEN, HALVES), Naming(_QWEN, HALVES)),
    "GPT-2": (
        Naming(_GPT_2),
        Naming(_GPT_2.replace(" T\n", "\n")),
        Naming(_MIN_GPT_OF_2020, computed=r"\.attn\.mask$"),
    ),
}
