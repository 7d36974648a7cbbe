"""What SpikeGuard promises."""

from __future__ import annotations

import math
import warnings
from functools import partial
from unittest.mock import patch

from lightning_tricks import SpikeGuard
from tests.contract import lab as laboratory
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting
from tests.small import BATCHES, same
from tests.spike_guard.oracle import Rows, loader


def verify(lab: Lab, setting: Setting) -> None:
    """It ends as without the batches that it leaves out, of which one is spoilt: of two ranks, on the last alone."""
    accumulated = setting.trainer.get("accumulate_grad_batches", 1)
    only_rewinds = setting.net.get("optimization") in ("manual", "lbfgs")
    for mode in ("rewind",) if only_rewinds else ("skip", "rewind"):
        steps = 2 if mode == "rewind" and accumulated == 1 else 1
        left_out = range(4, 4 + steps * accumulated)
        rows = Rows(BATCHES, {left_out[-1]}, math.nan, one_rank=setting.ranks - 1)
        guard = SpikeGuard(mode, threshold=1e3, window=8, warmup_steps=1, every_n_train_steps=steps)
        results = []
        for left, callbacks in (((), [guard]), (left_out, [])):
            with patch.object(laboratory, "loader", partial(loader, rows, left)), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                fit = partial(lab.fit, use_distributed_sampler=False)
                results.append(fit(callbacks, setting, net={"dropout": 0.2}))
        for rank, oracle in zip(*results, strict=True):
            for what in ("weights", "optimizers", "rng"):
                assert same(getattr(rank, what), getattr(oracle, what)), f"{mode}: {what} differ"
            assert rank.metrics["spike_guard/left_out_batches"] == 2 * len(left_out)


CASES = (
    Case(
        callback=SpikeGuard,
        arguments={
            "mode": "rewind",
            "threshold": 1e3,
            "window": 8,
            "warmup_steps": 4,
            "every_n_train_steps": 4,
            "max_consecutive": 2,
        },
        kind="changer",
        neutral={"mode": "rewind", "threshold": math.inf},
        instances=1,
        when_idle={"every_n_train_steps": 1000},
        looks_between_epochs=True,
        waits={"run_around": 2},
        verify=verify,
    ),
)
