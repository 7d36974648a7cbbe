"""LoRA against peft's and against training all weights: time of a step, optimizer memory, and size of checkpoints."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from pathlib import Path

import peft
import torch
import torchvision
from _ratios import ACCELERATOR, arguments, be_quiet, measure, ratios, report
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from lightning_tricks import LoRA, TrainableCheckpoint
from lightning_tricks.finetuning import LoRASettings, add_lora

_RANK = 8
_SIZES = {"hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 1024}


def bert() -> nn.Module:
    """Four layers of BERT, 256 wide."""
    return BertModel(BertConfig(vocab_size=1000, **_SIZES))


def gpt2() -> nn.Module:
    """Four layers of GPT-2, 256 wide."""
    return GPT2LMHeadModel(GPT2Config(vocab_size=1000, n_embd=256, n_layer=4, n_head=4))


def vit() -> nn.Module:
    """Four blocks of torchvision's ViT, 256 wide."""
    return torchvision.models.VisionTransformer(32, 4, 4, 4, 256, 1024, num_classes=10)


TOKENS = torch.randint(0, 1000, (8, 64), generator=torch.Generator().manual_seed(0))
IMAGES = torch.rand(8, 3, 32, 32, generator=torch.Generator().manual_seed(0))
# the model, its inputs, and layers on which peft's LoRA works
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, list[str]]] = {
    "BERT, query and value": (bert, TOKENS, ["query", "value"]),
    "BERT, all linear layers of the blocks": (bert, TOKENS, ["query", "key", "value", "dense"]),
    "GPT-2, attention": (gpt2, TOKENS, ["c_attn"]),
    "ViT of torchvision, MLP": (vit, IMAGES, ["mlp.0", "mlp.3"]),
    "ResNet-18, 3 x 3 convolutions": (
        lambda: torchvision.models.resnet18(num_classes=10),
        IMAGES,
        ["layer1.0.conv2", "layer2.0.conv2", "layer3.0.conv2", "layer4.0.conv2"],
    ),
}


def step(model: nn.Module, inputs: Tensor) -> Callable[[], None]:
    """One step of AdamW on the parameters that are trained."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)

    def run() -> None:
        out = model(inputs)
        out = out if isinstance(out, Tensor) else out[0]
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def contestants(case: str) -> dict[str, Callable[[], None]]:
    """Training all weights, peft's LoRA, and ours, on the same model and layers."""
    build, inputs, targets = CASES[case]
    torch.manual_seed(0)
    model = build()
    by_peft = copy.deepcopy(model)
    peft.inject_adapter_in_model(peft.LoraConfig(r=_RANK, target_modules=targets), by_peft)
    ours = copy.deepcopy(model)
    patterns = [f"*.{name}" for name in targets] if case[:3] != "Res" else targets
    add_lora(ours, LoRASettings(rank=_RANK, target_modules=patterns, modules_to_save=()))
    counts = [sum(p.numel() for p in part.parameters() if p.requires_grad) for part in (by_peft, ours)]
    if counts[0] != counts[1]:
        raise RuntimeError(f"{case}: peft trains {counts[0]} values, ours {counts[1]}")
    return {"all weights": step(model, inputs), "peft": step(by_peft, inputs), "ours": step(ours, inputs)}


class Classifier(LightningModule):
    """ResNet-18 on random images."""

    def __init__(self) -> None:
        super().__init__()
        self.model = torchvision.models.resnet18(num_classes=10)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Return a loss."""
        return nn.functional.cross_entropy(self.model(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters())


def sizes() -> dict[str, dict[str, float]]:
    """Checkpoint, and state of AdamW, of ResNet-18 with LoRA over those of training all weights, in bytes."""
    found: dict[str, list[float]] = {}
    loader = DataLoader(TensorDataset(IMAGES, torch.arange(8)), batch_size=8)
    lora = LoRA(_RANK, target_modules="*layer?.?.conv?", modules_to_save="model.fc")
    for name, callbacks in (("all weights", []), ("LoRA", [lora, TrainableCheckpoint()])):
        trainer = Trainer(
            max_steps=1,
            accelerator=ACCELERATOR,
            devices=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
        )
        trainer.fit(Classifier(), loader)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "last.ckpt"
            trainer.save_checkpoint(path)
            state = trainer.optimizers[0].state_dict()["state"].values()
            memory = sum(value.nbytes for values in state for value in values.values())
            parameters = sum(p.numel() for p in trainer.lightning_module.parameters() if p.requires_grad)
            found[name] = [path.stat().st_size, memory, parameters]
    each = [own / whole for own, whole in zip(found["LoRA"], found["all weights"], strict=True)]
    names = ("checkpoint, bytes", "optimizer state, bytes", "trained parameters")
    return {
        name: {"median": ratio, "q1": ratio, "q3": ratio, "peer": "all weights"}
        for name, ratio in zip(names, each, strict=True)
    }


if __name__ == "__main__":
    options = arguments(default_rounds=40)
    be_quiet()
    torch.set_num_threads(1)
    results = {}
    for case in CASES:
        times = measure(contestants(case), options.rounds)
        over_peft = ratios({name: times[name] for name in ("ours", "peft")}, "peft")
        over_all = ratios(times, "all weights")
        results[case] = {
            "ours / peft": over_peft["ours"],
            "ours / all weights": over_all["ours"],
            "peft / all weights": over_all["peft"],
        }
    results["ResNet-18 with LoRA and TrainableCheckpoint / all weights"] = sizes()
    report("finetuning", results, options.rounds, options.out)
