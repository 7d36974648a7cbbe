"""What the scripts in transformers 4 convert into its models, which 5 has no more: imported where it is installed."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import MagicMock

import torch
import transformers
from torch import nn

from tests.checkpoint_remapping.converters.cases import Converter, Rules, State, probed, replaced, replacements, undone

# What scripts import to run the original, which is not done here
_UNUSED = {"classy_vision", "datasets", "decord", "gdown", "torchaudio", "vissl"}


class _Unused(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        unused = name.partition(".")[0] in _UNUSED
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if unused else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> Any:
        module = MagicMock()
        module.__spec__, module.__name__, module.__path__ = spec, spec.name, []
        return module

    def exec_module(self, module: Any) -> None:
        pass


def _script(path: str) -> Any:
    if not any(isinstance(finder, _Unused) for finder in sys.meta_path):
        sys.meta_path.append(_Unused())
    folder, _, name = path.partition(".")
    return importlib.import_module(f"transformers.models.{folder}.convert_{name}")


def _model(name: str, config: str = "", **arguments: Any) -> Callable[[], nn.Module]:
    config = config or re.split(r"For|Model", name)[0]
    return lambda: getattr(transformers, name)(getattr(transformers, f"{config}Config")(**arguments))


def _table(
    name: str,
    model: Callable[[], nn.Module],
    path: str,
    read: Callable[[Any, State, Any], object] = lambda script, state, config: None,
    keys: Callable[[Any, Any], Any] = lambda script, config: script.create_rename_keys(config),
    prefix: Callable[[str], str] = lambda name: "",
) -> Converter:
    """Return a script with a table of names, `create_rename_keys`."""

    def convert(state: State, model: nn.Module) -> State:
        script = _script(path)
        for old, new in keys(script, model.config):
            tensor = state.pop(old, None)
            if tensor is not None:  # the tables are of one size of a backbone
                state[new] = tensor
        read(script, state, model.config)
        return {prefix(name) + name: tensor for name, tensor in state.items()}

    return Converter(f"transformers {name}", model, convert, probed(convert), "cpu")


def _read_qkv(script: Any, state: State, config: Any) -> None:
    script.read_in_q_k_v(state, config)


def _read_kv(script: Any, state: State, config: Any) -> None:
    script.read_in_k_v(state, config)


def _as_base(script: Any, config: Any) -> Any:
    return script.create_rename_keys(config, True)


def _read_qkv_of_base(script: Any, state: State, config: Any) -> None:
    script.read_in_q_k_v(state, config, True)


def _names(
    name: str,
    model: Callable[[], nn.Module],
    path: str,
    function: str = "convert_state_dict",
    fused: Rules = (),
    first: Rules = (),
    mapping: str | Sequence[str] = "rename_key",
    more: Sequence[tuple[str, str]] = (),
    taken: str = "",
    prefix: Callable[[str], str] = lambda name: "",
) -> Converter:
    """Return a script that replaces parts of names, by a function of one name or of all tensors."""

    def convert(state: State, model: nn.Module) -> State:
        call = getattr(_script(path), function)
        if function in ("rename_key", "rename_state_dict_key"):
            new = {call(name): tensor for name, tensor in state.items()}
        elif function == "create_rename_keys":
            new = {to: state[name] for name, to in call(state)}
        else:
            argument = list(inspect.signature(call).parameters)[1:2]
            arguments = {"model": (model,), "config": (model.config,)}.get("".join(argument), ())
            always = {taken: torch.zeros(1)} if taken else {}  # by the function, whatever else is there
            new = call(always | state, *arguments)
        return {prefix(name) + name: tensor for name, tensor in new.items()}

    def original(state: State, model: nn.Module) -> State:
        found = getattr(_script(path), mapping, None) if mapping else None
        pairs = list(found.items()) if isinstance(found, dict) else found if isinstance(found, list) else ()
        pairs = [(old, new) for old, new in pairs] or (replacements(found) if found else [])
        return undone(convert, [*pairs, *more], fused, first)(state, model)

    return Converter(f"transformers {name}", model, convert, original, "cpu")


def _segformer(name: str, model: Callable[[], nn.Module], path: str, root: str, start: str) -> Converter:
    """Return a script that counts from 0 what the original counts from 1."""
    rules: Rules = (
        (rf"^{root}\.encoder\.", start),
        (r"patch_embeddings\.(\d)\.", lambda m: f"patch_embed{int(m[1]) + 1}."),
        (r"(^|encoder\.)layer_norm\.(\d)\.", lambda m: f"{m[1]}norm{int(m[2]) + 1}."),
        (r"block\.(\d)\.", lambda m: f"block{int(m[1]) + 1}."), (r"layer_norm_(\d)", r"norm\1"), ("layer_norm", "norm"),
        (r"attention\.self\.query", "attn.q"), (r"attention\.self\.(key|value)", "attn.kv"),
        (r"attention\.output\.dense", "attn.proj"), (r"attention\.self", "attn"), ("dense1", "fc1"), ("dense2", "fc2"),
        (r"^classifier", "head"), (r"^head\.head", "module.last_layer_depth"), ("convolutional_layer", "conv"),
        (r"stages\.0\.convolution", "stages.bot_conv"), (r"stages\.(\d)\.convolution", r"stages.skip_conv\1"),
        (r"stages\.(\d)\.fusion", r"stages.fusion\1"), (r"^decoder\.stages", "module.decoder"),
    )  # fmt: skip

    def convert(state: State, model: nn.Module) -> State:
        script = _script(path)
        state = script.rename_keys(state, *((True,) if not start else ()))
        script.read_in_k_v(state, model.config)
        return state

    def original(state: State, model: nn.Module) -> State:
        file: State = {}
        for name, tensor in state.items():  # a key is before its value
            new = replaced(name, rules)
            file[new] = torch.cat([file[new], tensor]) if new in file else tensor
        return file

    return Converter(f"transformers {name}", model, convert, original, "cpu")


_SMALL = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 192}
_VIT = {"image_size": 32, "patch_size": 8, **_SMALL}
_DINO = {
    "image_size": 28, "patch_size": 14, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3,
}  # fmt: skip
_STAGES = {"depths": [2, 2, 3, 2], "hidden_sizes": [16, 32, 48, 64]}
_SEGFORMER = {"depths": [2, 2, 2, 2], "hidden_sizes": [16, 32, 48, 64], "num_attention_heads": [1, 2, 2, 4]}
_SWIN = {"image_size": 32, "embed_dim": 24, "depths": [2, 2, 2, 2], "num_heads": [1, 2, 3, 6], "window_size": 4}
_TWO_SIDES = {
    "vocab_size": 99, "d_model": 48, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 3,
    "decoder_attention_heads": 3, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96,
}  # fmt: skip
_DECODER = {
    "decoder_hidden_size": 32, "decoder_num_hidden_layers": 2, "decoder_num_attention_heads": 2,
    "decoder_intermediate_size": 64,
}  # fmt: skip
_PART = r"(?P<part>query|key|value|q_proj|k_proj|v_proj)"
_SWIN_FUSED = (
    rf"swin(?:v2)?\.encoder\.layers\.(\d+)\.blocks\.(\d+)\.attention\.self\.{_PART}\.",
    r"layers.\1.blocks.\2.attn.qkv.",
)
_SWIN_FIRST = ((r"^swin(v2)?\.", ""), (r"^encoder\.", ""), (r"^layernorm", "norm"))
_TRANSFORMER_NAMES = (r"encoder\.layer\.(\d+)\.", r"transformer_\1.")
_CONVNEXT = (
    (r"^convnext(v2)?\.", ""), (r"^embeddings\.patch_embeddings", "downsample_layers.0.0"),
    (r"^embeddings\.layernorm", "downsample_layers.0.1"), (r"^encoder\.stages\.(\d+)\.layers\.", r"stages.\1."),
    (r"^encoder\.stages\.(\d+)\.downsampling_layer", r"downsample_layers.\1"), ("layernorm", "norm"),
    ("layer_scale_parameter", "gamma"), (r"grn\.weight", "grn.gamma"), (r"grn\.bias", "grn.beta"),
    (r"^classifier", "head"),
)  # fmt: skip
_MOBILEVIT = (
    (r"^mobilevit\.", ""), (r"encoder\.layer\.(\d+)\.downsampling_layer\.", r"encoder.layer.\1.0."),
    (r"encoder\.layer\.([01])\.layer\.", r"encoder.layer.\1."),
    (r"encoder\.layer\.(\d+)\.", lambda m: f"layer_{int(m[1]) + 1}."), (r"^conv_stem", "conv_1"),
    (r"^(layer_[3-5])\.(conv|transformer|layernorm|fusion)", r"\1.1.\2"),
    (r"\.conv_kxk\.", ".local_rep.conv_3x3."), (r"\.conv_1x1\.", ".local_rep.conv_1x1."),
    (r"\.conv_projection\.", ".conv_proj."), (r"\.convolution\.", ".block.conv."),
    (r"\.normalization\.", ".block.norm."), (r"transformer\.layer\.", "global_rep."),
    (r"^(layer_3\.1)\.layernorm\.", r"\1.global_rep.2."), (r"^(layer_4\.1)\.layernorm\.", r"\1.global_rep.4."),
    (r"^(layer_5\.1)\.layernorm\.", r"\1.global_rep.3."), (r"^classifier\.", "classifier.fc."),
    ("expand_1x1", "exp_1x1"), ("reduce_1x1", "red_1x1"),
)  # fmt: skip
_VIDEO_MAE = (
    (r"^videomae\.encoder\.layer", "encoder.blocks"), (r"^decoder\.decoder_layers", "decoder.blocks"),
    (r"attention\.attention\.(q|v)_bias", r"attn.\1_bias"), (r"attention\.output\.dense", "attn.proj"),
    ("layernorm_before", "norm1"), ("layernorm_after", "norm2"), (r"intermediate\.dense", "mlp.fc1"),
    (r"output\.dense", "mlp.fc2"),
)  # fmt: skip
_GLM = (
    (r"^model\.embed_tokens\.", "transformer.embedding.word_embeddings."), (r"^lm_head\.", "transformer.output_layer."),
    (r"^model\.norm\.", "transformer.encoder.final_layernorm."), (r"^model\.layers\.", "transformer.encoder.layers."),
    (r"self_attn\.o_proj", "self_attention.dense"), (r"mlp\.gate_up_proj", "mlp.dense_h_to_4h"),
    (r"mlp\.down_proj", "mlp.dense_4h_to_h"),
)  # fmt: skip
_LLAVA = (
    (r"^vision_tower\.", "model.vision_tower.vision_tower."), (r"^language_model\.", ""),
    (r"^multi_modal_projector\.linear_(\d)", lambda m: f"model.mm_projector.{2 * int(m[1]) - 2}"),
)  # fmt: skip
_GROUP_VIT = {
    "text_config": {"vocab_size": 99, "max_position_embeddings": 16, **_SMALL},
    "vision_config": {
        "hidden_size": 48, "intermediate_size": 96, "depths": [2, 1, 1], "num_group_tokens": [8, 4, 0],
        "num_output_groups": [8, 4, 0], "num_hidden_layers": 4, "num_attention_heads": 3, "image_size": 32,
        "patch_size": 8,
    },
    "projection_dim": 24, "projection_intermediate_dim": 32,
}  # fmt: skip
_SAM = {
    "vision_config": {
        "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 64, "patch_size": 16,
        "output_channels": 32, "global_attn_indexes": [1], "window_size": 2,
    },
    "prompt_encoder_config": {"hidden_size": 32, "image_size": 64, "mask_input_channels": 8},
    "mask_decoder_config": {"hidden_size": 32, "mlp_dim": 64, "num_attention_heads": 2, "iou_head_hidden_dim": 32},
}  # fmt: skip


def _depth_anything() -> nn.Module:
    backbone = transformers.Dinov2Config(
        **{**_DINO, "num_hidden_layers": 4}, out_indices=[1, 2, 3, 4], apply_layernorm=True, reshape_hidden_states=False
    )
    config = transformers.DepthAnythingConfig(
        backbone, reassemble_hidden_size=48, neck_hidden_sizes=[16, 32, 48, 64], fusion_hidden_size=16
    )
    return transformers.DepthAnythingForDepthEstimation(config)


def _detr() -> nn.Module:
    sizes = {"d_model": 256, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_queries": 10}
    backbone = transformers.ResNetConfig(hidden_sizes=[64, 128, 256, 512], out_features=["stage4"])
    return transformers.DetrForObjectDetection(
        transformers.DetrConfig(
            use_timm_backbone=False, use_pretrained_backbone=False, backbone_config=backbone, **sizes
        )
    )


def _llava() -> nn.Module:
    parts = transformers.CLIPVisionConfig(**_VIT), transformers.LlamaConfig(vocab_size=99, **_SMALL)
    return transformers.LlavaForConditionalGeneration(transformers.LlavaConfig(*parts))


def _convnext(name: str, model: str, folder: str) -> Converter:
    def prefix(name: str) -> str:
        return "" if name.startswith("classifier") else f"{folder}."

    built = _model(f"{model}ForImageClassification", **_STAGES)
    return _names(name, built, f"{folder}.{folder}_to_pytorch", "rename_key", (), _CONVNEXT, "", prefix=prefix)


def _masked(name: str, script: str) -> Converter:
    first = ((rf"^{name.lower()}\.", ""), _TRANSFORMER_NAMES)
    model = _model(f"{name}ForMaskedLM", vocab_size=99, **_SMALL)
    return _names(name, model, f"{name.lower()}.{script}", "rename_key", first=first)


CONVERTERS = [
    _table("ViT of timm", _model("ViTForImageClassification", **_VIT), "vit.vit_timm_to_pytorch", _read_qkv),
    _table(
        "ViT of DINO",
        lambda: transformers.ViTModel(transformers.ViTConfig(**_VIT), add_pooling_layer=False),
        "vit.dino_to_pytorch",
        _read_qkv_of_base,
        _as_base,
    ),
    _table("ViT MSN", _model("ViTMSNModel", **_VIT), "vit_msn.msn_to_pytorch", _read_qkv_of_base, _as_base),
    _table(
        "DeiT", _model("DeiTForImageClassificationWithTeacher", "DeiT", **_VIT), "deit.deit_timm_to_pytorch", _read_qkv
    ),
    _table("DINOv2", _model("Dinov2Model", **_DINO), "dinov2.dinov2_to_hf", _read_qkv),
    _table(
        "BEiT",
        _model("BeitForImageClassification", use_relative_position_bias=True, use_mean_pooling=True, **_VIT),
        "beit.beit_unilm_to_pytorch",
        _read_qkv,
    ),
    _table(
        "DiT",
        _model("BeitForImageClassification", use_absolute_position_embeddings=True, use_mean_pooling=True, **_VIT),
        "dit.dit_unilm_to_pytorch",
        _read_qkv,
    ),
    _table(
        "data2vec of images",
        _model("Data2VecVisionForImageClassification", use_relative_position_bias=True, use_mean_pooling=True, **_VIT),
        "data2vec.data2vec_vision_original_pytorch_checkpoint_to_pytorch",
        lambda script, state, config: script.read_in_q_k_v(state, config, hf_prefix="data2vec_vision."),
        lambda script, config: script.create_rename_keys(config, hf_prefix="data2vec_vision."),
    ),
    _table(
        "PVT", _model("PvtForImageClassification", **{**_SEGFORMER, "image_size": 64}), "pvt.pvt_to_pytorch", _read_kv
    ),
    _table("PVT v2", _model("PvtV2ForImageClassification", **_SEGFORMER), "pvt_v2.pvt_v2_to_pytorch", _read_kv),
    _table(
        "Hiera",
        _model(
            "HieraForImageClassification",
            image_size=[64, 64],
            embed_dim=24,
            depths=[1, 2, 3, 1],
            num_heads=[1, 2, 4, 8],
        ),
        "hiera.hiera_to_hf",
        keys=lambda script, config: script.create_rename_keys(config, False, False),
    ),
    _table(
        "ViLT",
        _model("ViltForQuestionAnswering", vocab_size=99, max_position_embeddings=20, **_VIT),
        "vilt.vilt_original_to_pytorch",
        _read_qkv,
        lambda script, config: script.create_rename_keys(config, vqa_model=True),
    ),
    _table("Depth Anything", _depth_anything, "depth_anything.depth_anything_to_hf", _read_qkv),
    _table(
        "SegGPT",
        _model(
            "SegGptForImageSegmentation",
            image_size=(32, 16),
            patch_size=8,
            hidden_size=48,
            num_hidden_layers=4,
            num_attention_heads=3,
            merge_index=0,
            intermediate_hidden_state_indices=[1, 2, 3],
            pretrain_image_size=16,
        ),
        "seggpt.seggpt_to_hf",
    ),
    _table(
        "DETR without timm",
        _detr,
        "detr.detr_to_pytorch",
        lambda script, state, config: script.read_in_q_k_v(state),
        prefix=lambda name: "" if name.startswith(("class_labels", "bbox_pred")) else "model.",
    ),
    _convnext("ConvNeXt", "ConvNext", "convnext"),
    _convnext("ConvNeXt V2", "ConvNextV2", "convnextv2"),
    _names(
        "BiT",
        _model("BitForImageClassification", embedding_size=16, num_groups=2, **_STAGES),
        "bit.bit_to_pytorch",
        "rename_key",
        first=((r"^bit\.encoder\.", ""), (r"^bit\.norm", "norm")),
    ),
    _masked("Mra", "mra_pytorch_to_pytorch"),
    _masked("Yoso", "yoso_pytorch_to_pytorch"),
    _masked("Nystromformer", "nystromformer_original_pytorch_checkpoint_to_pytorch"),
    _names(
        "Swin of timm",
        _model("SwinForImageClassification", **_SWIN),
        "swin.swin_timm_to_pytorch",
        fused=[(f"{_SWIN_FUSED[0]}(weight|bias)", rf"{_SWIN_FUSED[1]}\4")],
        first=_SWIN_FIRST,
    ),
    _names(
        "Swin v2 of timm",
        _model("Swinv2ForImageClassification", **_SWIN),
        "swinv2.swinv2_timm_to_pytorch",
        fused=[(f"{_SWIN_FUSED[0]}(weight)", rf"{_SWIN_FUSED[1]}\4")],
        first=(
            *_SWIN_FIRST,
            (r"attention\.self\.query\.bias", "attn.q_bias"),
            (r"attention\.self\.value\.bias", "attn.v_bias"),
        ),
    ),
    _names(
        "YOLOS",
        _model(
            "YolosForObjectDetection",
            **{**_VIT, "image_size": [32, 32]},
            num_detection_tokens=5,
            use_mid_position_embeddings=False,
        ),
        "yolos.yolos_to_pytorch",
        fused=[
            (rf"vit\.encoder\.layer\.(\d+)\.attention\.attention\.{_PART}\.(\w+)", r"backbone.blocks.\1.attn.qkv.\3")
        ],
    ),
    _names(
        "AST",
        _model("ASTForAudioClassification", num_mel_bins=32, max_length=64, **_SMALL),
        "audio_spectrogram_transformer.audio_spectrogram_transformer_original_to_pytorch",
        fused=[
            (
                rf"audio_spectrogram_transformer\.encoder\.layer\.(\d+)\.attention\.attention\.{_PART}\.(\w+)",
                r"module.v.blocks.\1.attn.qkv.\3",
            )
        ],
    ),
    _names(
        "VideoMAE",
        _model("VideoMAEForPreTraining", num_frames=4, **_VIT, **_DECODER),
        "videomae.videomae_to_pytorch",
        fused=[
            (
                rf"videomae\.encoder\.layer\.(\d+)\.attention\.attention\.{_PART}\.(\w+)",
                r"encoder.blocks.\1.attn.qkv.\3",
            ),
            (
                rf"decoder\.decoder_layers\.(\d+)\.attention\.attention\.{_PART}\.(\w+)",
                r"decoder.blocks.\1.attn.qkv.\3",
            ),
        ],
        first=_VIDEO_MAE,
    ),
    _names(
        "GroupViT",
        _model("GroupViTModel", **_GROUP_VIT),
        "groupvit.groupvit_nvlab_to_hf",
        fused=[
            (
                rf"vision_model\.encoder\.stages\.(\d+)\.layers\.(\d+)\.self_attn\.{_PART}\.(\w+)",
                r"img_encoder.layers.\1.blocks.\2.attn.qkv.\4",
            ),
            (
                rf"text_model\.encoder\.layers\.(\d+)\.self_attn\.{_PART}\.(\w+)",
                r"text_encoder.transformer.resblocks.\1.attn.in_proj_\3",
            ),
        ],
        more=[("self_attn.proj", "self_attn.out_proj")],
    ),
    _names(
        "RWKV",
        _model("RwkvForCausalLM", vocab_size=99, hidden_size=48, num_hidden_layers=3),
        "rwkv.rwkv_checkpoint_to_hf",
        first=((r"^rwkv\.", ""), (r"\.attention\.", ".att."), ("feed_forward", "ffn")),
        mapping="convert_state_dict",
    ),
    _names(
        "MobileViT",
        _model(
            "MobileViTForImageClassification", hidden_sizes=[24, 32, 40], neck_hidden_sizes=[8, 16, 16, 24, 32, 40, 48]
        ),
        "mobilevit.mlcvnets_to_pytorch",
        fused=[
            (
                rf"mobilevit\.encoder\.layer\.{i}\.transformer\.layer\.(\d+)\.attention\.attention\.{_PART}\.(\w+)",
                rf"layer_{i + 1}.1.global_rep.\1.pre_norm_mha.1.qkv_proj.\3",
            )
            for i in range(2, 5)
        ],
        first=_MOBILEVIT,
    ),
    _names(
        "MobileViT v2",
        _model("MobileViTV2ForImageClassification", width_multiplier=0.25, image_size=64),
        "mobilevitv2.mlcvnets_to_pytorch",
        "create_rename_keys",
        mapping="create_rename_keys",
    ),
    _names(
        "SwiftFormer",
        _model(
            "SwiftFormerForImageClassification",
            "SwiftFormer",
            depths=[2] * 4,
            embed_dims=[16, 24, 32, 48],
            image_size=32,
        ),
        "swiftformer.swiftformer_original_to_hf",
        "create_rename_keys",
        first=((r"^swiftformer\.encoder\.network\.(\d+)\.blocks\.", r"network.\1."), (r"^swiftformer\.encoder\.", "")),
        mapping="create_rename_keys",
    ),
    _names(
        "SAM",
        _model("SamModel", **_SAM),
        "sam.sam_to_hf",
        "replace_keys",
        mapping="KEYS_TO_MODIFY_MAPPING",
        taken="prompt_encoder.pe_layer.positional_encoding_gaussian_matrix",
        more=[("layers.0", "proj_in"), ("layers.1", "layers.0"), ("layers.2", "proj_out")],
    ),
    _names(
        "Whisper",
        _model(
            "WhisperModel",
            num_mel_bins=16,
            max_source_positions=32,
            max_target_positions=24,
            pad_token_id=0,
            **_TWO_SIDES,
        ),
        "whisper.openai_to_hf",
        "rename_keys",
        first=(
            (r"^encoder\.layer_norm", "encoder.ln_post"),
            (r"fc1", "mlp.0"),
            (r"fc2", "mlp.2"),
            ("embed_tokens", "token_embedding"),
        ),
        mapping="WHISPER_MAPPING",
    ),
    _names(
        "GLM",
        _model(
            "GlmForCausalLM",
            vocab_size=99,
            num_key_value_heads=1,
            head_dim=16,
            pad_token_id=0,
            **{**_SMALL, "intermediate_size": 96},
        ),
        "glm.glm_weights_to_hf",
        fused=[
            (
                rf"model\.layers\.(\d+)\.self_attn\.{_PART}\.(\w+)",
                r"transformer.encoder.layers.\1.self_attention.query_key_value.\3",
            )
        ],
        first=_GLM,
        mapping="",
    ),
    _names(
        "NLLB with experts",
        _model("NllbMoeModel", num_experts=4, encoder_sparse_step=2, decoder_sparse_step=2, **_TWO_SIDES),
        "nllb_moe.nllb_moe_sharded_original_checkpoint_to_pytorch",
        "rename_fairseq_keys",
        mapping="rename_fairseq_keys",
    ),
    _names(
        "Blenderbot",
        _model("BlenderbotModel", max_position_embeddings=32, **_TWO_SIDES),
        "blenderbot.blenderbot_original_pytorch_checkpoint_to_pytorch",
        "rename_state_dict_key",
        mapping="PATTERNS",
    ),
    _names(
        "LLaVA",
        _llava,
        "llava.llava_weights_to_hf",
        "convert_state_dict_to_hf",
        first=_LLAVA,
        mapping="KEYS_TO_MODIFY_MAPPING",
    ),
    _names(
        "FastSpeech 2",
        _model(
            "FastSpeech2ConformerModel",
            hidden_size=48,
            vocab_size=20,
            encoder_layers=2,
            decoder_layers=2,
            encoder_num_attention_heads=2,
            decoder_num_attention_heads=2,
            encoder_linear_units=96,
            decoder_linear_units=96,
            duration_predictor_channels=32,
            energy_predictor_channels=32,
            pitch_predictor_channels=32,
            speech_decoder_postnet_units=32,
        ),
        "fastspeech2_conformer.fastspeech2_conformer_original_pytorch_checkpoint_to_pytorch",
        "convert_espnet_state_dict_to_hf",
        first=((r"^", "tts.generator.text2mel."),),
        mapping="convert_espnet_state_dict_to_hf",
        more=[(".0.", ".conv."), (".1.", ".batch_norm."), (".2.", ".layer_norm."), ("embed.0.", "embed.conv.")],
    ),
    _segformer(
        "SegFormer",
        _model("SegformerForImageClassification", **_SEGFORMER),
        "segformer.segformer_original_to_pytorch",
        "segformer",
        "",
    ),
    _segformer(
        "GLPN",
        _model("GLPNForDepthEstimation", decoder_hidden_size=16, **_SEGFORMER),
        "glpn.glpn_to_pytorch",
        "glpn",
        "module.encoder.",
    ),
]
