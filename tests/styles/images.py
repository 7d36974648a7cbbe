"""Models of images: an autoencoder, a pretrained backbone, adversaries, two views of one image."""

import copy

import lightning
import torch
import torchvision
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from tests.styles.frame import BATCHES, Job, style

CLASSES = {"task": "multiclass", "num_classes": 3}


def pictures(count: int = 4 * BATCHES, seed: int = 1, side: int = 16) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(3, (count,), generator=generator)
    return TensorDataset(
        torch.rand(count, 3, side, side, generator=generator) / 2 + labels.view(-1, 1, 1, 1) / 4, labels
    )


class LitAutoEncoder(LightningModule):
    """The example of Lightning's front page: its forward pass is not what it trains."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(3 * 16 * 16, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 3 * 16 * 16))
        self.example_input_array = torch.zeros(2, 3 * 16 * 16)

    def forward(self, x):
        return self.encoder(x)

    def step(self, batch, name):
        x, _ = batch
        x = x.view(x.size(0), -1)
        loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
        self.log(name, loss, prog_bar=True)
        return loss

    def training_step(self, batch, batch_idx):
        return self.step(batch, "train_loss")

    def validation_step(self, batch, batch_idx):
        self.step(batch, "val_loss")

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


@style()
def autoencoder(job: Job) -> None:
    loaders = [DataLoader(pictures(seed=seed), batch_size=4, shuffle=seed == 1) for seed in (1, 2)]
    job.fit(LitAutoEncoder(), *loaders)


class Transfer(LightningModule):
    """A frozen backbone in eval mode, and a head on it."""

    def __init__(self):
        super().__init__()
        backbone = torchvision.models.ShuffleNetV2([1, 1, 1], [4, 8, 8, 8, 16])
        width = backbone.fc.in_features
        self.feature_extractor = nn.Sequential(*list(backbone.children())[:-1])
        for parameter in self.feature_extractor.parameters():
            parameter.requires_grad = False
        self.classifier = nn.Linear(width, 3)
        self.accuracy = MulticlassAccuracy(3)

    def forward(self, x):
        self.feature_extractor.eval()
        with torch.no_grad():
            features = self.feature_extractor(x).mean((2, 3))
        return self.classifier(features)

    def training_step(self, batch, batch_idx):
        x, y = batch
        scores = self(x)
        loss = nn.functional.cross_entropy(scores, y)
        self.log_dict({"train_loss": loss, "train_acc": self.accuracy(scores, y)}, on_epoch=True)
        return {"loss": loss, "preds": scores, "target": y}

    def validation_step(self, batch, batch_idx):
        x, y = batch
        return {"preds": self(x), "target": y}

    def configure_optimizers(self):
        trained = filter(lambda parameter: parameter.requires_grad, self.parameters())
        optimizer = torch.optim.SGD(trained, lr=0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@style(metrics=CLASSES, images=True)
def classifier_with_a_frozen_backbone(job: Job) -> None:
    loaders = [DataLoader(pictures(seed=seed, side=32), batch_size=4, shuffle=seed == 1) for seed in (1, 2)]
    job.fit(Transfer(), *loaders)


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


class Views(Dataset):
    """Two random views of each image, as self-supervised learning takes them."""

    def __init__(self):
        self.data = pictures()

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        image, label = self.data[index]
        return [image.flip(-1) if torch.rand(()) < 0.5 else image + 0.1 * torch.randn(3, 1, 1) for _ in range(2)], label


class Momentum(LightningModule):
    """A student, its slow copy, and a queue of what the copy has seen."""

    def __init__(self):
        super().__init__()
        convolution = nn.Conv2d(3, 4, 3, 2), nn.BatchNorm2d(4), nn.ReLU()
        self.online = nn.Sequential(*convolution, nn.Flatten(), nn.Linear(196, 8))
        self.target = copy.deepcopy(self.online)
        self.target.requires_grad_(False)
        self.register_buffer("queue", nn.functional.normalize(torch.randn(8, 16), dim=0))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch, batch_idx):
        (first, second), _ = batch
        query = nn.functional.normalize(self.online(first), dim=1)
        with torch.no_grad():
            key = nn.functional.normalize(self.target(second), dim=1)
        scores = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().detach()], dim=1)
        pointer = int(self.queue_ptr)
        self.queue[:, pointer : pointer + 4] = key.T
        self.queue_ptr[0] = (pointer + 4) % 16
        loss = nn.functional.cross_entropy(scores / 0.07, torch.zeros(len(scores), dtype=torch.long))
        self.log("loss_ssl", loss)
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        for slow, fast in zip(self.target.parameters(), self.online.parameters(), strict=True):
            slow.data.mul_(0.9).add_(fast.data, alpha=0.1)

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 18)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@style()
def momentum_contrast(job: Job) -> None:
    job.fit(Momentum(), DataLoader(Views(), batch_size=4, shuffle=True, drop_last=True))
