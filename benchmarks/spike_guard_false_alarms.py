"""How many batches of healthy runs SpikeGuard's rule would leave out, and which share of jumps of the loss it finds.

Small models are trained on data of which nothing is spoilt, at batch sizes 1 to 128, and the loss and the norm of the
gradients of each step are recorded. The rule judges them as the callback does, with its defaults; a last batch of an
epoch with fewer rows is not judged. In each tenth step it is asked whether it would find 3, 10 and 100 times the loss.

The rule was chosen on other seeds of the tasks in `SEEN`; it had seen little of the others, which are marked.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise, repeat
from pathlib import Path
from typing import Any

import torch
from _figures import columns_of
from _ratios import environment
from rich.console import Console
from rich.table import Table
from sklearn import datasets
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812  # its name in torch's documentation

from lightning_tricks.spike_guard.functional import RobustBand

BATCH_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)
FACTORS = (3, 10, 100)
Series = tuple[list[float], list[float]]  # losses, norms of gradients


def batches(rows: int, size: int) -> Iterator[Tensor]:
    """Yield the rows of the batches of one epoch after another; the last one of an epoch may have fewer."""
    while True:
        yield from torch.randperm(rows).split(size)


def mlp(*widths: int, dropout: float = 0.0) -> nn.Sequential:
    """Return layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU(), nn.Dropout(dropout)]
    return nn.Sequential(*layers[:-2])


def record(
    model: nn.Module,
    loss: Callable[[Tensor], Tensor],
    rows: int,
    size: int,
    steps: int,
    *,
    kind: str = "adam",
    lr: float = 1e-3,
    warmup: int = 0,
    cosine: bool = False,
    clip: float = math.inf,
) -> Series:
    """Train, and return the loss and the norm of the gradients of each step with a whole batch."""
    parameters = [*model.parameters()]
    kinds = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD, "adamw": torch.optim.AdamW}
    optimizer = kinds[kind](parameters, lr=lr, fused=True, **({"momentum": 0.9} if kind == "sgd" and warmup else {}))
    losses, norms = [], []
    for step, chosen in zip(range(steps), batches(rows, size), strict=False):
        scale = min(1.0, (step + 1) / warmup) if warmup else 1.0
        optimizer.param_groups[0]["lr"] = lr * scale * (0.5 + 0.5 * math.cos(math.pi * step / steps) if cosine else 1)
        value = loss(chosen)
        optimizer.zero_grad()
        value.backward()
        norm = nn.utils.clip_grad_norm_(parameters, clip)
        if len(chosen) == size:
            norms.append(float(norm))
            losses.append(float(value.detach()))
        optimizer.step()
    return losses, norms


def table(name: str) -> tuple[Tensor, Tensor]:
    """Return one of scikit-learn's small data sets, with standardised features."""
    inputs, targets = getattr(datasets, f"load_{name}")(return_X_y=True)
    inputs = torch.tensor(inputs, dtype=torch.float32)
    inputs = (inputs - inputs.mean(0)) / inputs.std(0).clamp_min(1e-3)
    if name in ("diabetes",):
        targets = torch.tensor(targets, dtype=torch.float32)
        return inputs, (targets - targets.mean()) / targets.std()
    return inputs, torch.tensor(targets)


def linear_regression(size: int, steps: int) -> Series:
    """A line through points with normally distributed noise."""
    inputs = torch.randn(steps * size, 8)
    targets = inputs @ torch.randn(8, 1) + torch.randn(steps * size, 1)
    net = nn.Linear(8, 1)
    return record(net, lambda i: F.mse_loss(net(inputs[i]), targets[i]), len(inputs), size, steps, kind="sgd", lr=0.01)


def diabetes(size: int, steps: int) -> Series:
    """Regression on 442 rows, until the net knows them by heart."""
    inputs, targets = table("diabetes")
    net = mlp(10, 32, 1)
    return record(net, lambda i: F.mse_loss(net(inputs[i])[:, 0], targets[i]), len(inputs), size, steps)


def laplace_regression(size: int, steps: int) -> Series:
    """A curve through points whose noise has the tails of Laplace's distribution, by the mean absolute error."""
    inputs = torch.rand(4000, 1) * 6
    targets = inputs.sin() + 0.3 * torch.distributions.Laplace(0.0, 1.0).sample((4000, 1))
    net = mlp(1, 32, 32, 1)
    return record(net, lambda i: F.l1_loss(net(inputs[i]), targets[i]), len(inputs), size, steps, warmup=200)


