"""What modules, their optimizers and callbacks hold outside of the parameters that the Trainer knows."""

import copy

import torch
from lightning.pytorch import Callback
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchmetrics import Accuracy, MetricCollection, MetricTracker, Recall

from tests.auto_resume.scenarios.callbacks import KIND
from tests.auto_resume.scenarios.frame import Job, Net, scenario


@scenario(ranks=(1, 2), workers=(0, 2))
def kl_annealing(job: Job) -> None:
    class VAE(Net):
        def on_train_epoch_start(self):
            self.kl = min(1.0, 0.2 + self.current_epoch / 2)
            self.log("kl", self.kl)

        def loss(self, batch):
            code = self.body(batch[0])
            return super().loss(batch) + getattr(self, "kl", 1.0) * code.square().mean()

    job.seed()
    job.fit(VAE())


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
    job.seed()
    job.fit(Queued())


@scenario()
def queue_that_grows_and_is_not_saved(job: Job) -> None:
    class Unsaved(Queued):
        persistent = False

    job.seed()
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

    job.seed()
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
    job.seed()
    job.fit(Net(), CopyOfAll())


class Swapped(Callback):
    """Validates the averaged weights."""

    def on_fit_start(self, trainer, pl_module):
        function = get_ema_multi_avg_fn(0.9)
        self.averages = [AveragedModel(pl_module.body, multi_avg_fn=function, use_buffers=True)]

    def on_train_batch_end(self, trainer, pl_module, *_):
        self.averages[0].update_parameters(pl_module.body)

    def on_validation_start(self, trainer, pl_module):
        self.backup = {name: value.clone() for name, value in pl_module.body.state_dict().items()}
        pl_module.body.load_state_dict(self.averages[0].module.state_dict())

    def on_validation_end(self, trainer, pl_module):
        pl_module.body.load_state_dict(self.backup)


@scenario()
def average_swapped_for_validation(job: Job) -> None:
    job.seed()
    job.fit(Net(), Swapped(), val_check_interval=0.5)


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

    job.seed()
    job.fit(Sharp())


@scenario()
def scheduler_and_scaler_of_the_module(job: Job) -> None:
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
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.own.zero_grad()
            self.manual_backward(self.scaler.scale(self.loss(batch)))
            self.scaler.step(self.own)
            self.scaler.update()
            self.cycle.step()
            optimizer.step()
            self.log_dict({"factor": self.scaler.get_scale(), "rate": self.cycle.get_last_lr()[0]})

        def configure_optimizers(self):
            return torch.optim.SGD([*self.body.parameters(), *self.head.parameters()], lr=0.001)

    job.seed()
    job.fit(Own())


@scenario()
def optimizer_kept_in_an_attribute(job: Job) -> None:
    class Keeps(Net):
        def configure_optimizers(self):
            self.optimizer = torch.optim.Adam(self.parameters(), 0.01)
            self.schedule = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)
            return [self.optimizer], [self.schedule]

        def on_train_batch_end(self, *_):
            self.log("rate", self.optimizer.param_groups[0]["lr"])

    job.seed()
    job.fit(Keeps())
