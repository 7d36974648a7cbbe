"""What RunReport promises."""

import torch

from lightning_tricks import RunReport
from lightning_tricks.run_report import read_record
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting
from tests.small import Net


class _Logs(Net):
    """Logs its loss at each batch and its mean."""

    def training_step(self, batch, batch_idx):
        outputs = super().training_step(batch, batch_idx)
        self.log("train/loss", outputs["loss"].detach(), on_step=True, on_epoch=True, sync_dist=True)
        return outputs


def verify(lab: Lab, setting: Setting, callback: type = RunReport) -> None:
    """The record has the loss of each step and epoch, and the page shows it."""
    path = lab.folder / f"{setting.name} report"
    torch.manual_seed(0)
    module = _Logs(**{**lab.net, **setting.net})
    (facts, *_) = lab.fit([callback(path)], setting, module=module, log_every_n_steps=1)
    record = read_record(path)
    (last_mean,) = (point.value for point in record.curve("train/loss_epoch") if point.epoch == 1)
    assert last_mean == facts.metrics["train/loss_epoch"]
    assert record.curve("train/loss_step")[-1].value == facts.metrics["train/loss_step"]
    steps = 6 if setting.trainer.get("accumulate_grad_batches") else 20 // setting.ranks
    assert len(record.curve("train/loss_step")) == steps
    rate = {"manual": "learning_rate/0", "combined": "learning_rate/0.0"}.get(setting.name, "learning_rate")
    assert len(record.curve(rate)) == steps
    assert (record.status, record.epochs) == ("finished", 2)
    assert "train" in (path / "report.html").read_text(encoding="utf-8")


CASES = (
    Case(
        callback=RunReport,
        arguments={"dirpath": "reported"},
        kind="observer",
        neutral=None,
        why_no_neutral="it changes nothing in any setting",
        of_one_fit=("dirpath", "_position", "_position_to_keep", "_last_fit"),
        state_of_one_fit=("id",),
        instances=1,
        writes_to="dirpath",
        looks_between_epochs=True,
        waits={"on_validation_end": 1, "teardown": 1},
        verify=verify,
    ),
)