def autoencoder(size: int, steps: int) -> Series:
    """Digits through 8 numbers, with a cosine schedule after a warm-up."""
    inputs, _ = table("digits")
    net = mlp(64, 32, 8, 32, 64)
    options = {"kind": "adamw", "lr": 3e-3, "warmup": 100, "cosine": True}
    return record(net, lambda i: F.mse_loss(net(inputs[i]), inputs[i]), len(inputs), size, steps, **options)


def classification(name: str, **options: object) -> Callable[[int, int], Series]:
    """Return the training of a classifier on one of scikit-learn's data sets, long after all rows are learnt."""

    def train(size: int, steps: int) -> Series:
        inputs, labels = table(name)
        net = mlp(inputs.shape[1], 64, int(labels.max()) + 1)
        loss = nn.CrossEntropyLoss()
        return record(net, lambda i: loss(net(inputs[i]), labels[i]), len(inputs), size, steps, **options)

    return train


def noisy_labels(size: int, steps: int) -> Series:
    """Digits of which one label in five is wrong, with dropout and label smoothing."""
    inputs, labels = table("digits")
    labels = torch.where(torch.rand(len(labels)) < 0.2, torch.randint(10, labels.shape), labels)
    net, loss = mlp(64, 64, 10, dropout=0.2), nn.CrossEntropyLoss(label_smoothing=0.1)
    return record(net, lambda i: loss(net(inputs[i]), labels[i]), len(inputs), size, steps, kind="sgd", lr=0.02)


def rare_class(size: int, steps: int) -> Series:
    """A class that one row in fifty has, by the binary cross-entropy."""
    inputs = torch.randn(6000, 10)
    labels = (torch.rand(6000) < torch.sigmoid(inputs[:, 0] * 2 - 5)).float()
    net, loss = mlp(10, 32, 1), nn.BCEWithLogitsLoss()
    return record(net, lambda i: loss(net(inputs[i])[:, 0], labels[i]), len(inputs), size, steps)


def small_images(size: int, steps: int) -> Series:
    """A convolutional net with batch statistics on digits, which are moved by a pixel."""
    inputs, labels = table("digits")
    inputs = inputs.view(-1, 1, 8, 8)
    norm = nn.GroupNorm(2, 8) if size == 1 else nn.BatchNorm2d(8)
    net = nn.Sequential(nn.Conv2d(1, 8, 3, stride=2), norm, nn.ReLU(), nn.Flatten(), nn.Linear(72, 10))

    def loss(i: Tensor) -> Tensor:
        return F.cross_entropy(net(inputs[i].roll(int(torch.randint(-1, 2, ())), -1)), labels[i])

    return record(net, loss, len(inputs), size, steps, lr=3e-3, warmup=100)


def language_model(size: int, steps: int) -> Series:
    """A model of the next character of texts, of the eight before it."""
    text = "".join(getattr(datasets, f"load_{name}")().DESCR for name in ("diabetes", "iris", "wine", "digits"))
    letters = {letter: number for number, letter in enumerate(sorted(set(text)))}
    tokens = torch.tensor([letters[letter] for letter in text]).unfold(0, 9, 3)
    net = nn.Sequential(nn.Embedding(len(letters), 16), nn.Flatten(), *mlp(128, 64, len(letters)))
    options = {"kind": "adamw", "lr": 3e-3, "warmup": 100, "cosine": True, "clip": 1.0}
    return record(
        net, lambda i: F.cross_entropy(net(tokens[i, :-1]), tokens[i, -1]), len(tokens), size, steps, **options
    )


def two_nets(size: int, steps: int, *, wasserstein: bool) -> Series:
    """The losses of a GAN's discriminator, or of a WGAN's critic, which are negative."""
    angle = torch.rand(4000) * 2 * math.pi
    real = torch.stack([angle.cos(), angle.sin()], 1) + 0.05 * torch.randn(4000, 2)
    maker, judge = mlp(4, 32, 2), mlp(2, 32, 1)
    of_maker = torch.optim.Adam(maker.parameters(), lr=1e-3, betas=(0.5, 0.9), fused=True)

    def judged(rows: Tensor, target: float) -> Tensor:
        scores = judge(rows)
        return scores.mean() * (1 - 2 * target) if wasserstein else F.softplus(scores * (1 - 2 * target)).mean()

    def loss(i: Tensor) -> Tensor:
        of_maker.zero_grad()
        judged(maker(torch.randn(len(i), 4)), 1.0).backward()
        of_maker.step()
        if wasserstein:
            for weight in judge.parameters():
                weight.data.clamp_(-0.2, 0.2)
        return judged(real[i], 1.0) + judged(maker(torch.randn(len(i), 4)).detach(), 0.0)

    return record(judge, loss, len(real), size, steps)


