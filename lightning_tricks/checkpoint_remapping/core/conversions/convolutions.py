"""Convolutional networks: ConvNeXt of its authors, timm and Hugging Face."""

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

FAMILIES = {
    "ConvNeXt": (Naming(_CONVNEXT), Naming(_TIMM_CONVNEXT), Naming(_HUGGING_FACE_CONVNEXT)),
}
