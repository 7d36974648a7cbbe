"""CLIP and Whisper, of OpenAI and of Hugging Face."""

from __future__ import annotations

from lightning_tricks.checkpoint_remapping.core.matching.conversion import Naming

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

_OPENAI_ATTENTION = """
    {side}q {attn}.query
    {side}k {attn}.key
    {side}v {attn}.value
    {side}o {attn}.out
    {side}norm {attn}_ln
"""
_OPENAI_FEED_FORWARD = "wide mlp.0\nnarrow mlp.2\nnorm2 mlp_ln"
_WHISPER_ATTENTION = """
    {side}q {attn}.q_proj
    {side}k {attn}.k_proj
    {side}v {attn}.v_proj
    {side}o {attn}.out_proj
    {side}norm {attn}_layer_norm
"""
_WHISPER_FEED_FORWARD = "wide fc1\nnarrow fc2\nnorm2 final_layer_norm"


def _whisper(path: str, layers: str, attention: str, names: tuple[str, str], feed_forward: str) -> str:
    own, cross = (attention.format(side=side, attn=name) for side, name in zip(("", "cross_"), names, strict=True))
    encoder = f"/{path}encoder.{layers}.{{i}}.\n{own}{feed_forward}\n"
    return encoder + f"/{path}decoder.{layers}.{{i}}. d_\n{own}{cross}{feed_forward}\n"


_OPENAI_WHISPER = (
    _whisper("", "blocks", _OPENAI_ATTENTION, ("attn", "cross_attn"), _OPENAI_FEED_FORWARD)
    + """
    /encoder.
    conv1 conv1
    conv2 conv2
    positions positional_embedding=
    last ln_post
    /decoder. d_
    words token_embedding
    positions positional_embedding=
    last ln
"""
)
_HUGGING_FACE_WHISPER = (
    _whisper("[model.]", "layers", _WHISPER_ATTENTION, ("self_attn", "encoder_attn"), _WHISPER_FEED_FORWARD)
    + """
    /[model.]encoder.
    conv1 conv1
    conv2 conv2
    positions embed_positions
    last layer_norm
    /[model.]decoder. d_
    words embed_tokens
    positions embed_positions
    last layer_norm
    /
    head? proj_out
"""
)

FAMILIES = {
    "CLIP": (
        Naming(_HUGGING_FACE_TEXTS + _HUGGING_FACE_IMAGES),
        Naming(_OPENAI_TEXTS + _openai_images("visual."), computed="^(input_resolution|context_length|vocab_size)$"),
    ),
    "CLIP's images": (Naming(_HUGGING_FACE_IMAGES), Naming(_openai_images(""))),
    "CLIP's texts": (Naming(_HUGGING_FACE_TEXTS), Naming(_OPENAI_TEXTS)),
    "Whisper": (Naming(_HUGGING_FACE_WHISPER), Naming(_OPENAI_WHISPER)),
}
