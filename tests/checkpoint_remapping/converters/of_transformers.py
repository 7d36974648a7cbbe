"""What the scripts in transformers 4 convert into its models, which 5 has no more: imported where it is installed."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import re
import sys
from collections.abc import Callable
from typing import Any
from unittest.mock import MagicMock

import transformers
from torch import nn

from tests.checkpoint_remapping.converters.cases import Converter, State, probed

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
) -> Converter:
    """Return a script with a table of names, `create_rename_keys`."""

    def convert(state: State, model: nn.Module) -> State:
        script = _script(path)
        for old, new in keys(script, model.config):
            tensor = state.pop(old, None)
            if tensor is not None:  # the tables are of one size of a backbone
                state[new] = tensor
        read(script, state, model.config)
        return state

    return Converter(f"transformers {name}", model, convert, probed(convert), "cpu")


def _read_qkv(script: Any, state: State, config: Any) -> None:
    script.read_in_q_k_v(state, config)


def _read_kv(script: Any, state: State, config: Any) -> None:
    script.read_in_k_v(state, config)


def _as_base(script: Any, config: Any) -> Any:
    return script.create_rename_keys(config, True)


def _read_qkv_of_base(script: Any, state: State, config: Any) -> None:
    script.read_in_q_k_v(state, config, True)


_SMALL = {"hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3, "intermediate_size": 192}
_VIT = {"image_size": 32, "patch_size": 8, **_SMALL}
_DINO = {
    "image_size": 28, "patch_size": 14, "hidden_size": 48, "num_hidden_layers": 3, "num_attention_heads": 3,
}  # fmt: skip
_SEGFORMER = {"depths": [2, 2, 2, 2], "hidden_sizes": [16, 32, 48, 64], "num_attention_heads": [1, 2, 2, 4]}


def _depth_anything() -> nn.Module:
    backbone = transformers.Dinov2Config(
        **{**_DINO, "num_hidden_layers": 4}, out_indices=[1, 2, 3, 4], apply_layernorm=True, reshape_hidden_states=False
    )
    config = transformers.DepthAnythingConfig(
        backbone, reassemble_hidden_size=48, neck_hidden_sizes=[16, 32, 48, 64], fusion_hidden_size=16
    )
    return transformers.DepthAnythingForDepthEstimation(config)


CONVERTERS = [
    _table("ViT of timm", _model("ViTForImageClassification", **_VIT), "vit.vit_timm_to_pytorch", _read_qkv),
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
        "PVT", _model("PvtForImageClassification", **{**_SEGFORMER, "image_size": 64}), "pvt.pvt_to_pytorch", _read_kv
    ),
    _table("PVT v2", _model("PvtV2ForImageClassification", **_SEGFORMER), "pvt_v2.pvt_v2_to_pytorch", _read_kv),
    _table(
        "ViLT",
        _model("ViltForQuestionAnswering", vocab_size=99, max_position_embeddings=20, **_VIT),
        "vilt.vilt_original_to_pytorch",
        _read_qkv,
        lambda script, config: script.create_rename_keys(config, vqa_model=True),
    ),
    _table("Depth Anything", _depth_anything, "depth_anything.depth_anything_to_hf", _read_qkv),
]
