"""What a hook changes once, outside the attributes of the module, and no resumed run repeats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch.utils.data import BatchSampler, Dataset, RandomSampler, WeightedRandomSampler

from tests.auto_resume.scenarios.frame import Job, Net, scenario


class Once(Callback):
    """Calls a function at the end of the first epoch."""

    def __init__(self, act: Callable[[Trainer, Any], None]) -> None:
        self.act = act

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.current_epoch == 0:
            self.act(trainer, pl_module)


class Doubles(Callback):
    """Makes what the next step sees other."""

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        for parameter in pl_module.parameters():
            if parameter.grad is not None:
                parameter.grad *= 2


@scenario(warning="Doubles .a callback that was removed")
def callback_removed(job: Job) -> None:
    doubles = Doubles()
    job.seed()
    job.fit(Net(), doubles, Once(lambda trainer, module: trainer.callbacks.remove(doubles)))


@scenario(warning="the hooks of body.0")
def forward_hook_registered(job: Job) -> None:
    def act(trainer: Trainer, module: Any) -> None:
        module.body[0].register_forward_hook(lambda layer, inputs, output: 0.5 * output)

    job.seed()
    job.fit(Net(), Once(act))


@scenario()
def optimizer_exchanged(job: Job) -> None:
    def act(trainer: Trainer, module: Any) -> None:
        trainer.strategy.optimizers = [torch.optim.SGD(module.parameters(), lr=0.01, nesterov=True, momentum=0.5)]

    job.seed()
    job.fit(Net(), Once(act))


@scenario()
def validated_more_often(job: Job) -> None:
    def act(trainer: Trainer, module: Any) -> None:
        trainer.val_check_batch = 3

    job.seed()
    job.fit(Net(), Once(act), ModelCheckpoint(job.folder / "best", monitor="val_loss"))


@scenario()
def fewer_batches(job: Job) -> None:
    def act(trainer: Trainer, module: Any) -> None:
        trainer.fit_loop.max_batches = 5

    job.seed()
    job.fit(Net(), Once(act))


@scenario()
def fewer_batches_when_reloaded(job: Job) -> None:
    def act(trainer: Trainer, module: Any) -> None:
        trainer.limit_train_batches = 5

    job.seed()
    job.fit(Net(), Once(act), reload_dataloaders_every_n_epochs=1)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second = torch.nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = self.body(x)
        return self.head(code) + self.second(code)


@scenario(warning="the tied weights second.weight")
def weights_tied(job: Job) -> None:
    def act(trainer: Trainer, module: Any) -> None:
        module.second.weight = module.head.weight

    job.seed()
    job.fit(Tied(), Once(act))


@scenario(warning="the number of weights in torch.float64")
def head_in_double_precision(job: Job) -> None:
    class Mixed(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x).to(self.head.weight.dtype)).float()

    def act(trainer: Trainer, module: Any) -> None:
        module.head.double()

    job.seed()
    job.fit(Mixed(), Once(act))


@scenario()
def optimized_by_hand_later(job: Job) -> None:
    class Both(Net):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if not self.automatic_optimization:
                optimizer = self.optimizers()
                optimizer.zero_grad()
                self.manual_backward(2 * loss)
                optimizer.step()
            return loss

    def act(trainer: Trainer, module: Any) -> None:
        module.automatic_optimization = False

    job.seed()
    job.fit(Both(), Once(act))


@scenario(workers=(0, 2))
def batches_grow(job: Job) -> None:
    def act(trainer: Trainer, module: Any) -> None:
        trainer.train_dataloader.batch_sampler.batch_size = 6
        trainer.fit_loop.max_batches = 6

    job.seed()
    data = job.samples()
    job.fit(Net(), Once(act), train=job.loader(data, batch_sampler=BatchSampler(RandomSampler(data), 4, False)))


@scenario(workers=(0, 2))
def samples_weighted_anew(job: Job) -> None:
    def act(trainer: Trainer, module: Any) -> None:
        trainer.train_dataloader.sampler.weights[::2] = 0.1

    job.seed()
    data = job.samples()
    job.fit(Net(), Once(act), train=job.loader(data, sampler=WeightedRandomSampler([1.0] * len(data), len(data))))


class Transformed(Dataset):
    def __init__(self, data: Any, transform: Any) -> None:
        self.data, self.transform = data, transform

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        x, y = self.data[index]
        return self.transform(x), y


@scenario(warning="transform", workers=(0, 2))
def transform_exchanged(job: Job) -> None:
    def act(trainer: Trainer, module: Any) -> None:
        trainer.train_dataloader.dataset.transform = torch.nn.ReLU()

    job.seed()
    job.fit(Net(), Once(act), train=job.loader(Transformed(job.samples(), torch.nn.Tanh()), shuffle=True))


@scenario()
def patience_changed(job: Job) -> None:
    stops = EarlyStopping("val_loss", patience=9)

    def act(trainer: Trainer, module: Any) -> None:
        stops.patience = 0

    job.seed()
    job.fit(Net(), stops, Once(act), max_epochs=6)


@scenario()
def rates_changed_at_each_step(job: Job) -> None:
    class Rates(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def act(trainer: Trainer, module: Any) -> None:
        trainer.lr_scheduler_configs[0].interval = "step"

    job.seed()
    job.fit(Rates(), Once(act))


@scenario(warning="the class of learning rate scheduler 0")
def scheduler_exchanged(job: Job) -> None:
    class Rates(Net):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]

    def act(trainer: Trainer, module: Any) -> None:
        new = torch.optim.lr_scheduler.StepLR(trainer.optimizers[0], 1, 0.5)
        trainer.lr_scheduler_configs[0].scheduler = new

    job.seed()
    job.fit(Rates(), Once(act))


@scenario(warning="the hooks of head.weight")
def gradient_hook_registered(job: Job) -> None:
    def act(trainer: Trainer, module: Any) -> None:
        module.head.weight.register_hook(lambda gradient: 0.1 * gradient)

    job.seed()
    job.fit(Net(), Once(act))


@scenario(warning="the hooks of optimizer 0")
def step_hook_registered(job: Job) -> None:
    def act(trainer: Trainer, module: Any) -> None:
        def decay(optimizer: Any, *_: Any) -> None:
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for one in group["params"]:
                        one.mul_(0.99)

        trainer.optimizers[0].register_step_post_hook(decay)

    job.seed()
    job.fit(Net(), Once(act))


@scenario(warning="module.body.forward")
def forward_exchanged(job: Job) -> None:
    def act(trainer: Trainer, module: Any) -> None:
        plain = module.body.forward
        module.body.forward = lambda x: 0.5 * plain(x)

    job.seed()
    job.fit(Net(), Once(act))
