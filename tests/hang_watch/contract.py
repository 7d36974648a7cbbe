"""What HangWatch promises."""

import json

from lightning.pytorch import Callback

from lightning_tricks import HangWatch
from lightning_tricks.hang_watch.functional import read_record
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting
from tests.small import BATCHES


class Reads(Callback):
    """Reads at the end of training what the rank has written, as another process would."""

    def __init__(self, watched, folder):
        self.watched, self.folder = watched, folder

    def on_train_end(self, trainer, pl_module):
        found = read_record(self.watched / f"rank{trainer.global_rank}.hang")
        (self.folder / f"{trainer.global_rank}.json").write_text(json.dumps(found))


def verify(lab: Lab, setting: Setting, callback: type = HangWatch) -> None:
    """On each rank the record has the place of the run, and nothing is left behind where nothing stood still."""
    folder = lab.folder / f"read {setting.name}"
    watched = folder / "watched"
    folder.mkdir()
    lab.fit([callback("1 hour", watched), Reads(watched, folder)], setting)
    assert not list(watched.glob("*"))
    files = sorted(folder.glob("*.json"))
    assert len(files) == setting.ranks
    for rank, file in enumerate(files):
        found = json.loads(file.read_text())
        batches = BATCHES // setting.ranks
        assert (found["rank"], found["world_size"], found["timeout"]) == (rank, setting.ranks, 3600)
        assert (found["epoch"], found["batch"], found["batches"]) == (1, batches - 1, 2 * batches)
        assert found["backwards"] == 2 * batches or setting.closures_vary
        assert found["hook"] == "on_train_end"


CASES = (
    Case(
        callback=HangWatch,
        arguments={"timeout": "7 minutes", "dirpath": "watched"},
        kind="observer",
        neutral={},
        of_one_fit=("dirpath",),
        instances=1,
        writes_to="dirpath",
        verify=verify,
    ),
)
