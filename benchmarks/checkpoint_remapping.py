"""Loading 1 GB of weights: peak memory and time against torch, Lightning and safetensors; and the time of aligning."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning
import safetensors.torch
import timm
import torch
from _ratios import arguments, measure, ratios, report
from torch import nn
from torchvision.models import resnet152

from lightning_tricks import TricksMixin, load_weights, read_checkpoint, save_weights
from lightning_tricks.checkpoint_remapping import align

SCRIPT = Path(__file__).absolute()
LAYERS, WIDTH = 60, 2048  # 960 MiB in float32


class Plain(lightning.LightningModule):
    """A stack of wide layers."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


class Tricked(TricksMixin, Plain):
    """The same with the mixin."""


def into(model: Callable[[], nn.Module], load: Callable[[nn.Module], Any]) -> Callable[[], Any]:
    """Return what makes a model and loads into it."""

    def run() -> nn.Module:
        made = model()
        load(made)
        return made

    return run


def on_meta() -> nn.Module:
    """Make the model without memory."""
    with torch.device("meta"):
        return Plain()


def torch_load(model: nn.Module) -> None:
    """Load as everybody does."""
    model.load_state_dict(torch.load("weights.pt"))


LOADS: dict[str, Callable[[], Any]] = {
    "load_weights of a .pt": into(Plain, lambda model: load_weights(model, "weights.pt")),
    "load_weights of a .safetensors": into(Plain, lambda model: load_weights(model, "weights.safetensors")),
    "load_weights into a model on the meta device": lambda: load_weights(on_meta(), "weights.pt"),
    "TricksMixin.load_from_checkpoint": lambda: Tricked.load_from_checkpoint("weights.ckpt"),
    "torch.load and load_state_dict": into(Plain, torch_load),
    "Lightning's load_from_checkpoint": lambda: Plain.load_from_checkpoint("weights.ckpt"),
    "safetensors' load_model": into(Plain, lambda model: safetensors.torch.load_model(model, "weights.safetensors")),
}


def anonymous() -> int:
    """Return the process's anonymous memory, in bytes."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", status)[1])


def peak(run: Callable[[], Any]) -> int:
    """Return how far the anonymous memory rises above what it is before."""
    before, highest, done = anonymous(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.001):
            highest = max(highest, anonymous())

    watcher = threading.Thread(target=watch)
    watcher.start()
    made = run()
    highest = max(highest, anonymous())
    done.set()
    watcher.join()
    del made
    return highest - before


def memory() -> dict[str, dict[str, float]]:
    """Measure each load in a process of its own, relative to the model's weights."""
    size = 4 * LAYERS * (WIDTH * WIDTH + WIDTH)
    result = {}
    for name in LOADS:
        runs = [
            int(subprocess.run([sys.executable, str(SCRIPT), name], check=True, capture_output=True).stdout) / size
            for _ in range(3)
        ]
        low, median, high = sorted(runs)
        result[name] = {
            "median": round(median, 3),
            "q1": round(low, 3),
            "q3": round(high, 3),
            "peer": "weights of the model",
        }
    return result


def timed(run: Callable[[Any], Any], model: nn.Module) -> Callable[[], float]:
    """Return what loads into a model that is there, and times that alone."""

    def go() -> float:
        start = time.perf_counter()
        run(model)
        return time.perf_counter() - start

    return go


def times(rounds: int) -> dict[str, dict[str, dict[str, float]]]:
    """Measure the loads of both formats against those of their own libraries, the file in the page cache."""
    model = Plain()
    own = {
        "load_weights of a .safetensors": timed(lambda made: load_weights(made, "weights.safetensors"), model),
        "safetensors' load_model": timed(lambda made: safetensors.torch.load_model(made, "weights.safetensors"), model),
    }
    pickled = {
        "load_weights of a .pt": timed(lambda made: load_weights(made, "weights.pt"), model),
        "torch.load and load_state_dict": timed(torch_load, model),
    }
    return {
        "time of a .safetensors": ratios(measure(own, rounds), peer="safetensors' load_model"),
        "time of a .pt": ratios(measure(pickled, rounds), peer="torch.load and load_state_dict"),
    }


def alignment() -> float:
    """Return the CPU seconds of aligning two models of 932 tensors whose names differ."""
    source = {name.replace("layer", "stage"): t for name, t in timm.create_model("resnet152").state_dict().items()}
    target = resnet152()
    start = time.process_time()
    found = align(target, source)
    seconds = time.process_time() - start
    assert found.loaded == found.total > 900
    return seconds


def main() -> None:
    """Measure, print and write."""
    if sys.argv[1:2] and sys.argv[1] in LOADS:
        sys.stdout.write(str(peak(LOADS[sys.argv[1]])))
        return
    given = arguments(default_rounds=15)
    out = given.out.absolute()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        model = Plain()
        save_weights(model, "weights.safetensors")
        torch.save(model.state_dict(), "weights.pt")
        checkpoint = {"state_dict": model.state_dict(), "pytorch-lightning_version": lightning.__version__}
        torch.save(checkpoint, "weights.ckpt")
        del model, checkpoint
        read_checkpoint("weights.pt")
        results = {"peak memory / the weights'": memory(), **times(given.rounds)}
        os.chdir(out.parent)
    report("checkpoint_remapping", results, given.rounds, out)
    sys.stdout.write(f"aligning 932 tensors under other names: {alignment():.2f} s of CPU time\n")


if __name__ == "__main__":
    main()
