"""What stands out: each finding appears where it is true, and nowhere else."""

import math
import random
import re
from functools import partial

import pytest

from lightning_tricks._shared.report_parts import ConfusionMatrix, DeviceUse, Reliability
from lightning_tricks.run_report import find_all
from lightning_tricks.run_report.core.findings import CHECKS
from lightning_tricks.run_report.core.record import GitState, Resume, RunSetup
from tests.run_report.runs import DESERVING, HEALTHY, clipping, record_of


def said(record):
    return [(finding.level, finding.text) for finding in find_all(record)]


clipped = partial(clipping, steps=100)


def matrix(counts):
    return ConfusionMatrix(stage="val", epoch=3, classes=["cat", "dog", "cow"], counts=counts)


def reliability(share):
    return Reliability(stage="val", epoch=3, label="accuracy", confidence=[0.7, 0.9], share=share, weight=[0.5, 0.5])


NORMS = {"grad_norm/pre_clip": [2.0] * 60 + [0.5] * 40}
FALLS = [1.0 / (1 + place) for place in range(100)]
GOOD = [1.0, 0.6, 0.5, 0.45, 0.44, 0.43, 0.425, 0.424, 0.4238, 0.4237]
GIT = {"commit": "c0ffee" * 6 + "abcd"}

# words of the finding, a record that has it, one that has not
CASES = {
    "clipped": (
        "60 % of 100 steps were clipped: max_norm=1 is below the median norm of 2. Most updates were rescaled",
        record_of(NORMS, "step", parts=[clipped(60)]),
        record_of(NORMS, "step", parts=[clipped(10)]),
    ),
    "clipped, without a norm that was logged": (
        "51 % of 100 steps were clipped. Most updates were rescaled; a larger max_norm clips only unusual steps.",
        record_of({}, "step", parts=[clipped(51)]),
        record_of({}, "step", parts=[clipped(50)]),
    ),
    "clipped in some of several steps of a batch": (
        "60 % of 100 optimizer steps were clipped. Most",
        record_of({}, "step", parts=[clipped(60)], step=50),
        record_of({}, "step", parts=[clipped(19, steps=19)]),
    ),
    "limit without effect": (
        "No step was clipped: max_norm=100 is far above the largest logged norm, 2.",
        record_of(NORMS, "step", parts=[clipped(0, max_norm=100.0)]),
        record_of(NORMS, "step", parts=[clipped(0, max_norm=3.0)]),
    ),
    "skipped": (
        "3 of 100 steps (3 %) were skipped: gradients were NaN or Inf.",
        record_of({}, "step", parts=[clipped(0, skipped=3)]),
        record_of({}, "step", parts=[clipped(0)]),
    ),
    "skipped the only one": (
        "1 of 1 steps (100 %) were skipped: gradients were NaN or Inf.",
        record_of({}, "step", parts=[clipped(0, steps=1, skipped=1)]),
        record_of({}, "step", parts=[clipped(0, skipped=10)], setup=RunSetup(trainer={"precision": "16-mixed"})),
    ),
    "not finite": (
        "train/loss was NaN at step 50 (epoch 50), and in 2 of 52 recorded values.",
        record_of({"train/loss": FALLS[:50] + [math.nan] * 2}, "step"),
        record_of({"train/loss": FALLS[:52], "other": [math.nan]}, "step"),
    ),
    "diverged": (
        "train/loss rose from",
        record_of({"train/loss": FALLS + [0.02 * place for place in range(60)]}, "step"),
        record_of({"train/loss": FALLS + [0.011 + 0.002 * (place % 2) for place in range(60)]}, "step"),
    ),
    "overfits": (
        "val/loss was lowest in epoch 3 (0.3) and ended at 0.9 in epoch 9: the model overfits; use the checkpoint of "
        "epoch 3, or stop earlier.",
        record_of({"val/loss": [1.0, 0.5, 0.4, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9], "train/loss": FALLS[:10]}),
        record_of({"val/loss": [1.0, 0.5, 0.4, 0.3, 0.31, 0.3, 0.31, 0.3, 0.31, 0.301]}),
    ),
    "overfits by a metric that should be high": (
        "val/acc was highest in epoch 1 (0.9) and ended at 0.4 in epoch 5: use the checkpoint of epoch 1, or "
        "stop earlier.",
        record_of({"val/acc": [0.2, 0.9, 0.7, 0.6, 0.5, 0.4]}),
        record_of({"val/acc": [0.2, 0.4, 0.5, 0.6, 0.7, 0.9]}),
    ),
    "still improving": (
        "val/loss was best at the end (1), and 22 % of the improvement came in the last quarter: train longer.",
        record_of({"val/loss": [float(value) for value in range(10, 0, -1)]}),
        record_of({"val/loss": GOOD}),
    ),
    "constant learning rate": (
        "The learning rate was 0.01 in all steps",
        record_of({"learning_rate": [0.01] * 30}, "step"),
        record_of({"learning_rate": [0.01 * (1 - place / 30) for place in range(30)]}, "step"),
    ),
    "learning rate still high": (
        "The learning rate ended at 71 % of its peak of 0.01 and was still falling: the schedule is longer than the "
        "run.",
        record_of(
            {"learning_rate": [0.01 * (1 - place / 100) for place in range(30)]},
            "step",
            setup=RunSetup(schedulers=["CosineAnnealingLR"]),
        ),
        record_of(
            {"learning_rate": [0.01 * (1 - place / 30) for place in range(30)]},
            "step",
            setup=RunSetup(schedulers=["CosineAnnealingLR"]),
        ),
    ),
    "weak class": (
        "Class 'cow' has a recall of 30 % in val (3 of 10; the median of the others is 92 %): 5 were predicted as "
        "'dog'.",
        record_of({}, parts=[matrix([[18, 2, 0], [1, 19, 0], [2, 5, 3]])]),
        record_of({}, parts=[matrix([[18, 2, 0], [1, 19, 0], [1, 5, 0]])]),  # too few to say
    ),
    "overconfident": (
        "The model is overconfident in val: its mean confidence is 80 %, its accuracy 65 % (expected calibration error",
        record_of({}, parts=[reliability([0.6, 0.7])]),
        record_of({}, parts=[reliability([0.68, 0.91])]),
    ),
    "failed": (
        "The run failed at step 7, in epoch 2: ValueError: no",
        record_of({}, status="failed", message="ValueError: no", step=7, epochs=2),
        record_of({}),
    ),
    "waited": (
        "Training waited for data 38 % of the time: try num_workers=4, now 0.",
        record_of(
            {},
            parts=[
                DeviceUse(
                    rank=0,
                    data_wait=38.0,
                    verdict=["The loader keeps up, or it is the bottleneck; whatever stands here."],
                    keeps_up=False,
                    remedy="try num_workers=4, now 0",
                )
            ],
        ),
        record_of({}, parts=[DeviceUse(rank=0, data_wait=8.0)]),
    ),
    "memory in bytes": (
        "allocated_bytes.all.current grew from 1.5 to 20 GiB and was still growing at the end: unless that is "
        "intended, something keeps tensors, such as a list of losses with their graphs.",
        record_of({"allocated_bytes.all.current": [(1 + place) * 2.0**30 for place in range(20)]}),
        record_of({"allocated_bytes.all.current": [(1 + place) * 2.0**30 for place in range(11)]}),
    ),
    "low utilization": (
        "The model FLOPs utilization was 10 % (median of 9 values): larger batches, lower precision or torch.compile",
        record_of({"flops/mfu": [0.1] * 10}, "step"),
        record_of({"flops/mfu": [0.45] * 10}, "step"),
    ),
    **{
        f"resumed {count} times": (
            f"The run was resumed {count} times, {where}.",
            record_of({}, resumes=[Resume(step, 0, 0.0) for step in range(count)]),
            record_of({}),
        )
        for count, where in ((2, "at steps 0, 1"), (5, "at steps 0, 1, 2, 3, 4"), (6, "last at steps 1, 2, 3, 4, 5"))
    },
    "resumed and not exactly": (
        "The run was resumed once, at step 5, and not exactly: module.cache could not be restored.",
        record_of({}, resumes=[Resume(5, 0, 0.0, ["module.cache"])]),
        record_of({}),
    ),
    "not seeded": ("The run was not seeded", record_of({"a": [1.0]}, is_seeded=False), record_of({"a": [1.0]})),
    "uncommitted": (
        "1 file differs from commit c0ffeec0ff: the differences are in the section Code.",
        record_of({}, git=GitState(**GIT, diff="+1", changed=[" M train.py", "?? notes"])),
        record_of({}, git=GitState(**GIT, changed=["?? notes"])),
    ),
    "limited": (
        "Only a part of the data was used in validation (limit_val_batches=2 batches).",
        record_of(
            {},
            trainer=[("limit_train_batches", "1"), ("limit_val_batches", "2 batches")],
            setup=RunSetup(left_out={"limit_val_batches": "validation"}),
        ),
        record_of({}, setup=RunSetup(trainer={"overfit_batches": 0.0})),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_finding_is_made_where_it_is_true_and_nowhere_else(name):
    words, having, lacking = CASES[name]
    (text,) = (text for _, text in said(having) if text.startswith(words[:12]))
    assert text.startswith(words)
    assert not [text for _, text in said(lacking) if text.startswith(words[:12])]


@pytest.mark.parametrize("epochs", [4, 6, 10, 30, 100])
@pytest.mark.parametrize(("key", "sign"), [("val/loss", 1), ("val/acc", -1)])
def test_scatter_is_no_overfitting_and_no_progress(key, sign, epochs):
    alarms = 0
    for seed in range(200):
        numbers = random.Random(seed)
        noise = [0.5 + numbers.gauss(0, 0.02) for _ in range(epochs)]
        settles = [0.5 + sign * math.exp(-8 * place / epochs) + numbers.gauss(0, 0.1) for place in range(epochs)]
        alarms += sum(bool(said(record_of({key: values}))) for values in (noise, settles))
    assert alarms <= 0.08 * 400  # of noise that happens to look like it


@pytest.mark.parametrize("noise", [0.0, 0.02])
@pytest.mark.parametrize("epochs", [8, 10, 30, 100])
def test_overfitting_is_seen_through_scatter(epochs, noise):
    for seed in range(20):
        numbers = random.Random(seed)
        falls = [0.3 + math.exp(-20 * place / epochs) for place in range(epochs)]
        rises = [max(0, place / epochs - 0.3) + numbers.gauss(0, noise) for place in range(epochs)]
        values = [fall + rise for fall, rise in zip(falls, rises, strict=True)]
        assert "val/loss was lowest in" in str(said(record_of({"val/loss": values})))


def test_learning_rates_of_several_groups_are_all_named():
    rates = {"learning_rate/0.0": [0.1] * 30, "learning_rate/0.1": [0.01] * 30, "learning_rate/0.2": [0.1] * 30}
    assert "The learning rates were 0.1, 0.01 in all steps" in str(said(record_of(rates, "step")))


@pytest.mark.parametrize(("samples", "is_said"), [(1, False), (40, False), (400, True)])
def test_calibration_is_judged_by_enough_samples(samples, is_said):
    parts = [reliability([0.6, 0.7]), matrix([[samples, 0, 0], [0, 0, 0], [0, 0, 0]])]
    assert ("overconfident" in str(said(record_of({}, parts=parts)))) is is_said


@pytest.mark.parametrize(("samples", "is_said"), [(300, False), (30_000, True)])
def test_both_directions_are_told_only_beyond_what_samples_scatter(samples, is_said):
    """One bin is off by 0.22 in one direction, and the other one by 0.08 in the other."""
    parts = [reliability([0.48, 0.98]), matrix([[samples, 0, 0], [0, 0, 0], [0, 0, 0]])]
    found = str(said(record_of({}, parts=parts)))
    assert ("in some predictions and underconfident in others" in found) is is_said
    assert ("with a standard error of" in found) is is_said


def test_one_of_several_losses_may_rise():
    rises = [0.5 + place / 50 for place in range(100)]
    assert said(record_of({"train/g_loss": rises, "train/d_loss": FALLS}, "step")) == []
    assert "train/loss rose" in str(said(record_of({"train/loss": rises, "train/aux_loss": FALLS}, "step")))


@pytest.mark.parametrize("name", HEALTHY)
def test_nothing_is_said_of_a_healthy_run(name):
    assert said(HEALTHY[name]) == []


@pytest.mark.parametrize("name", DESERVING)
def test_a_run_that_deserves_a_finding_has_it(name):
    words, records = DESERVING[name]
    for record in records:
        texts = [text for _, text in said(record)]
        assert len([text for text in texts if re.search(words, text)]) == 1, texts
        assert len(texts) <= 2, texts  # what follows from it


def test_every_check_has_runs_that_deserve_it():
    records = [record for _, records in DESERVING.values() for record in records]
    records += [having for _, having, _ in CASES.values()]
    assert [check.__name__ for check in CHECKS if not any(list(check(record)) for record in records)] == []


def test_warnings_come_first():
    record = record_of({}, is_seeded=False, step=3, parts=[clipped(0, skipped=3)])
    assert [level for level, _ in said(record)] == ["warning", "note"]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 0.0, 1e308, -1e308, 5e-324])
def test_findings_and_pages_survive_any_number(value):
    from lightning_tricks.run_report import comparison_page, run_page

    curves = dict.fromkeys(("train/loss", "val/loss", "val/acc", "learning_rate", "grad_norm/pre_clip"), [value] * 60)
    for kind in ("step", "epoch"):
        for start in ([], [1.0, 2.0]):
            record = record_of(
                {key: [*start, *values] for key, values in curves.items()},
                kind,
                parts=[clipped(50, max_norm=value), matrix([[0, 0, 0]] * 3), reliability([value, value])],
            )
            for page in (run_page(record), comparison_page(record, record)):
                assert not re.search(r'(\b[xyrd][12]?|c[xy]|width|height|opacity)="[^"]*(nan|inf)', page)
