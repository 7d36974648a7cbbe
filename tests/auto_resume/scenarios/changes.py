"""What a callback changes, once or until it changes it back, and no resumed run repeats."""

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import BatchSampler, Dataset, RandomSampler, WeightedRandomSampler

from tests.auto_resume.scenarios.frame import Job, Net, scenario

Act = Callable[[Trainer, Any], object]


class Changes(Callback):
    """Calls a function where training starts, and another one at the end of the first epoch."""

    def __init__(self, first: Act, act: Act) -> None:
        self.first, self.act = first, act

    def on_train_start(self, trainer, pl_module):
        self.first(trainer, pl_module)

    def on_train_epoch_end(self, trainer, pl_module):
        if trainer.current_epoch == 0:
            self.act(trainer, pl_module)


def changes(
    *callbacks: Callable[[], Callback],
    first: Act = lambda trainer, module: None,
    module: type[Net] = Net,
    data: Callable[[Job], Any] = lambda job: None,
    held_out: Callable[[Job], Any] = Job.held_out,
    trainer: dict[str, Any] | None = None,
    **about: Any,
) -> Callable[[Act], Act]:
    """Enter the script that calls a function at the end of the first epoch, and another one at the start."""

    def enter(act: Act) -> Act:
        def run(job: Job) -> None:
            others = [make() for make in callbacks]
            train = data(job) or job.loader(job.samples(), shuffle=True)
            job.trainer(*others, Changes(first, act), **(trainer or {})).fit(module(), train, held_out(job))

        run.__name__ = act.__name__
        scenario(**about)(run)
        return act

    return enter


# -- for the rest of the run


def stopping() -> EarlyStopping:
    return EarlyStopping("val_loss", patience=9)


@changes(stopping, warning="EarlyStopping .a callback that was removed")
def callback_removed(trainer, module):
    trainer.callbacks.remove(trainer.early_stopping_callback)


@changes(warning="the hooks of body.0")
def forward_hook_registered(trainer, module):
    module.body[0].register_forward_hook(lambda layer, inputs, output: 0.5 * output)


@changes(warning="the hooks of head.weight")
def gradient_hook_registered(trainer, module):
    module.head.weight.register_hook(lambda gradient: 0.1 * gradient)


@changes(warning="the hooks of optimizer 0")
def step_hook_registered(trainer, module):
    def decay(optimizer, *_):
        with torch.no_grad():
            for one in module.parameters():
                one.mul_(0.99)

    trainer.optimizers[0].register_step_post_hook(decay)


@changes(warning="module.body.forward")
def forward_exchanged(trainer, module):
    plain = module.body.forward
    module.body.forward = lambda x: 0.5 * plain(x)


@changes()
def optimizer_exchanged(trainer, module):
    trainer.strategy.optimizers = [torch.optim.SGD(module.parameters(), lr=0.01, nesterov=True, momentum=0.5)]


@changes()
def validated_more_often(trainer, module):
    trainer.val_check_batch = 3


@changes()
def fewer_batches(trainer, module):
    trainer.fit_loop.max_batches = 5


@changes(trainer={"reload_dataloaders_every_n_epochs": 1})
def fewer_batches_when_reloaded(trainer, module):
    trainer.limit_train_batches = 5


@changes(stopping, trainer={"max_epochs": 6})
def patience_changed(trainer, module):
    trainer.early_stopping_callback.patience = 0


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.second = nn.Linear(8, 3)

    def forward(self, x):
        code = self.body(x)
        return self.head(code) + self.second(code)


@changes(module=Tied, warning="the tied weights second.weight")
def weights_tied(trainer, module):
    module.second.weight = module.head.weight


class Mixed(Net):
    def forward(self, x):
        return self.head(self.body(x).to(self.head.weight.dtype)).float()


@changes(module=Mixed, warning="the number of weights in torch.float64")
def head_in_double_precision(trainer, module):
    module.head.double()


class Both(Net):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(2 * loss)
            optimizer.step()
        return loss


@changes(module=Both)
def optimized_by_hand_later(trainer, module):
    module.automatic_optimization = False


