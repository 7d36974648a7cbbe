"""Convolutional networks: ConvNeXt of its authors, timm and Hugging Face, and the VAE and UNet of Stable Diffusion."""

from __future__ import annotations

from lightning_tricks.checkpoint_remapping.core.matching.conversion import Naming

_CONVNEXT = """
    /
    patches downsample_layers.0.0
    first downsample_layers.0.1
    last? norm
    head? head
    /downsample_layers.{i}. down_
    norm 0
    conv 1
    /stages.{i}.{j}.
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
    /stages.{i}.blocks.{j}.
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
    /[convnext.|convnextv2.]encoder.stages.{i}.layers.{j}.
    scale? layer_scale_parameter=
    depthwise dwconv
    norm layernorm
    wide pwconv1
    grn? grn
    narrow pwconv2
"""

# Stable Diffusion


def _blocks(role: str, path: str, shortcut: str, time: str = "") -> str:
    """Return the names of residual blocks; a block has a shortcut only where its channels change."""
    embedding = f"\ntime {time}" if time else ""
    return f"""
    /{path}. {role}_
    norm1 norm1
    conv1 conv1
    norm2 norm2
    conv2 conv2
    shortcut? {shortcut}{embedding}
"""


# The VAE: CompVis counts the levels of the decoder from the finest, diffusers from the coarsest


def _compvis_side(side: str, levels: str, resize: str, role: str) -> str:
    attention = "\n".join(f"{name} {name}" for name in ("norm", "q", "k", "v", "proj_out"))
    return f"""
    {_blocks(f"{role}_level", f"{side}.{levels}.block.{{j}}", "nin_shortcut")}
    {_blocks(f"{role}_first", f"{side}.mid.block_1", "nin_shortcut")}
    {_blocks(f"{role}_second", f"{side}.mid.block_2", "nin_shortcut")}
    /{side}.mid.attn_1. {role}_
    {attention}
    /{side}. {role}_
    resize? {levels}.{resize}.conv
    conv_in conv_in
    norm_out norm_out
    conv_out conv_out
"""


def _diffusers_side(side: str, levels: str, resize: str, role: str, attention: str) -> str:
    return f"""
    {_blocks(f"{role}_level", f"{side}.{levels}.{{i}}.resnets.{{j}}", "conv_shortcut")}
    {_blocks(f"{role}_first", f"{side}.mid_block.resnets.0", "conv_shortcut")}
    {_blocks(f"{role}_second", f"{side}.mid_block.resnets.1", "conv_shortcut")}
    /{side}.mid_block.attentions.0. {role}_
    norm group_norm
    {attention}
    /{side}. {role}_
    resize? {levels}.{{i}}.{resize}.0.conv
    conv_in conv_in
    norm_out conv_norm_out
    conv_out conv_out
"""


_CONVOLUTIONS = "\n/\nquant? quant_conv\npost_quant? post_quant_conv\n"
_COMPVIS_VAE = (
    _compvis_side("encoder", "down.{i}", "downsample", "e")
    + _compvis_side("decoder", "up.{r}", "upsample", "d")
    + _CONVOLUTIONS
)


def _diffusers_vae(attention: str) -> Naming:
    encoder = _diffusers_side("encoder", "down_blocks", "downsamplers", "e", attention)
    return Naming(encoder + _diffusers_side("decoder", "up_blocks", "upsamplers", "d", attention) + _CONVOLUTIONS)


# The UNet: CompVis numbers all blocks of a side through, with the one that changes the size as the last step of a level


def _transformer(role: str, path: str) -> str:
    attentions = (
        f"{attn}_{name} {attn}.to_{name}{last}" for attn in ("attn1", "attn2")
        for name, last in (("q", ""), ("k", ""), ("v", ""), ("out", ".0"))
    )  # fmt: skip
    norms = (f"norm{n} norm{n}" for n in (1, 2, 3))
    inner = "\n".join((*attentions, *norms, "ff1 ff.net.0.proj", "ff2 ff.net.2"))
    return f"""
    /{path}. {role}_
    norm? norm
    proj_in? proj_in
    proj_out? proj_out
    /{path}.transformer_blocks.{{k}}. {role}_
    {inner.replace(" ", "? ")}
"""


def _compvis_blocks(role: str, path: str) -> str:
    return f"""
    /{path}. {role}_
    norm1 in_layers.0
    conv1 in_layers.2
    time emb_layers.1
    norm2 out_layers.0
    conv2 out_layers.3
    shortcut? skip_connection
"""


_COMPVIS_UNET = f"""
    time1 time_embed.0
    time2 time_embed.2
    size1? label_emb.0.0
    size2? label_emb.0.2
    conv_in input_blocks.0.0
    down? input_blocks.{{m}}.0.op
    up? output_blocks.{{m-1}}.1.conv
    up? output_blocks.{{m-1}}.2.conv
    norm_out out.0
    conv_out out.2
    {_compvis_blocks("input", "input_blocks.{n+1}.0")}
    {_transformer("input", "input_blocks.{n+1}.1")}
    {_compvis_blocks("first", "middle_block.0")}
    {_transformer("middle", "middle_block.1")}
    {_compvis_blocks("second", "middle_block.2")}
    {_compvis_blocks("output", "output_blocks.{n}.0")}
    {_transformer("output", "output_blocks.{n}.1")}
"""


def _diffusers_blocks(role: str, path: str) -> str:
    return _blocks(role, path, "conv_shortcut", "time_emb_proj")


_DIFFUSERS_UNET = f"""
    time1 time_embedding.linear_1
    time2 time_embedding.linear_2
    size1? add_embedding.linear_1
    size2? add_embedding.linear_2
    conv_in conv_in
    down? down_blocks.{{i}}.downsamplers.0.conv
    up? up_blocks.{{i}}.upsamplers.0.conv
    norm_out conv_norm_out
    conv_out conv_out
    {_diffusers_blocks("input", "down_blocks.{i}.resnets.{j}")}
    {_transformer("input", "down_blocks.{i}.attentions.{j}")}
    {_diffusers_blocks("first", "mid_block.resnets.0")}
    {_transformer("middle", "mid_block.attentions.0")}
    {_diffusers_blocks("second", "mid_block.resnets.1")}
    {_diffusers_blocks("output", "up_blocks.{i}.resnets.{j}")}
    {_transformer("output", "up_blocks.{i}.attentions.{j}")}
"""

FAMILIES = {
    "ConvNeXt": (Naming(_CONVNEXT), Naming(_TIMM_CONVNEXT), Naming(_HUGGING_FACE_CONVNEXT)),
    "Stable Diffusion's VAE": (
        Naming(_COMPVIS_VAE),
        _diffusers_vae("q to_q\nk to_k\nv to_v\nproj_out to_out.0"),
        _diffusers_vae("q query\nk key\nv value\nproj_out proj_attn"),
    ),
    "Stable Diffusion's UNet": (Naming(_COMPVIS_UNET), Naming(_DIFFUSERS_UNET)),
}
