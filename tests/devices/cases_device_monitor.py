"""What DeviceMonitor promises."""

import csv
import json

from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger

from lightning_tricks.devices import DeviceMonitor
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting


def verify(lab: Lab, setting: Setting, callback: type = DeviceMonitor) -> None:
    """In each setting it logs at each optimizer step, and all ranks know at the end how each of them waited."""
    logger = CSVLogger(lab.folder / f"devices of {setting.name}")
    monitor = callback(1, keys=["host/data_wait", "host/process_ram_gib"])
    lab.fit([monitor, _WritesDown(monitor, lab.folder / setting.name)], setting, logger=logger, log_every_n_steps=1)
    written = [json.loads(file.read_text()) for file in sorted(lab.folder.glob(f"{setting.name}-*.json"))]
    assert len(written) == setting.ranks
    for rank in written:
        assert [summary["rank"] for summary in rank["summary"]] == list(range(setting.ranks))
        for summary in rank["summary"]:
            assert list(summary["means"]) == ["host/data_wait", "host/process_ram_gib"]
            assert 0 < summary["means"]["host/data_wait"] < 100
            assert summary["means"]["host/process_ram_gib"] > 0.05
            assert summary["verdict"][0].startswith(("Waited for data", "The host waited"))
    (metrics,) = (lab.folder / f"devices of {setting.name}").rglob("metrics.csv")
    with metrics.open() as file:
        rows = [row for row in csv.DictReader(file) if row["host/data_wait"]]
    assert len(rows) == len(written[0]["steps"]) in (6, 10, 20)


class _WritesDown(Callback):
    """The reference implementation: the steps after which optimizers had stepped, and what the monitor found."""

    def __init__(self, monitor, path):
        self.monitor, self.path, self.steps = monitor, path, []

    def on_train_batch_end(self, trainer, *args):
        if trainer.global_step and trainer.global_step not in self.steps:
            self.steps.append(trainer.global_step)

    def on_fit_end(self, trainer, pl_module):
        facts = {"steps": self.steps, "summary": [vars(summary) for summary in self.monitor.summary]}
        self.path.with_name(f"{self.path.name}-{trainer.global_rank}.json").write_text(json.dumps(facts))


CASE = Case(
    callback=DeviceMonitor,
    arguments={
        "every_n_train_steps": 3,
        "log_keys": ["host/cpu_utilization", "gpu/fan"],
        "warn_temperature": 70.0,
        "interval": 0.01,
    },
    kind="observer",
    neutral=None,
    why_no_neutral="it changes nothing in any setting",
    of_one_fit=("summary",),
    instances=1,
    verify=verify,
)
