"""Models whose optimizers, batches or descriptions are not plain: adversaries, Hydra's configs."""

import hydra
import lightning
import torch
from lightning.pytorch import LightningDataModule, LightningModule
from omegaconf import OmegaConf
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.styles.batches import CLASSES
from tests.styles.frame import BATCHES, Job, points, style


def pictures(count: int = 4 * BATCHES, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    return TensorDataset(torch.rand(count, 3, 16, 16, generator=generator) / 2 + labels.view(-1, 1, 1, 1) / 4, labels)


class Gan(LightningModule):
    """Two adversaries, each with an optimizer, a scheduler and gradients of its own."""

    def __init__(self, penalty=0.0):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        last = nn.Linear(16, 768), nn.Sigmoid()
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), *last)
        self.discriminator = nn.Sequential(nn.Flatten(), nn.Linear(768, 16), nn.LeakyReLU(0.2), nn.Linear(16, 1))
        self.validation_z = torch.randn(4, 8)

    def forward(self, z):
        return self.generator(z).view(-1, 3, 16, 16)

    def gradient_penalty(self, real, fake):
        mixed = torch.lerp(real, fake, torch.rand(len(real), 1, 1, 1)).requires_grad_()
        (slope,) = torch.autograd.grad(self.discriminator(mixed).sum(), mixed, create_graph=True)
        return (slope.flatten(1).norm(dim=1) - 1).square().mean()

    def training_step(self, batch):
        images, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(images.shape[0], 8).type_as(images)
        judge = nn.functional.binary_cross_entropy_with_logits

        self.toggle_optimizer(optimizer_g)
        self.generated_imgs = self(z)
        scores = self.discriminator(self.generated_imgs)
        g_loss = judge(scores, torch.ones_like(scores))
        self.log("g_loss", g_loss, prog_bar=True)
        self.manual_backward(g_loss)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        fake = self(z).detach()
        d_loss = judge(self.discriminator(images), torch.ones_like(scores)) + judge(
            self.discriminator(fake), torch.zeros_like(scores)
        )
        if self.hparams.penalty:
            d_loss = d_loss + self.hparams.penalty * self.gradient_penalty(images, fake)
        self.log("d_loss", d_loss, prog_bar=True)
        self.manual_backward(d_loss)
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self):
        parts = self.generator, self.discriminator
        optimizers = [torch.optim.Adam(part.parameters(), lr=2e-4, betas=(0.5, 0.999)) for part in parts]
        return optimizers, []

    def on_validation_epoch_end(self):
        self.log("brightness", self(self.validation_z.type_as(self.generator[0].weight)).mean())

    def validation_step(self, batch, batch_idx):
        pass


@style()
def gan_with_toggled_optimizers(job: Job) -> None:
    lightning.seed_everything(1, verbose=False)
    job.fit(Gan(), DataLoader(pictures(), batch_size=4, shuffle=True), DataLoader(pictures(4, 2), batch_size=4))


@style(resumed=("had other values in the stopped run: module.validation_z",))
def gan_with_gradient_penalty(job: Job) -> None:
    job.fit(Gan(penalty=10.0), DataLoader(pictures(), batch_size=4, shuffle=True))


class Data(LightningDataModule):
    """Points in batches.

    Args:
        batch_size: How many points are in a batch.
    """

    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()

    def train_dataloader(self) -> DataLoader:
        return DataLoader(points(), batch_size=self.hparams["batch_size"], shuffle=True)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(points(12, 2), batch_size=self.hparams["batch_size"])


@style(metrics=CLASSES)
def hydra_targets(job: Job) -> None:
    """Hydra instantiates all of it; configs, not lists and dicts, are what the callbacks are given."""
    new = {name: {"_target_": f"lightning_tricks.{name}", **given} for name, given in job.added.items()}
    config = OmegaConf.create(
        {
            "seed": 1,
            "data": {"_target_": f"{__name__}.Data", "batch_size": 4},
            "model": {"_target_": "tests.styles.batches.Classifier"},
            "callbacks": new,
            "logger": {
                "_target_": "lightning.pytorch.loggers.CSVLogger",
                "save_dir": str(job.folder),
                "name": "logs",
            },
            "trainer": {"_target_": "lightning.Trainer", **job.settings()},
        }
    )
    callbacks = [hydra.utils.instantiate(callback) for callback in config.callbacks.values()]
    trainer = hydra.utils.instantiate(
        config.trainer,
        callbacks=[*callbacks, *job.probes()],
        logger=hydra.utils.instantiate(config.logger),
    )
    trainer.fit(hydra.utils.instantiate(config.model), datamodule=hydra.utils.instantiate(config.data))
