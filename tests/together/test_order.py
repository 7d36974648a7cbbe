"""The order of the callbacks in the list does not matter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    DeviceStatsMonitor,
    EarlyStopping,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    ModelCheckpoint,
    RichProgressBar,
    StochasticWeightAveraging,
)

from lightning_tricks import LoRA, SeedEverything
from tests.contract.cases import CASES
from tests.small import QUIET, Net, loader, same
from tests.together.everything import STOPPED, TogetherNet, make_all, write_pretrained
from tests.together.fits import Fits, Way, logged_rows, stops_at
from tests.together.matrix import differences


def lightnings_own(folder: Path, *, averaging: bool) -> dict[str, Callback]:
    """Callbacks of Lightning, of which some read what those of the collection log."""
    own: list[Callback] = [
        ModelCheckpoint(folder / "best", monitor="lab/val/acc", mode="max", save_top_k=2, save_last=True),
        EarlyStopping("lab/train/loss", patience=9, check_on_train_epoch_end=True),
        EarlyStopping("lab/val/acc", mode="max", patience=9),
        LearningRateMonitor("step"),
        GradientAccumulationScheduler({0: 1, 1: 2}),
        DeviceStatsMonitor(cpu_stats=False),
        RichProgressBar(),
    ]
    if averaging:
        own.append(StochasticWeightAveraging(0.01, swa_epoch_start=1))
    return {f"{number} {type(callback).__name__}": callback for number, callback in enumerate(own)}


def _in_order(callbacks: dict[str, Callback], seed: int | None) -> list[Callback]:
    """As given (None), reversed (-1) or shuffled; those that change the model itself keep the order among them.

    That one is the order of the new parameters, and so of the sums over them: another one gives other last bits.
    """
    names = list(callbacks)
    if seed is not None:
        names = names[::-1] if seed < 0 else random.Random(seed).sample(names, len(names))
    structural = iter([name for name in callbacks if _is_structural(name)])
    return [callbacks[next(structural) if _is_structural(name) else name] for name in names]


def _is_structural(name: str) -> bool:
    return name in CASES and CASES[name].kind == "structural"


def fit_in_order(names: Sequence[str], seed: int | None, folder: Path, *, averaging: bool = False) -> dict[str, Any]:
    """Fit in an order (None: as given; -1: reversed) with a stop in the middle, and return what is left, by name."""
    folder.mkdir(parents=True)
    write_pretrained(folder)
    fits = Fits(folder)
    names = [name for name in names if not (averaging and name == "ExponentialMovingAverage")]  # which refuses another
    for process in range(2):
        callbacks = {**make_all(names, folder), **lightnings_own(folder, averaging=averaging)}
        everybody = _in_order(callbacks, seed)
        torch.manual_seed(0)
        module = TogetherNet(dropout=0.2)
        given: dict[str, Any] = {"enable_checkpointing": True, "enable_progress_bar": True, "max_epochs": 3}
        watched = {name: callbacks[name] for name in names}
        if process == 0:
            with pytest.raises(SystemExit) as left:
                fits.fit(Way(), module, [*everybody, stops_at(14)], watched=watched, log_to=folder / "logs", **given)
            assert left.value.code == STOPPED
        else:
            (rank,) = fits.fit(Way(), module, everybody, watched=watched, log_to=folder / "logs", **given)
    return {
        **{what: getattr(rank, what) for what in ("weights", "optimizers", "metrics", "rng", "traces")},
        "attributes": rank.attributes,
        "rows": [dict(sorted(row.items())) for row in logged_rows(folder / "logs")],
        "checkpoint": _contents(folder / "best" / "last.ckpt", str(folder)),
    }


def _contents(path: Path, folder: str) -> Any:
    """A checkpoint without what names its folder, its fit, its clocks and its random state."""
    checkpoint = torch.load(path, weights_only=False)
    states = {key: value for key, value in checkpoint["callbacks"].items() if not key.startswith("ModelCheckpoint")}
    for name, of_one_fit in (("RunReport", "id"), ("RunFingerprint", "digest")):
        states.get(name, {}).pop(of_one_fit, None)
    return {**{key: checkpoint[key] for key in ("epoch", "global_step", "state_dict", "optimizer_states")}, **states}


def assert_same_left(one: dict[str, Any], other: dict[str, Any], order: object) -> None:
    for what in one:
        assert same(one[what], other[what]), f"{order}: {what} differ: {differences(one[what], other[what])[:1500]}"


@pytest.mark.newest
@pytest.mark.filterwarnings("ignore:The `srun` command", "ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*checkpoint directory.*exists", "ignore:Checkpoint directory")
def test_all_orders_give_the_same_bits_with_a_resume_in_the_middle(tmp_path):
    given = fit_in_order(CASES, None, tmp_path / "given")
    assert given["rows"]
    for seed in (-1, 1):
        assert_same_left(given, fit_in_order(CASES, seed, tmp_path / str(seed)), f"order {seed}")


def test_the_seed_reaches_what_is_added_to_the_model_wherever_it_stands():
    left = []
    for state, callbacks in ((1, [LoRA(2), SeedEverything(7)]), (2, [SeedEverything(7), LoRA(2)])):
        torch.manual_seed(0)
        module = Net()
        torch.manual_seed(state)
        Trainer(callbacks=callbacks, max_epochs=1, limit_train_batches=0, **QUIET).fit(module, loader())
        left.append((dict(module.state_dict()), torch.get_rng_state()))
    assert same(left[0], left[1])
    assert left[0][0]["net.0.lora_weight.A"].abs().sum() > 0
