"""Convolutional networks: ConvNeXt, of its authors, of timm and of Hugging Face."""

from __future__ import annotations

from lightning_tricks.checkpoint_remapping.core.conversions.naming import Naming

_ORIGINAL = """
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
_TIMM = """
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
_HUGGING_FACE = """
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

FAMILIES = {"ConvNeXt": (Naming(_ORIGINAL), Naming(_TIMM), Naming(_HUGGING_FACE))}
