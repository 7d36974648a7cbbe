"""Decoders that attend to an encoder, and models of several such parts: DETR, CLIP, Whisper."""

from __future__ import annotations

from lightning_tricks.checkpoint_remapping.core.matching.conversion import Naming

# Torch's second norm is that of the feed-forward in an encoder, and that of the cross-attention in a decoder
_TORCH_LAYER = """
    q,k,v self_attn.in_proj_{leaf}
    o self_attn.out_proj
    norm1 norm1
    wide linear1
    narrow linear2
"""
_TORCH_ENCODER = _TORCH_LAYER + "norm3 norm2"
_TORCH_DECODER = (
    _TORCH_LAYER
    + """
    cross_q,cross_k,cross_v multihead_attn.in_proj_{leaf}
    cross_o multihead_attn.out_proj
    cross_norm norm2
    norm3 norm3
"""
)
# As in fairseq and transformers' BART, Marian and Whisper
_FAIRSEQ_ENCODER = """
    q self_attn.q_proj
    k self_attn.k_proj
    v self_attn.v_proj
    o self_attn.out_proj
    norm1 self_attn_layer_norm
    wide fc1
    narrow fc2
    norm3 final_layer_norm
"""
_FAIRSEQ_DECODER = (
    _FAIRSEQ_ENCODER
    + """
    cross_q encoder_attn.q_proj
    cross_k encoder_attn.k_proj
    cross_v encoder_attn.v_proj
    cross_o encoder_attn.out_proj
    cross_norm encoder_attn_layer_norm
"""
)


def _both(path: str, encoder: str, decoder: str, norm: str) -> str:
    """Return the names of an encoder and of a decoder; the roles of the decoder begin with `d_`."""
    sides = (("encoder", encoder, ""), ("decoder", decoder, " d_"))
    return "".join(
        f"\n/{path}{side}.layers.{{i}}.{role}\n{layer}\n/{path}{side}.{role}\nnorm? {norm}\n"
        for side, layer, role in sides
    )


_HUGGING_FACE_DETR = (
    _both("[model.]", _FAIRSEQ_ENCODER, _FAIRSEQ_DECODER, "layernorm")
    + """
    /[model.]
    queries query_position_embeddings
    projection? input_projection
    backbone? backbone.conv_encoder.model.{rest}
    /
    classes? class_labels_classifier
    boxes? bbox_predictor.layers.{i}
"""
)
_ORIGINAL_DETR = (
    _both("transformer.", _TORCH_ENCODER, _TORCH_DECODER, "norm")
    + """
    /
    queries query_embed
    projection? input_proj
    backbone? backbone.0.body.{rest}
    classes? class_embed
    boxes? bbox_embed.layers.{i}
"""
)

# CLIP and Whisper, of OpenAI and of Hugging Face

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
    {_FAIRSEQ_ENCODER}
    /[model.]decoder. d_
    words embed_tokens
    positions embed_positions
    last layer_norm
    /[model.]decoder.layers.{{i}}. d_
    {_FAIRSEQ_DECODER}
    /
    head? proj_out
"""

FAMILIES = {
    "decoders like BART's": (
        Naming("/layers.{i}.\n" + _FAIRSEQ_DECODER + "/\nnorm? layer_norm"),
        Naming("/layers.{i}.\n" + _TORCH_DECODER + "/\nnorm? norm"),
    ),
    "encoders with decoders": (
        Naming(_both("", _FAIRSEQ_ENCODER, _FAIRSEQ_DECODER, "layer_norm")),
        Naming(_both("", _TORCH_ENCODER, _TORCH_DECODER, "norm")),
    ),
    "DETR": (
        Naming(_HUGGING_FACE_DETR.replace(".out_proj", ".o_proj").replace(" fc", " mlp.fc")),
        Naming(_HUGGING_FACE_DETR),
        Naming(_ORIGINAL_DETR),
    ),
    "CLIP": (
        Naming(_HUGGING_FACE_TEXTS + _HUGGING_FACE_IMAGES),
        Naming(_OPENAI_TEXTS + _openai_images("visual."), computed="^(input_resolution|context_length|vocab_size)$"),
    ),
    "CLIP's images": (Naming(_HUGGING_FACE_IMAGES), Naming(_openai_images(""))),
    "CLIP's texts": (Naming(_HUGGING_FACE_TEXTS), Naming(_OPENAI_TEXTS)),
    "Whisper": (Naming(_HUGGING_FACE_WHISPER), Naming(_OPENAI_WHISPER)),
}
