"""All callbacks together in one way of training: six promises, checked on one combination after the other."""

from __future__ import annotations

import argparse
import io
import math
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from tests.contract.cases import CASES
from tests.small import ranks_agree_at_once, same
from tests.together.everything import STOPPED, TogetherNet, changers, make_all, write_pretrained
from tests.together.fits import VALIDATED, Fits, Left, Way, logged_rows, stops_at

FACTORS: dict[str, Sequence[Any]] = {
    "precision": ("fp32", "bf16-mixed", "real fp16"),
    "ranks": ("1 process", "DDP", "FSDP2"),
    "accumulation": (1, 3),
    "manual": (False, True),
}
_ROWS = [dict(zip(FACTORS, levels, strict=True)) for levels in product(*FACTORS.values())]
# Few of them, in which any two levels of any two factors occur together; `make test` takes the first, fifth and last
COVER = [
    {"precision": precision, "ranks": ranks, "accumulation": accumulation, "manual": bool(manual)}
    for (precision, ranks), accumulation, manual in zip(
        product(FACTORS["precision"], FACTORS["ranks"]),
        (1, 3, 1, 3, 3, 1, 1, 1, 3),
        (0, 1, 0, 0, 1, 1, 1, 0, 0),
        strict=True,
    )
]
_COUNTED = ("flops/", "params")
_WHAT = ("weights", "optimizers", "rng")


def check_together(row: dict[str, Any], folder: Path) -> None:
    """Fit with those that change the run, with all, and with all and a resume in the middle; compare the three."""
    way = Way(**row)
    refused = ("FSDP2",) * way.is_sharded + ("manual",) * way.manual
    names = [name for name, case in CASES.items() if not any(setting in case.refuses for setting in refused)]
    if way.is_sharded:  # what Lightning saves has not the weights that RestoreBest keeps on each rank
        names = [name for name in names if name != "RestoreBest"]
    folder.mkdir(parents=True, exist_ok=True)
    write_pretrained(folder)
    together = _Together(Fits(folder), way, names)
    changed = together.fit(changers(names), "changed")
    whole = together.fit_whole()
    resumed = together.resume_sharded() if way.is_sharded else together.resume_stopped()
    assert len(changed) == len(whole) == len(resumed) == way.num_ranks
    _assert_nothing_changed(changed, whole)
    _assert_resumed(resumed, whole, by_auto_resume=not way.is_sharded)
    rows = logged_rows(folder / "whole")
    assert len(rows) >= 2
    if not way.is_sharded:  # without AutoResume, loggers begin anew
        assert logged_rows(folder / "stopped") == rows, "logged values differ after a resume"
    for rank in whole:
        _assert_norms(rank, way)
    _assert_metrics(whole)


class _Together:
    def __init__(self, fits: Fits, way: Way, names: Sequence[str]) -> None:
        self.fits, self.way, self.names = fits, way, names

    def fit(self, names: Sequence[str], place: str, *further: Any, start: int = 0, **trainer: Any) -> list[Left]:
        folder = self.fits.folder / place
        folder.mkdir(exist_ok=True)
        callbacks = make_all(names, folder)
        if "CheckpointRemapping" in callbacks:
            callbacks["CheckpointRemapping"].path = str(self.fits.folder / "pretrained.pt")
        torch.manual_seed(start)
        dropout = 0.0 if self.way.is_sharded else 0.2  # without AutoResume, random numbers begin anew
        module = TogetherNet(manual=self.way.manual, dropout=dropout, accumulation=self.way.accumulation)
        everybody = [*callbacks.values(), *further]
        return self.fits.fit(
            self.way, module, everybody, watched=callbacks, log_to=folder / "logs", start=start, **trainer
        )

    def fit_whole(self) -> list[Left]:
        if not self.way.is_sharded:
            return self.fit(self.names, "whole")
        saver = ModelCheckpoint(self.fits.folder / "saved", "{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
        return self.fit(self.names, "whole", saver, enable_checkpointing=True)

    def resume_stopped(self) -> list[Left]:
        """Let a signal stop the last rank in the second epoch, and run the same again."""
        batch = 13 if self.way.num_ranks == 1 else 8  # of 20, or of 10 on each rank
        with pytest.raises(SystemExit) as left, ranks_agree_at_once():
            self.fit(self.names, "stopped", stops_at(batch))
        assert left.value.code == STOPPED
        return self.fit(self.names, "stopped", start=0 if self.way.num_ranks > 1 else 9)

    def resume_sharded(self) -> list[Left]:
        """Resume from what ModelCheckpoint saved at the first epoch's end, as AutoResume does not save shards."""
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", "Be aware that when using `ckpt_path`"
            )  # ModelCheckpoint has done its part
            return self.fit(self.names, "stopped", ckpt_path=self.fits.folder / "saved" / "epoch=0.ckpt")


