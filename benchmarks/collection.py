"""What the callbacks that people use together cost: an epoch with them, over one of the bare Trainer.

The six are SeedEverything, GradientClipping, MetricsMonitor, FlopsReport, ModelReport and AutoResume. The perceptron
(784-256-128-10, batches of 64) has steps of 2 ms; ResNet-18 gets batches of 32 images of 64 x 64 pixels. The GAN has
two optimizers under manual optimization, and nine callbacks that record and log all that they can.
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import partial

import torch
from _ratios import ACCELERATOR, arguments, be_quiet, measure, now, ratios, report
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from torchvision.models import resnet18

from lightning_tricks import (
    AutoResume,
    ExponentialMovingAverage,
    FlopsReport,
    GradientClipping,
    MetricsMonitor,
    ModelReport,
    RunFingerprint,
    RunReport,
    SeedEverything,
    SpikeGuard,
    seed_everything,
)
from lightning_tricks.metrics import binary_metrics, multiclass_metrics

MAKE: dict[str, Callable[[str], Callback]] = {
    "SeedEverything": lambda folder: SeedEverything(1),
    "GradientClipping": lambda folder: GradientClipping(1.0),
    "MetricsMonitor": lambda folder: MetricsMonitor(multiclass_metrics(10)),
    "FlopsReport": lambda folder: FlopsReport(),
    "ModelReport": lambda folder: ModelReport(),
    "AutoResume": lambda folder: AutoResume(f"{folder}/resume"),
    "RunReport": lambda folder: RunReport(f"{folder}/report"),
    "RunFingerprint": lambda folder: RunFingerprint(f"{folder}/run.jsonl"),
    "SpikeGuard": lambda folder: SpikeGuard(),
    "ExponentialMovingAverage": lambda folder: ExponentialMovingAverage(),
}
SIX = ["SeedEverything", "GradientClipping", "MetricsMonitor", "FlopsReport", "ModelReport", "AutoResume"]
AT_THEIR_MOST = MAKE | {
    "GradientClipping": lambda folder: GradientClipping(1.0, on_nonfinite="skip", log_norm="all", log_layers=True),
    "MetricsMonitor": lambda folder: MetricsMonitor(binary_metrics()),
    "RunFingerprint": lambda folder: RunFingerprint(f"{folder}/run.jsonl", detail="layer"),
    "SpikeGuard": lambda folder: SpikeGuard("rewind", monitor="grad_norm"),
}
Make = Callable[[], tuple[nn.Module, TensorDataset, int]]
STEPS, LATER, FIRST = "steps", "an epoch with its checkpoint", "the first epoch, with reports and all that starts a fit"


def mlp() -> tuple[nn.Module, TensorDataset, int]:
    """Return a perceptron whose step takes about 2 ms, 500 batches for it and their size."""
    net = nn.Sequential(nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 128), nn.ReLU(), nn.Linear(128, 10))
    return net, TensorDataset(torch.rand(32_000, 784), torch.randint(10, (32_000,))), 64


def gan() -> tuple[nn.Module, TensorDataset, int]:
    """Return the discriminator of a GAN whose step takes about 3 ms, 500 batches for it and their size."""
    net = nn.Sequential(nn.Linear(784, 64), nn.LeakyReLU(0.2), nn.Linear(64, 1))
    return net, TensorDataset(torch.rand(16_000, 784)), 32


def resnet() -> tuple[nn.Module, TensorDataset, int]:
    """Return torchvision's ResNet-18, 12 batches of 32 images of 64 x 64 pixels and their size."""
    return resnet18(num_classes=10), TensorDataset(torch.rand(384, 3, 64, 64), torch.randint(10, (384,))), 32


