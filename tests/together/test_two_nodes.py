"""Two nodes, each with a local rank zero: training, metrics, files, and a resume after one node is lost."""

import pytest
import torch

from tests.small import same
from tests.together.fits import VALIDATED
from tests.together.matrix import differences
from tests.together.two_nodes import run_two_nodes

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
