"""What modules, their optimizers and callbacks hold outside of the parameters that the Trainer knows."""

import copy
import random
from collections import deque
from typing import Any

import numpy as np
import torch
from lightning.pytorch import Callback
from torch import nn
from torchmetrics import Accuracy, MetricCollection, MetricTracker, Recall

from lightning_tricks.ensembles import StackingClassifier
from tests.auto_resume.scenarios.callbacks import KIND
from tests.auto_resume.scenarios.frame import Job, Net, scenario


class Queued(Net):
    """Compares each batch with those before, which it keeps in a buffer that grows."""

    persistent = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(0, 8), persistent=self.persistent)

    def loss(self, batch):
        code = self.body(batch[0])
        loss = nn.functional.cross_entropy(self.head(code), batch[1])
        if self.trainer.training:
            if len(self.queue):
                loss = loss + 0.1 * (code @ self.queue.T).logsumexp(1).mean()
            self.queue = torch.cat([self.queue, code.detach()])[-40:]
        return loss


@scenario()  # of two forked ranks Lightning cannot take such a buffer back
def queue_that_grows(job: Job) -> None:
    job.fit(Queued())


class Unsaved(Queued):
    persistent = False


@scenario()
def queue_that_grows_and_is_not_saved(job: Job) -> None:
    job.fit(Unsaved())


@scenario(ranks=(1, 2))
def trackers_of_metrics(job: Job) -> None:
    class Tracks(Net):
        def __init__(self) -> None:
            super().__init__()
            both = MetricCollection([Accuracy(average="macro", **KIND), Recall(**KIND)])
            self.tracker = MetricTracker(Accuracy(**KIND), maximize=True)
            self.several = MetricTracker(both, maximize=[True, True])

        def on_train_epoch_start(self):
            self.tracker.increment()
            self.several.increment()

        def training_step(self, batch, batch_idx):
            self.tracker(self(batch[0]).detach(), batch[1])
            self.several.update(self(batch[0]).detach(), batch[1])
            return super().training_step(batch, batch_idx)

        def on_train_epoch_end(self):
            self.log("best", self.tracker.best_metric())
            self.log_dict({f"best_{name}": value for name, value in self.several.best_metric().items()})
            self.log("mean", self.tracker.compute_all().mean())

    job.fit(Tracks())


class CopyOfAll(Callback):
    """Averages the weights in a copy of the whole LightningModule."""

    def on_train_start(self, trainer, pl_module):
        self.model = copy.deepcopy(pl_module)

    def on_train_batch_end(self, trainer, pl_module, *_):
        with torch.no_grad():
            for own, other in zip(self.model.parameters(), pl_module.parameters(), strict=True):
                own.lerp_(other, 0.1)

    def on_train_epoch_end(self, trainer, pl_module):
        pl_module.log("average", sum(one.norm() for one in self.model.parameters()))


@scenario()
def average_in_a_copy_of_the_module(job: Job) -> None:
    job.fit(Net(), CopyOfAll())


class SharpnessAware(torch.optim.Optimizer):
    """Steps twice, the second time with an optimizer of its own."""

    def __init__(self, parameters, base, rho, **options) -> None:
        super().__init__(parameters, {"rho": rho, **options})
        self.base_optimizer = base(self.param_groups, **options)
        self.param_groups = self.base_optimizer.param_groups

    def step(self, closure=None):
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

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base_optimizer.param_groups = self.param_groups


@scenario()
def optimizer_in_an_optimizer(job: Job) -> None:
    class Sharp(Net):
        def configure_optimizers(self):
            optimizer = SharpnessAware(self.parameters(), torch.optim.SGD, 0.05, lr=0.05, momentum=0.9)
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    job.fit(Sharp())


@scenario()
def optimizer_kept_in_an_attribute(job: Job) -> None:
    class Keeps(Net):
        def configure_optimizers(self):
            self.optimizer = torch.optim.Adam(self.parameters(), 0.01)
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
            return [self.optimizer], [self.schedule]

        def on_train_batch_end(self, *_):
            self.log("rate", self.optimizer.param_groups[0]["lr"])

    job.fit(Keeps())


@scenario()
def optimizer_scheduler_and_scaler_of_the_module(job: Job) -> None:
    class Own(Net):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.scale = nn.Parameter(torch.ones(3))

        def on_fit_start(self):
            self.own = torch.optim.Adam([self.scale], 0.05)
            self.cycle = torch.optim.lr_scheduler.OneCycleLR(self.own, 0.1, total_steps=40)
            self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=4)

        def forward(self, x):
            return super().forward(x) * self.scale

        def training_step(self, batch, batch_idx):
            (optimizer := self.optimizers()).zero_grad()
            self.own.zero_grad()
            self.manual_backward(self.scaler.scale(self.loss(batch)))
            self.scaler.step(self.own)
            self.scaler.update()
            self.cycle.step()
            optimizer.step()
            self.log_dict({"factor": self.scaler.get_scale(), "rate": self.cycle.get_last_lr()[0]})

        def configure_optimizers(self):
            return torch.optim.SGD([*self.body.parameters(), *self.head.parameters()], lr=0.001)

    job.fit(Own())


class Replay:
    """Keeps samples, and gives some of them again."""

    def __init__(self, size: int) -> None:
        self.kept: deque[tuple[torch.Tensor, torch.Tensor]] = deque(maxlen=size)

    def push(self, batch: Any) -> None:
        self.kept.extend(zip(*batch, strict=True))

    def draw(self, count: int) -> list[torch.Tensor]:
        chosen = random.sample(list(self.kept), min(count, len(self.kept)))
        return [torch.stack(part) for part in zip(*chosen, strict=True)]


@scenario()
def replay_buffer(job: Job) -> None:
    class Replays(Net):
        def __init__(self) -> None:
            super().__init__()
            self.replay = Replay(20)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.replay.push(batch)
            return super().training_step(self.replay.draw(6), batch_idx)

    job.fit(Replays())


@scenario()
def generators_of_the_module(job: Job) -> None:
    class Draws(Net):
        def __init__(self) -> None:
            super().__init__()
            self.noise = torch.Generator().manual_seed(1)
            self.chance, self.numbers = random.Random(2), np.random.default_rng(3)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x = batch[0] + 0.1 * torch.randn(batch[0].shape, generator=self.noise)
            x = x * (1 + 0.1 * self.chance.random()) + 0.1 * float(self.numbers.normal())
            return super().training_step([x, batch[1]], batch_idx)

    job.fit(Draws())


@scenario()
def teacher_in_a_list(job: Job) -> None:
    class Taught(Net):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = [copy.deepcopy(self.body)]  # in no state dict, as nobody wants to save it

        def loss(self, batch: Any) -> torch.Tensor:
            with torch.no_grad():
                wanted = self.teacher[0](batch[0])
            return super().loss(batch) + 0.1 * (self.body(batch[0]) - wanted).square().mean()

        def on_train_batch_end(self, *_: Any) -> None:
            with torch.no_grad():
                pairs = zip(self.teacher[0].parameters(), self.body.parameters(), strict=True)
                for own, other in pairs:
                    own.lerp_(other, 0.1)

    job.fit(Taught())


@scenario(ranks=(1, 2), workers=(0, 2))
def stacking(job: Job) -> None:
    """An ensemble that is trained in folds, refitted, and then its meta-learner."""
    members = [nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))]
    job.fit(StackingClassifier(members, nn.Linear(6, 3), 2, optimizer=("SGD", {"lr": 0.05, "momentum": 0.9})))
