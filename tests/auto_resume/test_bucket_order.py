"""The first step of a resumed process adds gradients over three ranks in the order of the run that was not stopped."""

from functools import partial

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.utils.data import DataLoader

from lightning_tricks import AutoResume, GradualUnfreezing, seed_everything
from lightning_tricks.testing import assert_resumable
from tests.auto_resume.killing import resumed_at, run, warned
from tests.small import QUIET, Hooks, Net, digits


class Tangled(Net):
    """Its layers are used in another order than they are registered in, one of them twice."""

    def __init__(self):
        super().__init__("adamw")
        self.net = nn.ModuleDict({"head": nn.Linear(31, 10), "twice": nn.Linear(31, 31), "stem": nn.Linear(64, 31)})

    def forward(self, x):
        x = self.net["stem"](x.flatten(1)).relu()
        for _ in range(2):
            x = torch.tanh(self.net["twice"](x))
        return self.net["head"](x)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])


class Branching(Tangled):
    """Which gradient is ready first depends on the step."""

    def forward(self, x):
        x = self.net["stem"](x.flatten(1))
        twice = self.net["twice"](x)
        return self.net["head"](x + twice if self.global_step % 2 else twice + x)


class Adversarial(Tangled):
    """Two optimizers, one of which steps every other batch."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        for number, optimizer in enumerate(self.optimizers()):
            loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
            optimizer.zero_grad()
            self.manual_backward(loss)
            if number == 0 or batch_idx % 2:
                optimizer.step()

    def configure_optimizers(self):
        own = {name: layer.parameters() for name, layer in self.net.items()}
        return [torch.optim.AdamW(own["head"]), torch.optim.SGD([*own["twice"], *own["stem"]], 0.1)]


def hooked(hook, make_state=lambda: None):
    """A callback that registers a communication hook, as Lightning does on GPUs alone."""
    return Hooks(on_train_start=lambda trainer, _: trainer.model.register_comm_hook(make_state(), hook))


def make(folder, net=Tangled, callbacks=(), strategy=(), **options):
    seed_everything(1, verbose=False)
    strategy = DDPStrategy(start_method="fork", process_group_backend="gloo", **dict(strategy))
    options = {**QUIET, "max_epochs": 2, "devices": 3, **options}
    trainer = Trainer(strategy=strategy, callbacks=[one() for one in callbacks], **options)
    return trainer, net(), DataLoader(digits(70), 4, shuffle=True)


EXACT = {
    "as it is": {},
    "branches": {"net": Branching},
    "a bucket for each parameter": {"strategy": {"bucket_cap_mb": 0.001}},
    "views": {"strategy": {"gradient_as_bucket_view": True}, "accumulate_grad_batches": 4},
    "halves are sent": {"callbacks": [partial(hooked, default_hooks.fp16_compress_hook)]},
    "halves of two ranks": {"callbacks": [partial(hooked, default_hooks.fp16_compress_hook)], "devices": 2},
    "unused parameters are looked for": {"strategy": {"find_unused_parameters": True}},
    "two optimizers": {"net": Adversarial},
    "static graph": {"strategy": {"static_graph": True}},
    "unfreezing": {
        "callbacks": [lambda: GradualUnfreezing({0: "net.head.*", 1: "net.twice.*", 2: "net.stem.*"})],
        "max_epochs": 4,
    },
}


@pytest.mark.oldest
@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", EXACT)
def test_a_resumed_run_is_the_run_that_was_not_stopped(name):
    assert assert_resumable(partial(make, **EXACT[name]), stops=3).equal_batches >= 36


def _powers():
    return powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=1)


UNKNOWN = {
    "a hook with a state": ([partial(hooked, powerSGD_hook.powerSGD_hook, _powers)], {}, 3),
    "a static graph after its first step": ([], {"static_graph": True}, 1),
}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", UNKNOWN)
def test_where_the_order_is_not_known_a_resume_warns(name, tmp_path):
    callbacks, strategy, step = UNKNOWN[name]

    def fail(trainer, *_):
        if trainer.global_step == step:
            raise KeyError("stopped")

    def script(folder, _):
        stops = [] if (folder / "resume").exists() else [lambda: Hooks(on_train_batch_start=fail)]
        saves = partial(AutoResume, folder / "resume", every_n_train_steps=step, asynchronous=False)
        trainer, *given = make(folder, callbacks=[saves, *callbacks, *stops], strategy=strategy, max_epochs=1)
        trainer.fit(*given)

    assert run(tmp_path, {}, script=script) != 0
    assert run(tmp_path, {}, script=script) == 0
    assert set(resumed_at(tmp_path)) == {step}, (tmp_path / "output.txt").read_text()[-2000:]
    assert warned(tmp_path, "torch's DDP adds the first gradients of each start in another order")
