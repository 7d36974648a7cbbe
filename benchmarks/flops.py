"""The time and memory that counting FLOPs takes, and the MACs of each counter, for ResNet-50, ViT-B/16 and Swin-T.

Times are relative to one real forward pass (or training step) of a batch of eight, on the same model. Other counters
are given a copy of the model, because most of them change it.
"""

from __future__ import annotations

import contextlib
import copy
import io
import json
import subprocess
import sys
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _ratios import arguments, measure, ratios, report
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import get_model, get_model_weights

warnings.filterwarnings("ignore")
import ptflops  # noqa: E402
import thop  # noqa: E402
import torchinfo  # noqa: E402
from fvcore.nn import FlopCountAnalysis  # noqa: E402

from lightning_tricks import count_flops  # noqa: E402

MODELS = ("resnet50", "vit_b_16", "swin_t")
MEMORY = """
import pathlib, re, sys, torch
from torchvision.models import get_model
from lightning_tricks import count_flops
def kibibytes(what):
    return int(re.search(what + r":\\s+(\\d+) kB", pathlib.Path("/proc/self/status").read_text())[1])
count_flops(get_model("shufflenet_v2_x0_5"), torch.empty(1, 3, 64, 64), backward=True)
model, images = get_model(sys.argv[1]), torch.empty(1, 3, 224, 224)
weights = sum(p.numel() * p.element_size() for p in model.parameters())
pathlib.Path("/proc/self/clear_refs").write_text("5")  # resets the peak on Linux
before = kibibytes("VmRSS")
count_flops(model, images, backward=bool(int(sys.argv[2])))
print((kibibytes("VmHWM") - before) * 1024 / weights)
"""


def by_thop(model: nn.Module, images: torch.Tensor) -> float:
    """Count with thop."""
    return float(thop.profile(model, (images,), verbose=False)[0])


def by_fvcore(model: nn.Module, images: torch.Tensor) -> float:
    """Count with fvcore, which calls a MAC a FLOP."""
    analysis = FlopCountAnalysis(model, images).unsupported_ops_warnings(False).uncalled_modules_warnings(False)
    return float(analysis.total())


def by_ptflops(model: nn.Module, images: torch.Tensor) -> float:
    """Count with ptflops."""
    shape = tuple(images.shape[1:])
    macs, _ = ptflops.get_model_complexity_info(
        model, shape, as_strings=False, print_per_layer_stat=False, ost=io.StringIO()
    )
    return float(macs)


def by_torchinfo(model: nn.Module, images: torch.Tensor) -> float:
    """Count with torchinfo."""
    return float(torchinfo.summary(model, input_data=images, verbose=0).total_mult_adds)


def by_torch(model: nn.Module, images: torch.Tensor) -> float:
    """Count with torch's FlopCounterMode, in a real run."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(images)
    return counter.get_total_flops() / 2


def by_lightning_tricks(model: nn.Module, images: torch.Tensor) -> float:
    """Count with this package."""
    return count_flops(model, images).macs


COUNTERS = {
    "lightning_tricks": by_lightning_tricks,
    "thop": by_thop,
    "fvcore": by_fvcore,
    "ptflops": by_ptflops,
    "torchinfo": by_torchinfo,
    "FlopCounterMode": by_torch,
}


def _discard(count: Callable[..., Any], *args: Any) -> None:
    count(*args)  # returns nothing, because `measure` takes a float for a time


def cost(name: str, rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Return the time of each counter, relative to that of a real batch."""
    model, batch = get_model(name).eval(), torch.randn(8, 3, 224, 224)
    image = batch[:1]
    other = copy.deepcopy(model)

    def forward() -> None:
        with torch.no_grad():
            model(batch)

    def step() -> None:
        model(batch).sum().backward()
        model.zero_grad()

    forwards = {"forward pass of 8 images": forward}
    for counter, count in COUNTERS.items():
        target = model if count is by_lightning_tricks else other
        forwards[f"count by {counter}"] = partial(_discard, count, target, image)
    steps = {
        "training step of 8 images": step,
        "count of a step": partial(_discard, partial(count_flops, backward=True), model, image),
    }
    with contextlib.redirect_stdout(io.StringIO()):
        times = measure(forwards, rounds, warmup=1)
        step_times = measure({"forward pass of 8 images": forward, **steps}, rounds, warmup=1)
    return {
        f"{name}, relative to a forward pass": ratios(times, "forward pass of 8 images"),
        f"{name}, a step relative to a forward pass": ratios(step_times, "forward pass of 8 images"),
        f"{name}, a step relative to a step": {
            "count of a step": ratios(step_times, "training step of 8 images")["count of a step"]
        },
    }


def accuracy() -> dict[str, dict[str, float]]:
    """Return the relative difference of each counter's MACs from those that torchvision states."""
    found: dict[str, dict[str, float]] = {}
    for name in MODELS:
        image, stated = torch.randn(1, 3, 224, 224), next(iter(get_model_weights(name))).meta["_ops"]
        for counter, count in COUNTERS.items():
            with contextlib.redirect_stdout(io.StringIO()):
                found.setdefault(counter, {})[name] = count(get_model(name).eval(), image) / 1e9 / stated - 1
    return found


def memory() -> dict[str, dict[str, float]]:
    """Return the growth of the process while it counts, relative to the size of the weights."""
    found: dict[str, dict[str, float]] = {}
    for name in MODELS:
        for backward, what in ((0, "forward"), (1, "step")):
            command = [sys.executable, "-c", MEMORY, name, str(backward)]
            run = subprocess.run(command, capture_output=True, text=True, check=True)
            found.setdefault(what, {})[name] = float(run.stdout)
    return found


def main() -> None:
    """Print the tables and write the JSON files."""
    asked = arguments(default_rounds=15)
    torch.manual_seed(0)
    results: dict[str, dict[str, dict[str, float]]] = {}
    for name in MODELS:
        results |= cost(name, asked.rounds)
    report("flops", results, asked.rounds, asked.out)
    for title, values in (("MACs over torchvision's", accuracy()), ("extra memory over weights", memory())):
        table = Table("", *MODELS, title=title)
        for row, cells in values.items():
            table.add_row(row, *(f"{cells[name]:+.1%}" for name in MODELS))
        Console().print(table)
        (asked.out / f"flops_{title.split()[0].lower()}.json").write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    main()
