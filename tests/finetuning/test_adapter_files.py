"""`save_adapter` and `load_adapter`, with peft as the oracle."""

import copy
import json
import warnings

import pytest
import torch
from torch import nn

from lightning_tricks.finetuning.core.adapter_files import load_adapter, save_adapter
from lightning_tricks.finetuning.core.lora_injection import LoRASettings, add_lora, merge
from lightning_tricks.finetuning.core.low_rank import LowRank

peft = pytest.importorskip("peft")

TOLERANCE = {"rtol": 1e-5, "atol": 1e-6}


class Attention(nn.Module):
    """`nn.MultiheadAttention` outside of a layer with a fused path."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, x):
        return self.out(self.embedding(x))


def seeded(make, *arguments, **named):
    torch.manual_seed(3)
    return make(*arguments, **named).eval()


def perturb(model):
    """Give whatever is trained, and running statistics, other values."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model


def read_with_peft(base, folder):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "fan_in_fan_out is set to", UserWarning)
        return peft.PeftModel.from_pretrained(base, folder).eval()


def adapted(make, **settings):
    model = seeded(make)
    add_lora(model, LoRASettings(**{"rank": 2, "alpha": 6.0, **settings}))
    return perturb(model)


IMAGE = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
MODELS = {
    "Linear": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)),
        torch.randn(5, 6, generator=torch.Generator().manual_seed(0)),
        {"modules_to_save": "4", "rank_pattern": {"2": 3}},
    ),
    "rslora": (lambda: nn.Sequential(nn.Linear(6, 4)), torch.ones(5, 6), {"use_rslora": True}),
    "Conv1d": (lambda: nn.Sequential(nn.Conv1d(3, 4, 3, 2, 1)), IMAGE[0], {"target_modules": "0"}),
    "Conv2d": (
        lambda: nn.Sequential(nn.Conv2d(3, 4, (3, 2)), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3, padding="same")),
        IMAGE,
        {"target_modules": ["0", "2"]},
    ),
    "Conv3d": (lambda: nn.Sequential(nn.Conv3d(3, 4, 3)), IMAGE[:, :, None].repeat(1, 1, 4, 1, 1), {"target_modules": "0"}),
    "Embedding": (lambda: nn.Sequential(nn.Embedding(11, 8, 0)), torch.arange(11)[None], {"target_modules": "0"}),
    "MultiheadAttention": (Attention, torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(0)), {}),
    "tied": (Tied, torch.arange(11)[None], {"target_modules": "embedding"}),
    "ambiguous": (
        lambda: nn.Sequential(nn.Sequential(nn.Linear(6, 6)), nn.Linear(6, 6)),
        torch.ones(5, 6),
        {"target_modules": "0.0", "rank_pattern": {"0.0": 1}},
    ),
    "suffix": (
        lambda: nn.ModuleDict({"a": nn.Linear(6, 6), "b": nn.ModuleDict({"a": nn.Linear(6, 6)})}),
        None,
        {"target_modules": "a"},
    ),
}


def outputs(model, batch):
    with torch.no_grad():
        if batch is None:
            inner = getattr(model, "base_model", None)
            model = model if inner is None else inner.model
            batch = torch.ones(5, 6)
            return model["b"]["a"](model["a"](batch))
        return model(batch)


@pytest.mark.parametrize("name", MODELS)
def test_peft_computes_what_we_saved(name, tmp_path):
    make, batch, settings = MODELS[name]
    model = adapted(make, **settings)
    save_adapter(model, tmp_path)
    base = seeded(make)
    assert not torch.allclose(outputs(base, batch), outputs(model, batch), atol=1e-3)
    torch.testing.assert_close(outputs(read_with_peft(base, tmp_path), batch), outputs(model, batch), **TOLERANCE)


@pytest.mark.parametrize("name", MODELS)
def test_we_compute_what_peft_saved(name, tmp_path):
    make, batch, settings = MODELS[name]
    model = adapted(make, **settings)
    save_adapter(model, tmp_path / "ours")
    saved_by_peft = read_with_peft(seeded(make), tmp_path / "ours")
    saved_by_peft.save_pretrained(tmp_path / "peft")
    plain = seeded(make)
    report = load_adapter(plain, tmp_path / "peft")
    assert torch.equal(outputs(plain, batch), outputs(model, batch))
    assert report.added == sum(part.A.numel() + part.B.numel() for part in plain.modules() if isinstance(part, LowRank))
    again = seeded(make)
    add_lora(again, LoRASettings(**{"rank": 2, "alpha": 6.0, **settings}))
    load_adapter(again, tmp_path / "peft")  # into a model that has the same LoRA
    assert torch.equal(outputs(again, batch), outputs(model, batch))
    merge(again)
    torch.testing.assert_close(outputs(again, batch), outputs(model, batch), **TOLERANCE)
