"""The names of one architecture in several projects, for layers that words and sizes do not identify."""

from __future__ import annotations

from lightning_tricks.checkpoint_remapping.core.matching.synonyms import HALVES, NEIGHBORS

# ConvNeXt of its authors, timm and Hugging Face

_CONVNEXT = """
    /
    patches downsample_layers.0.0
    first downsample_layers.0.1
    last? norm
    head? head
    /downsample_layers.{i}. down_
    norm 0
    conv 1
    /stages.{i}.{i}.
    scale? gamma=
    depthwise dwconv
    norm norm
    wide pwconv1
    grn? grn
    narrow pwconv2
"""
_TIMM_CONVNEXT = """
    /
    patches stem.0
    first stem.1
    last? head.norm
    head? head.fc
    /stages.{i}.downsample. down_
    norm 0
    conv 1
    /stages.{i}.blocks.{i}.
    scale? gamma=
    depthwise conv_dw
    norm norm
    wide mlp.fc1
    grn? mlp.grn
    narrow mlp.fc2
"""
_HUGGING_FACE_CONVNEXT = """
    /[convnext.|convnextv2.]
    patches embeddings.patch_embeddings
    first embeddings.layernorm
    last? layernorm
    /
    head? classifier
    /[convnext.|convnextv2.]encoder.stages.{i}.downsampling_layer. down_
    norm 0
    conv 1
    /[convnext.|convnextv2.]encoder.stages.{i}.layers.{i}.
    scale? layer_scale_parameter=
    depthwise dwconv
    norm layernorm
    wide pwconv1
    grn? grn
    narrow pwconv2
"""

# Llama and its kin

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
_META_OUTSIDE = """
    /
    embed tok_embeddings
    norm norm
    head? output
    /layers.{i}.
"""
_META = f"""
    {_META_OUTSIDE}
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
_TORCHTUNE = f"""
    {_META_OUTSIDE}
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
# Since litgpt #1013; before, the fused matrix was called `attn.attn` and kept head by head
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

# CLIP, of OpenAI and of Hugging Face

_OPENAI_LAYER = """
    q,k,v attn.in_proj_{leaf}
    o attn.out_proj
    norm1 ln_1
    wide mlp.c_fc
    narrow mlp.c_proj
    norm2 ln_2
"""
_HUGGING_FACE_LAYER = """
    q self_attn.q_proj
    k self_attn.k_proj
    v self_attn.v_proj
    o self_attn.out_proj
    norm1 layer_norm1
    wide mlp.fc1
    narrow mlp.fc2
    norm2 layer_norm2
"""


def _openai_images(path: str) -> str:
    return f"""
    /{path} image_
    cls class_embedding=
    positions positional_embedding=
    projection? proj= T
    patches conv1
    first ln_pre
    last ln_post
    /{path}transformer.resblocks.{{i}}. image_
    {_OPENAI_LAYER}"""


_OPENAI_TEXTS = f"""
    /
    positions positional_embedding=
    projection? text_projection= T
    scale? logit_scale=
    words token_embedding
    last ln_final
    /transformer.resblocks.{{i}}.
    {_OPENAI_LAYER}"""
_HUGGING_FACE_IMAGES = f"""
    /
    image_projection? visual_projection
    /vision_model. image_
    cls embeddings.class_embedding=
    positions embeddings.position_embedding
    patches embeddings.patch_embedding
    first pre_layrnorm
    last post_layernorm
    /vision_model.encoder.layers.{{i}}. image_
    {_HUGGING_FACE_LAYER}"""
_HUGGING_FACE_TEXTS = f"""
    /
    projection? text_projection
    scale? logit_scale=
    /text_model.
    words embeddings.token_embedding
    positions embeddings.position_embedding
    last final_layer_norm
    /text_model.encoder.layers.{{i}}.
    {_HUGGING_FACE_LAYER}"""

# Whisper, of OpenAI and of Hugging Face

_HUGGING_FACE_WHISPER_LAYER = """
    q self_attn.q_proj
    k self_attn.k_proj
    v self_attn.v_proj
    o self_attn.out_proj
    norm1 self_attn_layer_norm
    wide fc1
    narrow fc2
    norm3 final_layer_norm
"""
_OPENAI_WHISPER_LAYER = """
    q attn.query
    k attn.key
    v attn.value
    o attn.out
    norm1 attn_ln
    wide mlp.0
    narrow mlp.2
    norm3 mlp_ln
"""
_OPENAI_WHISPER = f"""
    /encoder.
    conv1 conv1
    conv2 conv2
    positions positional_embedding=
    last ln_post
    /encoder.blocks.{{i}}.
    {_OPENAI_WHISPER_LAYER}
    /decoder. d_
    words token_embedding
    positions positional_embedding=
    last ln
    /decoder.blocks.{{i}}. d_
    {_OPENAI_WHISPER_LAYER}
    cross_q cross_attn.query
    cross_k cross_attn.key
    cross_v cross_attn.value
    cross_o cross_attn.out
    cross_norm cross_attn_ln
"""
_HUGGING_FACE_WHISPER = f"""
    /[model.]encoder.
    conv1 conv1
    conv2 conv2
    positions embed_positions
    last layer_norm
    /[model.]encoder.layers.{{i}}.
    {_HUGGING_FACE_WHISPER_LAYER}
    /[model.]decoder. d_
    words embed_tokens
    positions embed_positions
    last layer_norm
    /[model.]decoder.layers.{{i}}. d_
    {_HUGGING_FACE_WHISPER_LAYER}
    cross_q encoder_attn.q_proj
    cross_k encoder_attn.k_proj
    cross_v encoder_attn.v_proj
    cross_o encoder_attn.out_proj
    cross_norm encoder_attn_layer_norm
    /
    head? proj_out
"""

# The projects of each family, with the arguments of `Naming` for each
FAMILIES: dict[str, tuple[tuple[str, ...], ...]] = {
    "ConvNeXt": ((_CONVNEXT,), (_TIMM_CONVNEXT,), (_HUGGING_FACE_CONVNEXT,)),
    "Llama": (
        (_HUGGING_FACE, HALVES),
        (_PHI_3, HALVES),
        (_BAICHUAN, HALVES),
        (_LIT_GPT, HALVES),
        # Meta's weights rotate neighbors, and transformers' script reorders them to halves (transformers #25199).
        (_META, NEIGHBORS, r"(^|\.)rope\.freqs$"),
        (_TORCHTUNE, NEIGHBORS),
    ),
    "CLIP": (
        (_HUGGING_FACE_TEXTS + _HUGGING_FACE_IMAGES,),
        (_OPENAI_TEXTS + _openai_images("visual."), "", "^(input_resolution|context_length|vocab_size)$"),
    ),
    "CLIP's images": ((_HUGGING_FACE_IMAGES,), (_openai_images(""),)),
    "CLIP's texts": ((_HUGGING_FACE_TEXTS,), (_OPENAI_TEXTS,)),
    "Whisper": ((_HUGGING_FACE_WHISPER,), (_OPENAI_WHISPER,)),
}
