"""Decoders: Llama and its kin."""

from __future__ import annotations

from lightning_tricks.checkpoint_remapping.core.matching.conversion import Naming
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import HALVES, NEIGHBORS

_HUGGING_FACE_OUTSIDE = """
    /
    embed [model.]embed_tokens
    norm [model.]norm
    head? lm_head
    /[model.]layers.{i}.
    norm1 input_layernorm
    norm2 post_attention_layernorm
    norm_q? self_attn.q_norm
    norm_k? self_attn.k_norm
    o self_attn.o_proj
    down mlp.down_proj
"""
_HUGGING_FACE_ATTENTION = """
    q self_attn.q_proj
    k self_attn.k_proj
    v self_attn.v_proj
"""
_HUGGING_FACE_FEED_FORWARD = """
    gate mlp.gate_proj
    up mlp.up_proj
"""
_HUGGING_FACE = _HUGGING_FACE_OUTSIDE + _HUGGING_FACE_ATTENTION + _HUGGING_FACE_FEED_FORWARD
_PHI_3 = _HUGGING_FACE_OUTSIDE + "q,k,v self_attn.qkv_proj\ngate,up mlp.gate_up_proj"
_BAICHUAN = _HUGGING_FACE_OUTSIDE + "q,k,v self_attn.W_pack" + _HUGGING_FACE_FEED_FORWARD
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
    norm_q? attn.norm_q
    norm_k? attn.norm_k
    norm1 norm_1
    norm2 norm_2
    gate mlp.fc_1
    up mlp.fc_2
    down mlp.proj
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
}
