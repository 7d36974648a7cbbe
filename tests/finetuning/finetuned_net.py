"""A net with two layers of normalisation to fine-tune, and what a fit does to it, step by step."""

from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn

from tests.contract.lab import full
from tests.small import QUIET, loader, unseen


class FineNet(LightningModule):
    """A backbone with BatchNorm and LayerNorm, and a head with a LayerNorm of the same size and values."""

    def __init__(self, schedulers=None, optimizer=None, affine=True) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.schedulers, self.optimizer = schedulers, optimizer
        self.stem = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8, affine=affine), nn.ReLU())
        self.block = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.ReLU())
        self.head = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 10))

    def forward(self, x):
        return self.head(self.block(self.stem(x)))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        make = self.optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01))
        optimizer = make(self.parameters())
        if self.schedulers is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.schedulers(optimizer)}


class ValidatedNet(FineNet):
    def validation_step(self, batch, batch_idx):
        self.log("val_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), sync_dist=True)


class Trace(Callback):
    """Notes after each batch what trains, the learning rates and the weights."""

    def __init__(self) -> None:
        rows: list[dict[str, Any]] = []
        self.rows = unseen(rows)  # which AutoResume does not see

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.rows().append(
            {
                "trains": trained(pl_module),
                "rates": [float(g["lr"]) for o in trainer.optimizers for g in o.param_groups],
                "weights": weights(pl_module),
                "modes": {n: m.training for n, m in pl_module.named_modules() if not list(m.children())},
            }
        )


def trained(module) -> set[str]:
    return {name.replace("_orig_mod.", "") for name, one in module.named_parameters() if one.requires_grad}


def weights(module) -> dict[str, torch.Tensor]:
    return {name.replace("_orig_mod.", ""): full(value) for name, value in module.state_dict().items()}


def moved(before, after) -> set[str]:
    """The top-level parts of which something changed."""
    return {name.partition(".")[0] for name in before if not torch.equal(before[name], after[name])}


def fit(module, *callbacks, ckpt_path=None, save_to=None, **options):
    """Train and return the rows of the trace."""
    trace = Trace()
    has_none = type(module).train_dataloader is LightningModule.train_dataloader
    trainer = Trainer(callbacks=[*callbacks, trace], **{**QUIET, "max_epochs": 3, **options})
    trainer.fit(module, loader() if has_none else None, ckpt_path=ckpt_path)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return trace.rows()


def flags(module):
    """The modes and hooks of all submodules, and which parameters require gradients."""
    found = {name: (part.training, len(part._forward_pre_hooks)) for name, part in module.named_modules()}
    return found | {f"{name}.requires_grad": one.requires_grad for name, one in module.named_parameters()}
