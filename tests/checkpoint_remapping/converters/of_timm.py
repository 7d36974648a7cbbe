"""What timm converts into its models: files of the authors, of OpenAI, of Meta and of Microsoft."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import timm
import torch
from torch import nn

from tests.checkpoint_remapping.converters.cases import Converter, Rules, State, replaced


def _timm(name: str, original: Any, filter_name: str = "checkpoint_filter_fn", **arguments: Any) -> Converter:
    def convert(state: State, model: nn.Module) -> State:
        function = getattr(importlib.import_module(type(model).__module__), filter_name)
        state = dict(state)
        return function(state, model) if len(inspect.signature(function).parameters) > 1 else function(state)

    if isinstance(original, tuple):
        rules: Rules = original
        original = lambda state, model: {replaced(n, rules): tensor for n, tensor in state.items()}  # noqa: E731
    return Converter(f"timm {name}", lambda: timm.create_model(name.split()[0], **arguments), convert, original)


def _less(by: int, template: str) -> Any:
    """Return a replacement with the first group less a number."""
    return lambda match: template.format(int(match[1]) - by)


def _twice(less: int, template: str) -> Any:
    return lambda match: template.format(2 * int(match[1]) - less)


_HEAD = ((r"^head\.norm", "norm"), (r"^head\.fc", "head"))
_CONVNEXT = (
    *_HEAD, (r"^stem\.", "downsample_layers.0."), (r"stages\.(\d+)\.blocks\.", r"stages.\1."),
    (r"stages\.(\d+)\.downsample", r"downsample_layers.\1"), ("conv_dw", "dwconv"),
    (r"mlp\.grn\.weight", "grn.gamma"), (r"mlp\.grn\.bias", "grn.beta"), (r"mlp\.fc", "pwconv"),
)  # fmt: skip
_SWIN = ((r"layers\.(\d+)\.downsample", _less(1, "layers.{}.downsample")), (r"^head\.fc", "head"))
_PVT = (
    (r"^patch_embed\.", "patch_embed1."), (r"stages\.(\d+)\.downsample", _less(-1, "patch_embed{}")),
    (r"\.dwconv\.", ".dwconv.dwconv."), (r"stages\.(\d+)\.blocks\.", _less(-1, "block{}.")),
    (r"stages\.(\d+)\.norm", _less(-1, "norm{}")),
)  # fmt: skip
_EFFICIENTFORMER = (
    (r"stem\.(conv|norm)(\d)", lambda m: f"patch_embed.{3 * int(m[2]) - 3 + (m[1] == 'norm')}"),
    (r"stages\.(\d+)\.blocks\.", _twice(0, "network.{}.")),
    (r"stages\.(\d+)\.downsample\.conv", _twice(1, "network.{}.proj")),
    (r"stages\.(\d+)\.downsample\.", _twice(1, "network.{}.")),
    (r"ls(\d)\.gamma", r"layer_scale_\1"), ("head_dist", "dist_head"),
)  # fmt: skip
_FASTVIT = (
    ("stem", "patch_embed"), ("conv_kxk", "rbr_conv"), ("conv_scale", "rbr_scale"), ("identity", "rbr_skip"),
    ("final_conv", "conv_exp"), ("large_conv", "lkb_origin"), ("mlp", "convffn"), (r"se\.fc1", "se.reduce"),
    (r"se\.fc2", "se.expand"), (r"^head\.fc", "head"), (r"(layer_scale(_\d)?)\.gamma", r"\1"),
)  # fmt: skip
_POOLFORMER = (
    *_HEAD, (r"^stem\.conv", "patch_embed.proj"), (r"layer_scale(\d)\.scale", r"layer_scale_\1"),
    (r"stages\.(\d+)\.downsample\.conv", _twice(1, "network.{}.proj")),
    (r"stages\.(\d+)\.blocks\.", _twice(0, "network.{}.")),
)  # fmt: skip
_METAFORMER = (
    *_HEAD, (r"^stem\.norm", "downsample_layers.0.post_norm"), (r"^stem\.", "downsample_layers.0."),
    (r"stages\.(\d+)\.downsample\.norm", r"downsample_layers.\1.pre_norm"),
    (r"stages\.(\d+)\.downsample", r"downsample_layers.\1"), (r"stages\.(\d+)\.blocks\.", r"stages.\1."),
)  # fmt: skip
_RESMLP = (
    (r"^stem\.", "patch_embed."), (r"linear_tokens\.", "attn."), (r"mlp_channels\.", "mlp."),
    (r"\.ls(\d)", r".gamma_\1"),
)  # fmt: skip
_SWIFTFORMER = (
    (r"^stem\.", "patch_embed."), (r"^head_dist", "dist_head"), (r"attn\.proj", "attn.Proj"),
    (r"(layer_scale(_\d)?)\.gamma", r"\1"), (r"stages\.(\d+)\.blocks\.", _twice(0, "network.{}.")),
    (r"stages\.(\d+)\.downsample\.", _twice(1, "network.{}.")),
)  # fmt: skip
_TNT = (
    ("patch_pos", "outer_pos"), ("pixel_pos", "inner_pos"), ("pixel_embed", "patch_embed"),
    ("norm1_proj", "proj_norm1"), ("norm2_proj", "proj_norm2"), ("norm_in", "inner_norm1"), ("attn_in", "inner_attn"),
    ("norm_mlp_in", "inner_norm2"), ("mlp_in", "inner_mlp"), ("norm_out", "outer_norm1"), ("attn_out", "outer_attn"),
    ("norm_mlp", "outer_norm2"), (r"blocks\.(\d+)\.mlp\.", r"blocks.\1.outer_mlp."),
)  # fmt: skip
_MAMBAOUT = (
    (r"^head\.norm\.", "norm."), (r"^head\.fc\.", "head.fc2."), (r"^head\.pre_logits\.fc\.", "head.fc1."),
    (r"^head\.pre_logits\.norm\.", "head.norm."), (r"^stem\.", "downsample_layers.0."),
    (r"stages\.(\d+)\.blocks\.", r"stages.\1."), (r"stages\.(\d+)\.downsample", r"downsample_layers.\1"),
)  # fmt: skip
_DAVIT = (
    (r"^stem\.", "stages.0.downsample."), (r"downsample\.conv", "downsample.proj"),
    (r"stages\.(\d+)\.downsample", r"patch_embeds.\1"), (r"stages\.(\d+)\.blocks", r"main_blocks.\1"),
    (r"^head\.fc", "head"), (r"^head\.norm", "norms"), ("cpe1", "cpe.0"), ("cpe2", "cpe.1"),
)  # fmt: skip
_AIMV2 = (
    (r"^norm\.", "trunk.post_trunk_norm."), (r"norm(\d)", r"norm_\1"), (r"^patch_embed\.", "preprocessor.patchifier."),
    ("^pos_embed", "preprocessor.pos_embed"), (r"^blocks\.", "trunk.blocks."), (r"mlp\.fc1_g", "mlp.fc1"),
    (r"mlp\.fc1_x", "mlp.fc3"),
)  # fmt: skip
_CLIP = (
    (r"^head\.weight$", "proj"), ("^cls_token$", "class_embedding"), ("^pos_embed$", "positional_embedding"),
    (r"patch_embed\.proj", "conv1"), (r"^norm_pre", "ln_pre"), (r"^norm\.", "ln_post."),
    (r"^blocks\.", "transformer.resblocks."), (r"\.norm(\d)", r".ln_\1"), (r"qkv\.", "in_proj_"),
    (r"attn\.proj", "attn.out_proj"), (r"mlp\.fc1", "mlp.c_fc"), (r"mlp\.fc2", "mlp.c_proj"),
    (r"gamma_(\d)", r"ls_\1.gamma"),
)  # fmt: skip
_CLIP_SHAPES = {"proj": lambda v: v.T, "class_embedding": lambda v: v[0, 0], "positional_embedding": lambda v: v[0]}
_BEIT_3 = (
    (r"^patch_embed\.", "beit3.vision_embed."), (r"^norm\.", "beit3.encoder.layer_norm.A."),
    (r"blocks\.(\d+)\.", r"beit3.encoder.layers.\1."), (r"\.norm1\.", ".self_attn_layer_norm.A."),
    (r"\.norm2\.", ".final_layer_norm.A."), (r"mlp\.norm\.", "ffn.A.ffn_layernorm."), (r"mlp\.", "ffn.A."),
    (r"attn\.norm\.", "self_attn.inner_attn_ln.A."), (r"attn\.proj\.", "self_attn.out_proj.A."),
    ("^cls_token", "beit3.vision_embed.cls_token"),
)  # fmt: skip


def _convnext_v2(state: State, model: nn.Module) -> State:
    names = {replaced(name, _CONVNEXT): tensor for name, tensor in state.items()}
    return {name: tensor.reshape(1, 1, 1, -1) if "grn" in name else tensor for name, tensor in names.items()}


def _fastvit(state: State, model: nn.Module) -> State:
    parts = {"downsample.proj": "proj", "pos_emb.pos_enc": "pe", "blocks": ""}
    numbers = [
        (i, part)
        for i in range(len(model.stages))
        for part in parts
        if any(name.startswith(f"stages.{i}.{part}") for name in state)
    ]
    rules = [
        (rf"stages\.{i}\.{part}", f"network.{number}" + f".{parts[part]}" * bool(parts[part]))
        for number, (i, part) in enumerate(numbers)
    ]
    return {replaced(name, (*rules, *_FASTVIT)): tensor for name, tensor in state.items()}


def _mvit(state: State, model: nn.Module) -> State:
    starts = [sum(model.depths[:i]) for i in range(len(model.depths))]
    rules = (
        (r"stages\.(\d+)\.blocks\.(\d+)", lambda m: f"blocks.{starts[int(m[1])] + int(m[2])}"),
        (r"shortcut_proj_(attn|mlp)", "proj"),
        (r"head\.fc", "head.projection"),
    )
    return {replaced(name, rules): tensor for name, tensor in state.items()}


def _resmlp(state: State, model: nn.Module) -> State:
    names = {replaced(name, _RESMLP): tensor for name, tensor in state.items()}
    return {n: t.flatten() if n.endswith(("alpha", "beta")) else t for n, t in names.items()}


def _clip(state: State, model: nn.Module) -> State:
    names = {replaced(name, _CLIP): tensor for name, tensor in state.items() if name != "head.bias"}
    return {f"visual.{n}": _CLIP_SHAPES[n](t) if n in _CLIP_SHAPES else t for n, t in names.items()}


def _xcit(state: State, model: nn.Module) -> State:
    file: State = {}
    for name, tensor in state.items():
        part = re.fullmatch(r"(cls_attn_blocks\.\d+\.attn)\.([qkv])(\..*)", name)
        new = f"{part[1]}.qkv{part[3]}" if part else name.replace("pos_embed.", "pos_embeder.")
        file[new] = torch.cat([file[new], tensor]) if new in file else tensor
    return file


def _beit_3(state: State, model: nn.Module) -> State:
    file: State = {}
    for name, tensor in state.items():
        fused = re.fullmatch(r"blocks\.(\d+)\.attn\.qkv\.(.*)", name)
        if fused:
            for part, values in zip("qkv", tensor.chunk(3), strict=True):
                file[f"beit3.encoder.layers.{fused[1]}.self_attn.{part}_proj.A.{fused[2]}"] = values
        elif name == "pos_embed":  # of two more positions
            file["beit3.encoder.embed_positions.A.weight"] = torch.cat([torch.rand(2, tensor.shape[-1]), tensor[0]])
        else:
            file[replaced(name, _BEIT_3)] = tensor
    return file


def _sequencer(state: State, model: nn.Module) -> State:
    rules = (
        (r"stages\.(\d+)\.downsample", lambda m: f"blocks.{int(m[1]) - 1}.{len(model.stages[int(m[1]) - 1].blocks)}"),
        (r"stages\.(\d+)\.blocks\.", r"blocks.\1."),
        (r"^head\.fc", "head"),
    )
    return {replaced(name, rules): tensor for name, tensor in state.items()}


def _naflex(state: State, model: nn.Module) -> State:
    rules = ((r"^embeds\.(cls_token|reg_token|pos_embed)$", r"\1"), (r"^embeds\.", "patch_embed."))
    file = {replaced(name, rules): tensor for name, tensor in state.items()}
    patches = file["patch_embed.proj.weight"]
    file["patch_embed.proj.weight"] = patches.reshape(-1, 16, 16, 3).permute(0, 3, 1, 2).contiguous()
    return file | {"pos_embed": file["pos_embed"].flatten(1, 2)}


def _open_clip(state: State, model: nn.Module) -> State:
    rules = ((r"^(?!head)", "visual.trunk."), (r"^head\.", "visual.head.proj."))
    return {replaced(name, rules): tensor for name, tensor in state.items() if name != "head.bias"}


_VIT = {"embed_dim": 48, "depth": 3, "num_heads": 3}
_HIERARCHY = {"embed_dim": 24}
CONVERTERS = [
    _timm("convnext_tiny", _CONVNEXT, depths=(1, 1, 3, 1), dims=(24, 48, 96, 192)),
    _timm("convnextv2_atto", _convnext_v2),
    _timm("edgenext_xx_small", _CONVNEXT),
    _timm("swin_tiny_patch4_window7_224", _SWIN, **_HIERARCHY),
    _timm("swinv2_tiny_window8_256", _SWIN, **_HIERARCHY),
    _timm("swinv2_cr_tiny_224", ((r"^head\.fc", "head"),), **_HIERARCHY),
    _timm("pvt_v2_b0", _PVT),
    _timm("pvt_v2_b2_li", _PVT),
    _timm("efficientformer_l1", _EFFICIENTFORMER),
    _timm("fastvit_t8", _fastvit),
    _timm("fastvit_sa12", _fastvit),
    _timm("mvitv2_tiny", _mvit),
    _timm("poolformer_s12", _POOLFORMER),
    _timm("caformer_s18", _METAFORMER),
    _timm("poolformerv2_s12", _METAFORMER),
    _timm("resmlp_12_224", _resmlp),
    _timm("swiftformer_xs", _SWIFTFORMER),
    _timm("tnt_s_legacy_patch16_224", _TNT),
    _timm("vit_base_patch16_clip_224", _clip, **_VIT),
    _timm("vit_pe_core_base_patch16_224", _clip, **_VIT),
    _timm("xcit_nano_12_p16_224", _xcit),
    _timm("beit3_base_patch16_224", _beit_3, **_VIT),
    _timm("hiera_tiny_224", ((r"^head\.fc", "head.projection"), (r"^head\.norm", "norm"))),
    _timm("sequencer2d_s", _sequencer),
    _timm("mambaout_femto", _MAMBAOUT),
    _timm("davit_tiny", _DAVIT, embed_dims=(24, 48, 96, 192)),
    _timm("aimv2_large_patch14_224", _AIMV2, **_VIT),
    _timm("naflexvit_base_patch16_gap", _naflex),
    _timm("vit_small_patch16_224 of OpenCLIP", _open_clip, **_VIT),
]
