"""What MetricsMonitor promises."""

import torch
from lightning.pytorch import Callback

from lightning_tricks import MetricsMonitor
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting
from tests.small import BATCHES

METRICS = {"task": "multiclass", "num_classes": 10}


def verify(lab: Lab, setting: Setting, callback: type = MetricsMonitor) -> None:
    """However the net is trained, the accuracy is that of the rows that the steps saw, and the loss their mean."""
    seen = lab.folder / f"seen in {setting.name}"
    seen.mkdir()
    ranks = lab.fit([callback(METRICS), _Seen(seen)], setting)
    files = [torch.load(file) for file in sorted(seen.glob("*.pt"))]
    assert len(files) == setting.ranks
    right, rows, loss = (sum(file[name] for file in files) for name in ("right", "rows", "loss"))
    assert rows == 4 * BATCHES  # two epochs, of which the second one counts
    for rank in ranks:
        assert abs(rank.metrics["train/acc"] - right / rows) < 1e-6
        assert abs(rank.metrics["train/loss"] - loss / rows) < 10 * setting.tolerance
        assert rank.metrics["train/f1"] > 0


class _Seen(Callback):
    """The reference implementation: adds up what the steps of the last epoch returned, one number after the other."""

    def __init__(self, folder):
        self.folder = folder

    def on_train_epoch_start(self, trainer, pl_module):
        self.sums = {"right": 0, "rows": 0, "loss": 0.0}

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        rows = len(outputs["target"])
        self.sums["rows"] += rows
        self.sums["right"] += (outputs["preds"].argmax(1) == outputs["target"]).sum().item()
        divided = trainer.accumulate_grad_batches if pl_module.automatic_optimization else 1
        self.sums["loss"] += outputs["loss"].item() * divided * rows

    def on_train_end(self, trainer, pl_module):
        torch.save(self.sums, self.folder / f"{trainer.global_rank}.pt")


CASES = (
    Case(
        callback=MetricsMonitor,
        arguments={
            "metrics": METRICS,
            "log_plots": False,
            "best": {"lab/train/f1": "max"},
            "stages": ["train"],
            "prefix": "lab",
        },
        kind="observer",
        neutral={"metrics": METRICS, "stages": []},
        instances="n",
        second={"prefix": None, "best": {"train/f1": "max"}},
        waits={"on_train_batch_end": 62, "on_fit_end": 1},
        verify=verify,
    ),
)
