"""Modules, optimizers and schedulers that somebody else than the Trainer holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelPruning
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from tests.auto_resume.scenarios.frame import Job, Net, scenario


class CopyOfAll(Callback):
    """Averages the weights in a copy of the whole LightningModule."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.model = copy.deepcopy(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        with torch.no_grad():
            for own, other in zip(self.model.parameters(), pl_module.parameters(), strict=True):
                own.lerp_(other, 0.1)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.log("average", sum(one.norm() for one in self.model.parameters()))


@scenario()
def average_in_a_copy_of_the_module(job: Job) -> None:
    job.seed()
    job.fit(Net(), CopyOfAll())


class Swapped(Callback):
    """Validates the averaged weights."""

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        function = get_ema_multi_avg_fn(0.9)
        self.averages = [AveragedModel(pl_module.body, multi_avg_fn=function, use_buffers=True)]

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.averages[0].update_parameters(pl_module.body)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.backup = {name: value.clone() for name, value in pl_module.body.state_dict().items()}
        pl_module.body.load_state_dict(self.averages[0].module.state_dict())

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        pl_module.body.load_state_dict(self.backup)


@scenario()
def average_swapped_for_validation(job: Job) -> None:
    job.seed()
    job.fit(Net(), Swapped(), val_check_interval=0.5)


class SharpnessAware(torch.optim.Optimizer):
    """Steps twice, the second time with an optimizer of its own."""

    def __init__(self, parameters: Any, base: Callable[..., torch.optim.Optimizer], rho: float, **options: Any) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure: Any = None) -> Any:
        closure = torch.enable_grad()(closure)
        loss = closure()
        with torch.no_grad():
            parameters = [one for group in self.param_groups for one in group["params"] if one.grad is not None]
            for one in parameters:
                self.state[one]["old"] = one.clone()
                one.add_(one.grad, alpha=self.param_groups[0]["rho"])
        closure()
        with torch.no_grad():
            for one in parameters:
                one.copy_(self.state[one]["old"])
        self.base_optimizer.step()
        return loss

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


@scenario()
def optimizer_in_an_optimizer(job: Job) -> None:
    class Sharp(Net):
        def configure_optimizers(self) -> Any:
            optimizer = SharpnessAware(self.parameters(), torch.optim.SGD, 0.05, lr=0.05, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    job.seed()
    job.fit(Sharp())


@scenario()
def line_search(job: Job) -> None:
    class Searches(Net):
        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=3, history_size=4)

    job.seed()
    job.fit(Searches())


@scenario()
def scheduler_and_scaler_of_the_module(job: Job) -> None:
    class Own(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.scale = nn.Parameter(torch.ones(3))

        def on_fit_start(self) -> None:
            self.own = torch.optim.Adam([self.scale], 0.05)
            self.cycle = torch.optim.lr_scheduler.OneCycleLR(self.own, 0.1, total_steps=40)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.scale

        def training_step(self, batch: Any, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.own.zero_grad()
            self.manual_backward(self.scaler.scale(self.loss(batch)))
            self.scaler.step(self.own)
            self.scaler.update()
            self.cycle.step()
            optimizer.step()
            self.log_dict({"factor": self.scaler.get_scale(), "rate": self.cycle.get_last_lr()[0]})

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD([*self.body.parameters(), *self.head.parameters()], lr=0.001)

    job.seed()
    job.fit(Own())


@scenario()
def optimizer_kept_in_an_attribute(job: Job) -> None:
    class Keeps(Net):
        def configure_optimizers(self) -> Any:
            self.optimizer = torch.optim.Adam(self.parameters(), 0.01)
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
            return [self.optimizer], [self.schedule]

        def on_train_batch_end(self, *_: Any) -> None:
            self.log("rate", self.optimizer.param_groups[0]["lr"])

    job.seed()
    job.fit(Keeps())


@scenario(warning="the parameter body.0.weight_orig")
def pruning_of_all_layers(job: Job) -> None:
    job.seed()
    net = Net()
    pruned = [(net.body[0], "weight"), (net.head, "weight")]
    job.fit(net, ModelPruning("l1_unstructured", parameters_to_prune=pruned, amount=0.2, make_pruning_permanent=False))
