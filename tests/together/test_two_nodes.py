"""Two nodes, each with a local rank zero: training, metrics, files, and a resume after one node is lost."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from lightning.pytorch import Trainer
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
from tests.small import QUIET, digits, same
from tests.together.everything import NORM_TYPE, TogetherNet
from tests.together.fits import VALIDATED, First, Last, stops_at
from tests.together.matrix import differences


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
    stop = [stops_at(8, signal.SIGKILL)] if dies else []  # as a lost machine does
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


pytestmark = pytest.mark.newest


def _left(folder):
    return [torch.load(file, weights_only=False) for file in sorted(folder.glob("rank*.pt"))]


def _output(folder):
    return "\n".join(file.read_text()[-2000:] for file in sorted(folder.rglob("output*.txt")))


def _files(folder):
    return {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file() and "output" not in file.name}


def _accuracy(ranks, stage, rows):
    """That of one process, from what all ranks saw: a sample of validation that is repeated counts once."""
    hits = torch.stack([torch.cat([preds.argmax(1) == target for preds, target in rank.seen[stage]]) for rank in ranks])
    return hits.T.flatten()[:rows].float().mean().item()


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    assert run_two_nodes(folder / "nodes", folder / "left", attempt="whole") == [0, 0], _output(folder)
    return folder, _left(folder / "left")


def test_two_nodes_agree_and_report_what_one_process_would(undisturbed):
    _, ranks = undisturbed
    assert len(ranks) == 2
    assert same(ranks[0].weights, ranks[1].weights)
    for rank in ranks:
        assert abs(rank.metrics["train/acc"] - _accuracy(ranks, "train", 40)) < 1e-6
        assert abs(rank.metrics["val/acc"] - _accuracy(ranks, "val", VALIDATED)) < 1e-6
        assert rank.logged_norms[0] == pytest.approx(rank.norms[0], rel=1e-4)
        assert rank.new_threads == 0


def test_each_file_is_written_by_one_rank(undisturbed):
    folder, _ = undisturbed
    first, second = (_files(folder / "nodes" / f"node {node}") for node in range(2))
    assert {"flops.json", "report/report.json", "logs/lightning_logs/version_0/metrics.csv"} <= first
    assert {"record.jsonl"} == {name for name in first if name.startswith("record")}
    assert second == {"record.rank1.jsonl"}
    assert list((folder / "nodes" / "run").glob(".auto_resume/0*"))


def test_after_one_node_is_lost_both_resume_to_the_same_bits(undisturbed, tmp_path):
    _, whole = undisturbed
    statuses = run_two_nodes(tmp_path / "nodes", tmp_path / "left", dies=True, attempt="lost")
    assert all(statuses), _output(tmp_path)
    assert run_two_nodes(tmp_path / "nodes", tmp_path / "left", attempt="resumed") == [0, 0], _output(tmp_path)
    for resumed, rank in zip(_left(tmp_path / "left"), whole, strict=True):
        assert 0 < len(resumed.norms[0]) < len(rank.norms[0])
        for what in ("weights", "optimizers", "metrics", "rng", "attributes"):
            left, right = getattr(resumed, what), getattr(rank, what)
            assert same(left, right), f"{what} differ: {differences(left, right)}"
    rows = [(folder / "nodes" / "node 0").rglob("metrics.csv") for folder in (tmp_path, undisturbed[0])]
    assert next(rows[0]).read_text() == next(rows[1]).read_text()