def gan(size: int, steps: int) -> Series:
    """A GAN's discriminator."""
    return two_nets(size, steps, wasserstein=False)


def wgan(size: int, steps: int) -> Series:
    """A WGAN's critic."""
    return two_nets(size, steps, wasserstein=True)


def normal_density(size: int, steps: int) -> Series:
    """A mean and a variance for each point, by the negative logarithm of the density, which falls below 0."""
    inputs = torch.rand(4000, 1) * 4
    targets = 0.1 * inputs.sin() + 0.02 * (1 + inputs) * torch.randn(4000, 1)
    net = mlp(1, 32, 2)

    def loss(i: Tensor) -> Tensor:
        mean, variance = net(inputs[i]).split(1, 1)
        return F.gaussian_nll_loss(mean, targets[i], F.softplus(variance) + 1e-3)

    return record(net, loss, len(inputs), size, steps)


def mixture_density(size: int, steps: int) -> Series:
    """A mixture of five normal distributions of digits' first principal components."""
    inputs = table("wine")[0]
    values = 0.1 * (inputs @ torch.linalg.svd(inputs).Vh[:2].T)
    model = nn.ParameterList([nn.Parameter(torch.randn(5, 2) * 0.1), nn.Parameter(torch.zeros(5, 2) - 1)])

    def loss(i: Tensor) -> Tensor:
        parts = torch.distributions.Normal(model[0], model[1].exp()).log_prob(values[i, None]).sum(-1)
        return math.log(5) - parts.logsumexp(-1).mean()

    return record(model, loss, len(values), size, steps, lr=5e-3)


def variational(size: int, steps: int) -> Series:
    """A variational autoencoder."""
    inputs = table("iris")[0]
    net = nn.ModuleList([mlp(4, 32, 4), mlp(2, 32, 4)])

    def loss(i: Tensor) -> Tensor:
        mean, logarithm = net[0](inputs[i]).split(2, 1)
        decoded = net[1](mean + torch.randn_like(mean) * (logarithm / 2).exp())
        divergence = 0.5 * (mean.square() + logarithm.exp() - 1 - logarithm).sum(1).mean()
        return (decoded - inputs[i]).square().sum(1).mean() + divergence

    return record(net, loss, len(inputs), size, steps, lr=2e-3)


def triplets(size: int, steps: int) -> Series:
    """Distances with a margin: the loss of most batches is 0 in the end."""
    inputs, labels = table("digits")
    order, counts = labels.argsort(), labels.bincount()
    net = mlp(64, 32, 8)

    def loss(i: Tensor) -> Tensor:
        place = (torch.rand(len(i)) * counts[labels[i]]).long()
        same = order[counts.cumsum(0)[labels[i]] - 1 - place]
        other = torch.randint(len(labels), (len(i),))
        return F.triplet_margin_loss(net(inputs[i]), net(inputs[same]), net(inputs[other]))

    return record(net, loss, len(inputs), size, steps)


def policy_gradient(size: int, steps: int) -> Series:
    """A bandit whose arms pay differently in each state, by the gradient of the policy with a baseline."""
    states, pays = torch.randn(4000, 6), torch.randn(6, 4)
    net, baseline = mlp(6, 32, 4), [0.0]

    def loss(i: Tensor) -> Tensor:
        policy = torch.distributions.Categorical(logits=net(states[i]), validate_args=False)
        chosen = policy.sample()
        reward = (states[i] @ pays).gather(1, chosen[:, None])[:, 0] + 0.1 * torch.randn(len(i))
        advantage = reward - baseline[0]
        baseline[0] += 0.05 * float(advantage.mean())
        return -(policy.log_prob(chosen) * advantage).mean() - 0.01 * policy.entropy().mean()

    return record(net, loss, len(states), size, steps)


def boring(size: int, steps: int) -> Series:
    """Lightning's BoringModel, with a rate at which it does not diverge in single rows."""
    rows, net = torch.randn(64 * size, 32), nn.Linear(32, 2)
    return record(
        net, lambda i: F.mse_loss(net(rows[i]), torch.ones(len(i), 2)), len(rows), size, steps, kind="sgd", lr=0.01
    )