class Rates(Net):
    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)]


@changes(module=Rates)
def rates_changed_at_each_step(trainer, module):
    trainer.lr_scheduler_configs[0].interval = "step"


@changes(module=Rates, warning="the class of learning rate scheduler 0")
def scheduler_exchanged(trainer, module):
    trainer.lr_scheduler_configs[0].scheduler = torch.optim.lr_scheduler.StepLR(trainer.optimizers[0], 1, 0.5)


def in_batches(job: Job):
    return job.loader(data := job.samples(), batch_sampler=BatchSampler(RandomSampler(data), 4, False))


@changes(data=in_batches, workers=(0, 2))
def batches_grow(trainer, module):
    trainer.train_dataloader.batch_sampler.batch_size = 6
    trainer.fit_loop.max_batches = 6


def weighted(job: Job):
    return job.loader(data := job.samples(), sampler=WeightedRandomSampler([1.0] * len(data), len(data)))


@changes(data=weighted, workers=(0, 2))
def samples_weighted_anew(trainer, module):
    trainer.train_dataloader.sampler.weights[::2] = 0.1


class Transformed(Dataset):
    """Has a transform, and adds noise while it is told to."""

    def __init__(self, data: Any) -> None:
        self.data, self.transform, self.noise = data, nn.Tanh(), 0.0

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index):
        x, y = self.data[index]
        return self.transform(x + self.noise * torch.sin(9 * x)), y


def transformed(job: Job):
    return job.loader(Transformed(job.samples()), shuffle=True)


@changes(data=transformed, warning="transform", workers=(0, 2))
def transform_exchanged(trainer, module):
    trainer.train_dataloader.dataset.transform = nn.ReLU()


# -- in the first epoch alone


@changes(first=lambda trainer, module: module.body.requires_grad_(False))
def body_frozen_in_the_first_epoch(trainer, module):
    module.body.requires_grad_(True)


def leave_out_the_head(trainer, module):
    trainer.optimizers[0].param_groups[0]["params"] = list(module.body.parameters())


@changes(first=leave_out_the_head)
def head_left_out_in_the_first_epoch(trainer, module):
    trainer.optimizers[0].param_groups[0]["params"] = list(module.parameters())


@changes(first=lambda trainer, module: prune.random_unstructured(module.head, "weight", 0.5))
def head_pruned_in_the_first_epoch(trainer, module):
    prune.remove(module.head, "weight")


class Taught(Net):
    def __init__(self) -> None:
        super().__init__()
        self.teachers = [nn.Sequential(nn.Linear(6, 3), nn.Dropout(0.5))]

    def loss(self, batch):
        return super().loss(batch) + (self(batch[0]) - self.teachers[0](batch[0]).detach()).square().mean()


@changes(module=Taught, first=lambda trainer, module: module.teachers[0].eval())
def module_in_a_list_evaluates_in_the_first_epoch(trainer, module):
    module.teachers[0].train()


def add_noise(trainer, module):
    trainer.train_dataloader.dataset.noise = trainer.val_dataloaders.dataset.noise = 0.5


@changes(first=add_noise, data=transformed, held_out=transformed, workers=(0, 2))
def data_noisy_in_the_first_epoch(trainer, module):
    trainer.train_dataloader.dataset.noise, trainer.val_dataloaders.dataset.noise = 0.0, 0.25


# -- at the start of each epoch


class Warm(Net):
    """Has a loss of its own, and other clipping, in the first batches of each epoch."""

    def __init__(self) -> None:
        super().__init__()
        self.warm = False

    def loss(self, batch):
        return super().loss(batch) * (0.3 if self.warm else 1.0)

    def on_train_epoch_start(self):
        self.warm, self.trainer.gradient_clip_val = True, 0.1

    def on_train_batch_start(self, batch, batch_idx):
        if batch_idx == 2:
            self.warm, self.trainer.gradient_clip_val = False, None


@scenario()
def warm_at_the_start_of_each_epoch(job: Job) -> None:
    job.fit(Warm())
