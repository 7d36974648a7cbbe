"""The same architectures from torchvision, timm and Hugging Face, with random weights and random statistics."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import timm
import torch
import transformers
from torch import nn
from torchvision import models

Builder = Callable[[], nn.Module]


def _torchvision(make: Callable[..., nn.Module], **arguments) -> Builder:
    return lambda: make(weights=None, **arguments)


def _timm(name: str, **arguments) -> Builder:
    return lambda: timm.create_model(name, **arguments)


def _hugging_face(name: str, **arguments) -> Builder:
    arguments = {"num_labels": 1000, **arguments}
    return lambda: getattr(transformers, f"{name}ForImageClassification")(
        getattr(transformers, f"{name}Config")(**arguments)
    )


# Of each architecture, who has it: the pairs of field measurements
ARCHITECTURES: dict[str, dict[str, Builder]] = {
    "ResNet-18": {
        "torchvision": _torchvision(models.resnet18),
        "timm": _timm("resnet18"),
        "HF": _hugging_face("ResNet", depths=[2] * 4, hidden_sizes=[64, 128, 256, 512], layer_type="basic"),
    },
    "ResNet-50": {
        "torchvision": _torchvision(models.resnet50),
        "timm": _timm("resnet50"),
        "HF": _hugging_face("ResNet"),
    },
    "ViT-B": {
        "torchvision": _torchvision(models.vit_b_16),
        "timm": _timm("vit_base_patch16_224"),
        "HF": _hugging_face("ViT", layer_norm_eps=1e-6),
    },
    "ConvNeXt": {
        "torchvision": _torchvision(models.convnext_tiny),
        "timm": _timm("convnext_tiny"),
        "HF": _hugging_face("ConvNext"),
    },
    "Swin": {
        "torchvision": _torchvision(models.swin_t),
        "timm": _timm("swin_tiny_patch4_window7_224"),
        "HF": _hugging_face("Swin"),
    },
    "MobileNetV2": {
        "torchvision": _torchvision(models.mobilenet_v2),
        "timm": _timm("mobilenetv2_100"),
        "HF": _hugging_face("MobileNetV2", tf_padding=False, layer_norm_eps=1e-5),
    },
    "EfficientNet-B0": {
        "torchvision": _torchvision(models.efficientnet_b0),
        "timm": _timm("efficientnet_b0"),
        "HF": _hugging_face(
            "EfficientNet", width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, batch_norm_eps=1e-5
        ),
    },
    "RegNet": {
        "torchvision": _torchvision(models.regnet_y_400mf),
        "timm": _timm("regnety_004"),
        "HF": _hugging_face(
            "RegNet", depths=[1, 3, 6, 6], hidden_sizes=[48, 104, 208, 440], groups_width=8, layer_type="y"
        ),
    },
    "DenseNet": {"torchvision": _torchvision(models.densenet121), "timm": _timm("densenet121")},
    # more, of the sorts that differ by a reshape, a transposition or the order of blocks
    "MobileNetV3": {
        "torchvision": _torchvision(models.mobilenet_v3_small),
        "timm": _timm("mobilenetv3_small_100", bn_eps=1e-3),
    },
    "MNASNet": {"torchvision": _torchvision(models.mnasnet1_0), "timm": _timm("mnasnet_100")},
    "MobileViT": {"timm": _timm("mobilevit_s"), "HF": _hugging_face("MobileViT", image_size=256)},
    "BERT": {"HF": lambda: BertEncoder(), "torch": lambda: TorchEncoder()},
    "GPT-2": {"HF": lambda: HuggingFaceGPT2(), "Linear": lambda: LinearGPT2()},
}
SIDES = {"MobileViT": 256}


@contextmanager
def without_initial_values() -> Iterator[None]:
    """Leave the parameters of models that are built here as they are allocated, which saves seconds for large ones."""
    with ExitStack() as stack:
        for name in ("uniform_", "normal_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_", "xavier_uniform_"):
            stack.enter_context(patch.object(nn.init, name, lambda tensor, *_, **__: tensor))
        yield


def randomized(model: nn.Module) -> nn.Module:
    """Give every parameter and every statistic values of its own, about of a trained model's size."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("running_var"):
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
            elif tensor.is_floating_point():
                width = tensor[0].numel() if tensor.dim() > 1 else 4
                values = torch.randn(tensor.shape, generator=generator) * 0.5 / max(width, 1) ** 0.5
                tensor.copy_(values + (name.endswith("weight") and tensor.dim() == 1))
    return model.eval()


def inputs(architecture: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    if architecture.startswith(("BERT", "GPT")):
        return torch.randn(2, 7, 64, generator=generator)
    side = SIDES.get(architecture, 224)
    return torch.randn(1, 3, side, side, generator=generator)


class BertEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        sizes = {"hidden_size": 64, "num_attention_heads": 4, "intermediate_size": 128, "num_hidden_layers": 3}
        config = transformers.BertConfig(**sizes, attn_implementation="eager")
        self.encoder = transformers.models.bert.modeling_bert.BertEncoder(config)

    def forward(self, x):
        return self.encoder(x).last_hidden_state


class TorchEncoder(nn.Module):
    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, activation="gelu", batch_first=True, layer_norm_eps=1e-12)
        self.transformer = nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)

    def forward(self, x):
        return self.transformer(x)


class HuggingFaceGPT2(nn.Module):
    def __init__(self):
        super().__init__()
        config = transformers.GPT2Config(n_embd=64, n_head=4, n_layer=2, n_positions=32, vocab_size=50)
        self.transformer = transformers.GPT2Model(config)

    def forward(self, x):
        return self.transformer(inputs_embeds=x).last_hidden_state


class _Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1 = nn.LayerNorm(64)
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(64, 192), "c_proj": nn.Linear(64, 64)})
        self.ln_2 = nn.LayerNorm(64)
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(64, 256), "c_proj": nn.Linear(256, 64)})

    def forward(self, x):
        parts = [part.unflatten(-1, (4, 16)).transpose(1, 2) for part in self.attn["c_attn"](self.ln_1(x)).chunk(3, -1)]
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attn["c_proj"](mixed)
        hidden = nn.functional.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")
        return x + self.mlp["c_proj"](hidden)


class LinearGPT2(nn.Module):
    """As minGPT and its descendants have it: Linear where Hugging Face has the transposed Conv1D."""

    def __init__(self):
        super().__init__()
        blocks = nn.ModuleList(_Block() for _ in range(2))
        parts = {"wte": nn.Embedding(50, 64), "wpe": nn.Embedding(32, 64), "h": blocks, "ln_f": nn.LayerNorm(64)}
        self.transformer = nn.ModuleDict(parts)

    def forward(self, x):
        x = x + self.transformer["wpe"].weight[: x.shape[1]]
        for block in self.transformer["h"]:
            x = block(x)
        return self.transformer["ln_f"](x)


def module_of(tensors: dict[str, torch.Tensor]) -> nn.Module:
    """Return a module whose state dict has these names, parameters where the tensors are floating points."""
    root = nn.Module()
    held: dict[int, torch.Tensor] = {}  # tied tensors stay tied
    for name, tensor in tensors.items():
        *path, leaf = name.split(".")
        module = root
        for part in path:
            if part not in module._modules:
                module.add_module(part, nn.Module())
            module = module.get_submodule(part)
        value = held.setdefault(id(tensor), nn.Parameter(tensor) if tensor.is_floating_point() else tensor)
        if isinstance(value, nn.Parameter):
            module.register_parameter(leaf, value)
        else:
            module.register_buffer(leaf, value)
    return root
