"""What ensembles cost over torchensemble's, how accurate they are beside them, and inference over a loop."""

from __future__ import annotations

import contextlib
import io
import json
import statistics
from collections.abc import Callable
from functools import partial

import torch
import torchensemble
from _figures import interval
from _ratios import ACCELERATOR, LEAN, arguments, be_quiet, measure, ratios, report, work
from lightning.pytorch import Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks.ensembles import VotingClassifier


class DigitsMLP(nn.Module):
    """64-32-10."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        return self.last(functional.relu(self.first(x)))


class MLP(nn.Module):
    """784-128-128-10, as in torchensemble's documentation."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(784, 128), nn.Linear(128, 128), nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = x.view(x.size(0), -1)
        return self.last(functional.relu(self.second(functional.relu(self.first(x)))))


class LeNet(nn.Module):
    """LeNet-5 for 28 x 28 pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5, padding=2), nn.Conv2d(6, 16, 5)
        self.fc1, self.fc2, self.fc3 = nn.Linear(400, 120), nn.Linear(120, 84), nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        x = functional.max_pool2d(functional.relu(self.conv1(x)), 2)
        x = functional.max_pool2d(functional.relu(self.conv2(x)), 2)
        x = functional.relu(self.fc1(x.view(x.size(0), -1)))
        return self.fc3(functional.relu(self.fc2(x)))


def digits(count: int = 1297) -> tuple[TensorDataset, TensorDataset]:
    """So many of the 1,797 digits to train with, and the others to test with."""
    pixels, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    return TensorDataset(x[order[:count]], y[order[:count]]), TensorDataset(x[order[count:]], y[order[count:]])


def random_images(count: int) -> TensorDataset:
    """Images and labels; what they show does not matter to the clock."""
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.rand(count, 1, 28, 28, generator=generator), torch.randint(10, (count,), generator=generator)
    )


def fit_theirs(
    net: type[nn.Module], n: int, data: TensorDataset, epochs: int, lr: float = 1e-3
) -> tuple[nn.Module, float]:
    """Fit torchensemble's VotingClassifier; return it and the CPU time in seconds."""
    model = torchensemble.VotingClassifier(estimator=net, n_estimators=n, cuda=ACCELERATOR == "cuda")
    model.set_optimizer("Adam", lr=lr)
    loader = DataLoader(data, 64, shuffle=True)
    start = work()
    with contextlib.redirect_stdout(io.StringIO()):
        model.fit(loader, epochs=epochs, log_interval=10**9, save_model=False)
    return model, work() - start


def fit_ours(
    net: type[nn.Module], n: int, data: TensorDataset, epochs: int, lr: float = 1e-3, **options: bool
) -> tuple[VotingClassifier, float]:
    """Fit our VotingClassifier, the Trainer included; return it and the CPU time in seconds."""
    model = VotingClassifier(net, n, optimizer=("Adam", {"lr": lr}), **options)
    loader = DataLoader(data, 64, shuffle=True)
    start = work()
    Trainer(max_epochs=epochs, enable_checkpointing=False, **LEAN).fit(model, loader)
    return model, work() - start


def training(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """CPU time of a fit over torchensemble's of the same data, epochs, batch size and optimizer."""
    train, images, results = digits()[0], random_images(2000), {}
    for net, n, data, epochs in (
        (DigitsMLP, 10, train, 4), (DigitsMLP, 32, train, 4), (MLP, 5, images, 2), (LeNet, 5, images, 1),
    ):  # fmt: skip

        def cpu_time(fit: Callable[..., tuple[nn.Module, float]], job: tuple = (net, n, data, epochs)) -> float:
            return fit(*job)[1]

        contestants = {
            "torchensemble": partial(cpu_time, fit_theirs),
            "VotingClassifier": partial(cpu_time, fit_ours),
            "shared_order=True": partial(cpu_time, partial(fit_ours, shared_order=True)),
            "vectorize=False": partial(cpu_time, partial(fit_ours, vectorize=False)),
        }
        results[f"fit {net.__name__}, {n} members"] = ratios(measure(contestants, rounds, 1), "torchensemble")
    return results


def inference(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Time of the members' outputs over that of a loop over plain modules."""
    results = {}
    for net, n, shape in ((DigitsMLP, 10, (64,)), (MLP, 5, (784,)), (LeNet, 5, (1, 28, 28))):
        ensemble = VotingClassifier(net, n).eval()
        members = [ensemble.estimators_.member(index).eval() for index in range(n)]
        for batch in (1, 64, 500):
            x, repeats = torch.rand(batch, *shape), max(3, 300 // batch)

            def at_once(x: Tensor = x, repeats: int = repeats, ensemble: VotingClassifier = ensemble) -> None:
                for _ in range(repeats):
                    ensemble.member_outputs(x)

            def loop(x: Tensor = x, repeats: int = repeats, members: list[nn.Module] = members) -> None:
                for _ in range(repeats):
                    torch.stack([member(x) for member in members])

            with torch.inference_mode():
                times = measure({"loop": loop, "member_outputs": at_once}, 3 * rounds)
            results[f"inference {net.__name__}, {n} members, batch {batch}"] = ratios(times, "loop")
    return results


def accuracies(seeds: int = 20) -> dict[str, float]:
    """Difference of the test accuracies, ours minus torchensemble's, in points, with its 95 % interval.

    Twenty members and a thousand digits to test with: the two differ by chance alone, and this makes it small.
    """
    train, test = digits(797)
    x, y = test.tensors
    differences, ours_at, theirs_at = [], [], []
    for seed in range(seeds):
        torch.manual_seed(seed)
        theirs, _ = fit_theirs(DigitsMLP, 20, train, 20, lr=5e-3)
        ours, _ = fit_ours(DigitsMLP, 20, train, 20, lr=5e-3)
        found = [100 * (m.predict(x).argmax(1) == y).double().mean().item() for m in (ours, theirs)]
        ours_at.append(found[0])
        theirs_at.append(found[1])
        differences.append(found[0] - found[1])
    mean, lower, upper = interval(differences).values()
    return {
        "ours": statistics.mean(ours_at),
        "torchensemble": statistics.mean(theirs_at),
        "difference": mean,
        "lower": lower,
        "upper": upper,
    }


def main() -> None:
    """Measure, print and write."""
    be_quiet()
    given = arguments(default_rounds=15)
    torch.set_num_threads(1)
    report("ensembles", {**training(given.rounds), **inference(given.rounds)}, given.rounds, given.out)
    points = {name: round(value, 3) for name, value in accuracies().items()}
    print("test accuracy, digits, 20 members, 20 epochs, 20 pairs of fits, in %:", points)
    (given.out / "ensembles_accuracy.json").write_text(json.dumps(points, indent=2) + "\n")


if __name__ == "__main__":
    main()
