"""What Muon for the matrices of the blocks, with AdamW for the rest, buys a small transformer over AdamW for all.

Each row of a digit is a token of two blocks, 64 wide, that train for 100 steps. 20 paired seeds draw the weights, the
order of the batches, and which digits train, tune and test. Before, three other seeds tune both alike, by the loss of
held out digits: seven learning rates of AdamW, and seven of Muon, beside AdamW with the rate that was the best alone.
Steps of the optimizers alone are timed on the same model, alternately.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from _figures import figures, interval, report_figures
from _ratios import LEAN, be_quiet, measure, work
from lightning.pytorch import LightningModule, Trainer
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import OptimizerSpec, ScheduleSpec
from lightning_tricks.lr_schedules import build_optimizer, build_schedule

ALONE, BOTH = "AdamW", "Muon and AdamW"
ADAMW_RATES = (3e-4, 6e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2)
MUON_RATES = (1e-3, 2e-3, 5e-3, 1e-2, 2e-2, 5e-2, 1e-1)
STEPS, WIDTH, TUNING_SEEDS = 100, 64, range(1000, 1003)


class Block(nn.Module):
    """Attention of four heads, and a perceptron."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """Return as many tokens."""
        heads = self.qkv(self.norm1(x)).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Digits(LightningModule):
    """A transformer on the rows of a digit."""

    def __init__(self, spec: OptimizerSpec) -> None:
        super().__init__()
        self.spec = spec
        self.embedding, self.position = nn.Linear(8, WIDTH), nn.Parameter(0.02 * torch.randn(8, WIDTH))
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits."""
        tokens = self.embedding(x.view(-1, 8, 8)) + self.position
        for block in self.blocks:
            tokens = block(tokens)
        return self.head(self.norm(tokens).mean(1))

    def training_step(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        """Return the loss."""
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self):
        """Warm up, and fall along a cosine; both optimizers alike."""
        optimizer = build_optimizer(self, self.spec)
        return [optimizer], [build_schedule(optimizer, ScheduleSpec(), self.trainer)]


def spec_of(name: str, rate: float, rest: float = 0.0) -> OptimizerSpec:
    """Return the contestant with a learning rate; for Muon also that of AdamW."""
    if name == ALONE:
        return OptimizerSpec("AdamW", lr=rate)
    return OptimizerSpec("Muon", lr=rate, only=["blocks.*.weight"], rest=OptimizerSpec("AdamW", lr=rest))


def fit(spec: OptimizerSpec, seed: int) -> dict[str, float]:
    """Train on 800 digits, and return the losses on them, on 400 to tune by, and on 597 to test with."""
    pixels, labels = map(torch.tensor, load_digits(return_X_y=True))
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(labels), generator=generator)
    x, y = pixels[order].float() / 16, labels[order]
    data = DataLoader(TensorDataset(x[:800], y[:800]), 64, shuffle=True, drop_last=True, generator=generator)
    torch.manual_seed(seed)
    module = Digits(spec)
    Trainer(**LEAN, max_steps=STEPS, max_epochs=-1, enable_checkpointing=False).fit(module, data)
    with torch.no_grad():
        scores = module.eval()(x)
    losses = nn.functional.cross_entropy(scores, y, reduction="none")
    return {
        "training loss": losses[:800].mean().item(),
        "held out loss": losses[800:1200].mean().item(),
        "test loss": losses[1200:].mean().item(),
        "test accuracy, %": 100 * (scores.argmax(1) == y)[1200:].double().mean().item(),
    }


def tuned(specs: dict[float, OptimizerSpec]) -> float:
    """Return the learning rate with the smallest mean loss of held out digits."""
    means = {r: statistics.mean(fit(spec, seed)["held out loss"] for seed in TUNING_SEEDS) for r, spec in specs.items()}
    best = min(means, key=lambda rate: means[rate])
    print({rate: round(loss, 4) for rate, loss in means.items()}, "best:", best)
    return best


def stepping(by_hand: bool, spec: OptimizerSpec) -> Callable[[], float]:
    """Return 50 steps of an optimizer, which time themselves, or of each of its parts."""
    torch.manual_seed(0)
    module = Digits(spec)
    optimizer = build_optimizer(module, spec)
    for parameter in module.parameters():
        parameter.grad = torch.randn_like(parameter)
    optimizers = [optimizer]
    if by_hand:  # copies, whose state is their own
        optimizers = [copy.copy(part) for part in optimizer.parts.values()]
        for one in optimizers:
            one.state = copy.copy(one.state)

    def steps() -> float:
        start = work()
        for _ in range(50):
            for one in optimizers:
                one.step()
        return work() - start

    return steps


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=20, help="fits of each (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results", help="folder of the JSON")
    given = parser.parse_args()
    be_quiet()
    torch.set_num_threads(1)
    alone = tuned({rate: spec_of(ALONE, rate) for rate in ADAMW_RATES})
    both = tuned({rate: spec_of(BOTH, rate, alone) for rate in MUON_RATES})
    specs = {ALONE: spec_of(ALONE, alone), BOTH: spec_of(BOTH, both, alone)}
    runs = {name: [fit(spec, seed) for seed in range(given.seeds)] for name, spec in specs.items()}
    found = figures(runs, [(BOTH, ALONE)])
    steps = {name: stepping(False, spec) for name, spec in specs.items()}
    times = measure({**steps, "by hand": stepping(True, specs[BOTH])}, 40)
    for peer in ("by hand", ALONE):
        each = [own / other for own, other in zip(times[BOTH], times[peer], strict=True)]
        found.setdefault("time of an optimizer step", {})[f"{BOTH} / {peer}"] = interval(each)
    report_figures("muon", found, given.seeds, given.out)


if __name__ == "__main__":
    main()