class Classifier(LightningModule):
    """A classifier that logs its loss."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Return the cross-entropy, the scores and the labels."""
        scores = self.net(batch[0])
        loss = nn.functional.cross_entropy(scores, batch[1])
        self.log("loss", loss)
        return {"loss": loss, "preds": scores, "target": batch[1]}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD with momentum."""
        return torch.optim.SGD(self.parameters(), 0.01, momentum=0.9)


class GAN(LightningModule):
    """A generator and a discriminator of three layers each, whose steps take 3 ms together."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.discriminator = net
        self.generator = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 784), nn.Sigmoid())

    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Tensor]:
        """Step the discriminator, then the generator; return the scores of the discriminator and the labels."""
        of_generator, of_discriminator = self.optimizers()
        images = batch[0]
        made = self.generator(torch.randn(len(images), 32, device=self.device))
        scores = self.discriminator(torch.cat([images, made.detach()])).squeeze(1)
        target = torch.cat([torch.ones(len(images)), torch.zeros(len(images))]).to(self.device)
        loss = nn.functional.binary_cross_entropy_with_logits(scores, target)
        of_discriminator.zero_grad()
        self.manual_backward(loss)
        of_discriminator.step()
        self.toggle_optimizer(of_generator)
        of_generator_loss = nn.functional.softplus(-self.discriminator(made)).mean()
        of_generator.zero_grad()
        self.manual_backward(of_generator_loss)
        of_generator.step()
        self.untoggle_optimizer(of_generator)
        self.log("loss/discriminator", loss)
        self.log("loss/generator", of_generator_loss)
        return {"loss": loss.detach(), "preds": scores.detach().sigmoid(), "target": target.long()}

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        """Return an Adam for each."""
        return [torch.optim.Adam(part.parameters(), 2e-4) for part in (self.generator, self.discriminator)]


class Clock(Callback):
    """Notes when the second epoch starts, its second batch starts and its last one ends."""

    def __init__(self) -> None:
        self.epoch = self.second_batch = self.last_batch = 0.0

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the time."""
        if trainer.current_epoch == 1:
            self.epoch = now()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int) -> None:
        """Note the time of the second batch."""
        if batch_idx == 1:
            self.second_batch = now()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """Note the time."""
        self.last_batch = now()


def parts_of(make: Make) -> tuple[LightningModule, dict[str, Callable[[str], Callback]], TensorDataset, int]:
    """Return a module, what makes its callbacks, its data and the size of a batch."""
    net, data, batch_size = make()
    return (GAN(net), AT_THEIR_MOST, data, batch_size) if make is gan else (Classifier(net), MAKE, data, batch_size)


def fit(make: Make, names: list[str]) -> dict[str, float]:
    """Train two epochs, and return what took how long."""
    seed_everything(1, verbose=False)
    model, callbacks, data, batch_size = parts_of(make)
    first, last = Clock(), Clock()  # what stands between them counts
    clips = {"gradient_clip_val": 1.0} if "gradient_clip_val" in names else {}
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()):
        trainer = Trainer(
            max_epochs=2,
            accelerator=ACCELERATOR,
            devices=1,
            logger=CSVLogger(folder),
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=[first, *(callbacks[name](folder) for name in names if name in callbacks), last],
            **clips,
        )
        start = now()
        trainer.fit(model, DataLoader(data, batch_size=batch_size))
        end = now()
    return {STEPS: last.last_batch - first.second_batch, LATER: end - first.epoch, FIRST: first.epoch - start}


def main() -> None:
    """Measure and report."""
    given = arguments(15)
    torch.set_num_threads(1)
    be_quiet()
    bare: dict[str, list[str]] = {"the bare Trainer": []}
    together = bare | {"all six": SIX}
    eight = {"all six, RunFingerprint and SpikeGuard": [*SIX, "RunFingerprint", "SpikeGuard"]}
    nine = {"nine callbacks at their most": [name for name in MAKE if name != "ExponentialMovingAverage"]}
    alone = {"Trainer(gradient_clip_val=1.0)": ["gradient_clip_val"]} | {name: [name] for name in MAKE}
    results = {}
    cases = (
        ("2 ms", mlp, together | eight | alone),
        ("ResNet-18", resnet, together),
        ("GAN of 3 ms", gan, bare | nine),
    )
    for step, make, contestants in cases:
        seen: dict[str, list[dict[str, float]]] = {name: [] for name in contestants}

        def run(name: str, names: list[str], make=make, seen=seen) -> None:
            seen[name].append(fit(make, names))

        measure({name: partial(run, name, names) for name, names in contestants.items()}, given.rounds, warmup=1)
        for part in (STEPS, LATER, FIRST):
            times = {name: [fitted[part] for fitted in fits[1:]] for name, fits in seen.items()}
            results[f"{part}, {step}"] = ratios(times, "the bare Trainer")
    report("collection", results, given.rounds, given.out)


if __name__ == "__main__":
    main()