def exact_regression(size: int, steps: int) -> Series:
    """A line through points without noise, until the loss is what rounding leaves of it."""
    inputs = torch.randn(1000, 8)
    targets, net = inputs @ torch.randn(8, 1), nn.Linear(8, 1)
    return record(net, lambda i: F.mse_loss(net(inputs[i]), targets[i]), 1000, size, steps, lr=0.02, cosine=True)


SEEN: dict[str, Callable[[int, int], Series]] = {
    "linear regression": linear_regression,
    "diabetes, regression": diabetes,
    "Laplace noise, mean absolute error": laplace_regression,
    "digits, autoencoder": autoencoder,
    "digits, classification": classification("digits", lr=3e-3),
    "iris, classification": classification("iris", lr=1e-2),
    "wine, classification": classification("wine", kind="sgd", lr=0.05, warmup=100),
    "breast cancer, classification": classification("breast_cancer", kind="adamw", lr=3e-3, cosine=True),
    "digits, a fifth of the labels wrong": noisy_labels,
    "a rare class": rare_class,
    "digits, convolutions": small_images,
    "characters, language model": language_model,
    "GAN": gan,
    "normal density": normal_density,
}
UNSEEN: dict[str, Callable[[int, int], Series]] = {
    "WGAN": wgan,
    "mixture density": mixture_density,
    "variational autoencoder": variational,
    "triplets": triplets,
    "policy gradient": policy_gradient,
    "BoringModel": boring,
    "regression without noise": exact_regression,
}


def judge(values: Sequence[float]) -> tuple[int, list[int]]:
    """Return how many values would be left out, and of each tenth one which factors would be found, in percent."""
    band, left_out, found, asked = RobustBand(), 0, [0] * len(FACTORS), 0
    for step, value in enumerate(values):
        if step % 10 == 0 and step >= band.warmup_steps and min(values) > 0:
            limit, asked = band.limit(), asked + 1
            found = [count + (factor * value > limit) for count, factor in zip(found, FACTORS, strict=True)]
        left_out += band.take([value]) is not None
    return left_out, [*found, asked]


def count(task: str, seed: int, steps: int) -> dict[str, Counter[Any]]:
    """Train with all batch sizes, judge, and return the counts by the row of the table."""
    torch.set_num_threads(1)
    rows: dict[str, Counter[Any]] = defaultdict(Counter)
    for size in BATCH_SIZES:
        torch.manual_seed(1000 * seed + size)
        losses, norms = (SEEN | UNSEEN)[task](size, steps)
        left_out, found = judge(losses)
        counts: Counter[Any] = Counter({"runs": 1, "batches": len(losses), "left out by loss": left_out})
        counts["left out by norm"] = judge(norms)[0]
        for name in ("all", task if task in SEEN else f"{task} (unseen)"):
            rows[name].update(counts)
        rows[f"batch size {size}"].update(counts | dict(zip((*FACTORS, "asked"), found, strict=True)))
    print(task, dict(rows["all"]), flush=True)
    return rows


def main() -> None:
    """Train, judge, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=2000, help="steps of each run (%(default)s)")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON")
    given = parser.parse_args()
    rows: dict[str, Counter[Any]] = defaultdict(Counter)
    with ProcessPoolExecutor() as pool:
        arguments = [*(SEEN | UNSEEN)], repeat(given.seed), repeat(given.steps)
        for found in pool.map(count, *arguments):
            for name, counts in found.items():
                rows[name].update(counts)
    report(rows, given.out)


def report(rows: Mapping[str, Counter[Any]], out: Path) -> None:
    """Print the counts as a table and write them, with the environment."""
    kinds = ("runs", "batches", "left out by loss", "left out by norm")
    counted: dict[str, dict[str, Any]] = {}
    for name, row in sorted(rows.items(), key=lambda item: "batch size" not in item[0] and item[0] != "all"):
        shares = {f"x {f} found": f"{100 * row[f] / row['asked']:.0f} %" for f in FACTORS if row["asked"]}
        counted[name] = {kind: row[kind] for kind in kinds} | shares
    table = Table("", *columns_of(counted), title="spike_guard_false_alarms")
    for name, row in counted.items():
        table.add_row(name, *(str(row.get(column, "")) for column in columns_of(counted)))
    Console(width=140).print(table)
    out.mkdir(parents=True, exist_ok=True)
    result = {"claim": "spike_guard_false_alarms", "rounds": counted["all"]["batches"], "environment": environment()}
    text = json.dumps(result | {"healthy runs": counted}, indent=2)
    (out / "spike_guard_false_alarms.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