def _assert_nothing_changed(changed: Sequence[Left], whole: Sequence[Left]) -> None:
    for with_all, without in zip(whole, changed, strict=True):
        for what in (*_WHAT, "norms", "traces"):
            assert same(getattr(with_all, what), getattr(without, what)), f"{what} differ with the observers"
        assert with_all.new_threads == 0, "a thread is left"


def _assert_resumed(resumed: Sequence[Left], whole: Sequence[Left], *, by_auto_resume: bool) -> None:
    for again, long in zip(resumed, whole, strict=True):
        for what in ("weights", "optimizers", "metrics", *(["rng"] if by_auto_resume else [])):
            left, right = getattr(again, what), getattr(long, what)
            if what == "metrics" and not by_auto_resume:  # FlopsReport counts what trains where a fit begins
                left, right = ({k: v for k, v in values.items() if k[:6] not in _COUNTED} for values in (left, right))
            assert same(left, right), f"{what} differ after a resume: {differences(left, right)}"
        left, right = again.attributes, long.attributes
        assert same(left, right), f"attributes differ after a resume: {differences(left, right)}"
        for index, norms in again.norms.items():
            assert 0 < len(norms) < len(long.norms[index]), "it did not resume in the middle"
            assert norms == long.norms[index][-len(norms) :]


def differences(left: Any, right: Any, name: str = "") -> str:
    """The places in nested dicts at which they differ."""
    if isinstance(left, dict) and isinstance(right, dict):
        parts = [differences(left.get(key), right.get(key), f"{name}.{key}") for key in {**left, **right}]
        return "; ".join(filter(None, parts))
    return "" if same(left, right) else f"{name}: {left!r:.300} is not {right!r:.300}"


def _assert_norms(rank: Left, way: Way) -> None:
    tolerance = 1e-4 if way.precision == "fp32" else 1e-2
    assert len(rank.norms) == 1 + way.manual
    for index, norms in rank.norms.items():
        logged = rank.logged_norms[index]
        assert len(logged) == len(norms) > 0
        finite = [pair for pair in zip(logged, norms, strict=True) if math.isfinite(pair[1])]
        assert finite
        for value, norm in finite:
            assert math.isclose(value, norm, rel_tol=tolerance), f"{logged} is not {norms}"


def _assert_metrics(ranks: Sequence[Left]) -> None:
    """The metrics are those of all rows that the ranks saw; of a repeated one in validation, once."""
    for stage, rows in (("train", 40), ("val", VALIDATED)):
        batches = [rank.seen[stage] for rank in ranks]
        right = [(preds.argmax(1) == target) for rank in batches for preds, target in rank]
        hits = torch.cat(right)
        if len(ranks) > 1 and stage == "val":
            hits = torch.stack([torch.cat([p.argmax(1) == t for p, t in rank]) for rank in batches], 1).flatten()
        expected = hits[:rows].float().mean().item()
        for rank in ranks:
            assert abs(rank.metrics[f"lab/{stage}/acc"] - expected) < 1e-6


def main() -> None:
    """Check all combinations, and write down which hold."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--result", type=Path, required=True)
    result = parser.parse_args().result
    torch.set_num_threads(1)
    torch.zeros((), requires_grad=True).backward()  # or forked ranks cannot run the first one
    lines, failed = [], 0
    for row in _ROWS:
        outcome = "holds"
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(io.StringIO()), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                check_together(row, Path(folder))
            except Exception as error:
                outcome = f"{type(error).__name__}: {' '.join(str(error).split())[-300:]}".replace("|", "/")
                failed += 1
        lines.append(f"| {' | '.join(map(str, row.values()))} | {outcome} |")
        head = [
            "All callbacks together, by `make matrix`: observers change nothing, a resume is exact, "
            "logged norms and metrics are those of the oracle.",
            "",
            f"{len(lines)} combinations, of which {failed} do not hold.",
            "",
            "| precision | ranks | accumulation | manual | outcome |",
            "|---|---|---|---|---|",
        ]
        result.write_text("\n".join([*head, *lines, ""]))


if __name__ == "__main__":
    main()
