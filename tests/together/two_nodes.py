"""Two machines on this one: torchrun's agent twice, each in a directory of its own, with one or more ranks each."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NoReturn

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser
from torch.utils.data import DataLoader, Subset

from lightning_tricks import (
    AutoResume,
    FlopsReport,
    GradientClipping,
    MetricsMonitor,
    ModelReport,
    RunFingerprint,
    SeedEverything,
)
from tests.contract.processes import append_output_to, free_port, run_and_exit
from tests.small import QUIET, digits
from tests.together.everything import NORM_TYPE, TogetherNet
from tests.together.fits import VALIDATED, First, Last


class _DiesOnLastRank(Callback):
    """Ends the last rank, which is on the second node, as a lost machine does."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.fit_loop.total_batch_idx + 1 == 8 and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)


def train(shared: str, left: str, dies: bool, ranks_per_node: int) -> None:
    """What each rank runs; relative paths lie in the node's own directory."""
    torch.set_num_threads(1)
    folder = Path(shared)
    watched = {
        "SeedEverything": SeedEverything(7, per_rank=True),
        "GradientClipping": GradientClipping(0.5, NORM_TYPE),
        "MetricsMonitor": MetricsMonitor({"task": "multiclass", "num_classes": 10}),
        "FlopsReport": FlopsReport(backward=True, path="flops.json"),
        "ModelReport": ModelReport("report"),
        "AutoResume": AutoResume(folder / "run", every_n_train_steps=3),
        "RunFingerprint": RunFingerprint("record.jsonl"),
    }
    first = First()
    last = Last(first, Path(left), watched)
    stop = [_DiesOnLastRank()] if dies else []
    trainer = Trainer(
        callbacks=[first, *watched.values(), *stop, last],
        **{**QUIET, "logger": CSVLogger("logs", version=0)},
        num_nodes=2,
        devices=ranks_per_node,
        strategy="ddp",
        max_epochs=2,
        log_every_n_steps=1,
    )
    torch.manual_seed(0)
    trainer.fit(
        TogetherNet(dropout=0.2),
        DataLoader(digits(), 4, shuffle=True),
        DataLoader(Subset(digits(), range(VALIDATED)), 4),
    )


def run_two_nodes(folder: Path, left: Path, *, dies: bool = False, ranks_per_node: int = 1, attempt: str) -> list[int]:
    """Run both nodes, each with torchrun's agent, and return their exit statuses."""
    left.mkdir(parents=True, exist_ok=True)
    port, pids = free_port(), []
    for node in range(2):
        place = folder / f"node {node}"
        place.mkdir(parents=True, exist_ok=True)
        pid = os.fork()
        if pid == 0:
            _be_a_node(place, node, port, ranks_per_node, attempt, (str(folder), str(left), dies, ranks_per_node))
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def _be_a_node(place: Path, node: int, port: int, ranks: int, attempt: str, arguments: tuple[object, ...]) -> NoReturn:
    def work() -> None:
        os.chdir(place)
        append_output_to(place / f"output of {attempt}.txt")
        line = ["--nnodes=2", f"--node-rank={node}", f"--nproc-per-node={ranks}", "--master-addr=127.0.0.1"]
        config, _, _ = config_from_args(get_args_parser().parse_args([*line, f"--master-port={port}", "script.py"]))
        config.start_method = "fork"  # what has been imported is there
        elastic_launch(config, train)(*arguments)

    run_and_exit(work)
