"""All callbacks together, in every pair of precision, ranks, accumulation and optimization."""

import pytest
import torch

from lightning_tricks.run_report.core.run_writer import RunWriter
from tests.contract.cases import CASES
from tests.small import HostReads
from tests.together.everything import TogetherNet, make_all
from tests.together.fits import Fits, Way
from tests.together.matrix import COVER, check_together


def _name(row):
    return "-".join(map(str, row.values()))


@pytest.mark.newest
@pytest.mark.parametrize("row", COVER, ids=_name)
@pytest.mark.sampled(4)
def test_all_together(row, tmp_path):
    check_together(row, tmp_path)  # asserts


@pytest.mark.parametrize("manual", [False, True])
def test_all_together_read_no_more_than_what_they_train_makes_the_trainer_read(tmp_path, manual, monkeypatch):
    monkeypatch.setattr(RunWriter, "is_page_due", lambda self: False)  # it is by the time that has passed
    names = [name for name in CASES if not (manual and "manual" in CASES[name].refuses)]
    added = [name for name in names if CASES[name].kind == "structural"]  # more tensors make an optimizer read more
    per_step = {}
    for chosen in (added, names):
        counts = []
        for batches in (5, 10):
            folder = tmp_path / f"{len(chosen)} {batches}"
            folder.mkdir()
            torch.manual_seed(0)
            module = TogetherNet(manual=manual)
            callbacks = [
                callback
                for name, callback in make_all(chosen, folder, idle=True).items()
                if name not in ("CheckpointRemapping", "GradualUnfreezing")  # reads what it loads; freezes
            ]
            with HostReads() as reads:
                Fits(folder).fit(Way(manual=manual), module, callbacks, limit_train_batches=batches, probe=False)
            counts.append(reads.count)
        per_step[len(chosen)] = counts[1] - counts[0]
    assert per_step[len(names)] <= per_step[len(added)]
    assert per_step[len(added)] > 0
