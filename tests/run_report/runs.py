"""Recorded runs: healthy ones of many kinds, and for each finding some that deserve it."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from lightning_tricks._shared.report_parts import ClippedSteps, ConfusionMatrix, DeviceUse, Facts, Reliability
from lightning_tricks.run_report import RunRecord
from lightning_tricks.run_report.core.record import GitState, Row, RunSetup

EPOCHS, BATCHES = 20, 20
STEPS = EPOCHS * BATCHES
SETUP = {"optimizers": ["AdamW"], "schedulers": ["LambdaLR"], "training_batches": 20, "has_validation": True}
Curve = Callable[[float], float] | Sequence[float]


def run(
    of_steps: Mapping[str, Curve] = {},
    of_epochs: Mapping[str, Curve] = {},
    *,
    noise: Mapping[str, float] = {},
    setup: Mapping[str, Any] = {},
    seed: int = 0,
    length: int = EPOCHS,
    batches: int = BATCHES,
    **known,
) -> RunRecord:
    """Make a record; a curve is a function of the share of the run that is over, or the values themselves."""
    numbers, rows = random.Random(seed), []

    def values(curves: Mapping[str, Curve], place: int, count: int) -> dict[str, float]:
        found = {}
        for key, curve in curves.items():
            if callable(curve):
                found[key] = curve(place / max(count - 1, 1)) + numbers.gauss(0, 1) * noise.get(key, 0.0)
            elif place < len(curve):
                found[key] = curve[place]
        return found

    for step in range(length * batches):
        epoch = step // batches
        if of_step := values(of_steps, step, length * batches):
            rows.append(Row("step", step, epoch, of_step))
        if step % batches == batches - 1 and (of_epoch := values(of_epochs, epoch, length)):
            rows.append(Row("epoch", step, epoch, of_epoch))
    given = {"module": "Net", "status": "finished", "step": length * batches, "epochs": length, "seconds": 600.0}
    given |= {"validation_seconds": 60.0, "batches": length * batches}
    return RunRecord(**{**given, "setup": RunSetup(**{**SETUP, **setup}), "rows": rows, **known})


def record_of(curves, kind="epoch", **known):
    """The record of a finished run, with a row for each place in the curves."""
    length = max(map(len, curves.values()), default=0)
    rows = [
        Row(kind, place, place, {key: values[place] for key, values in curves.items() if place < len(values)})
        for place in range(length)
    ]
    setup = RunSetup(schedulers=[])
    return RunRecord(**{"status": "finished", "step": length, "epochs": 1, "setup": setup, "rows": rows, **known})


def falls(start: float, end: float, pace: float = 8.0) -> Curve:
    return lambda time: end + (start - end) * math.exp(-pace * time)


def constant(value: float) -> Curve:
    return lambda time: value


def cosine(time: float) -> float:
    return 0.001 * (1 + math.cos(math.pi * min(time, 1))) / 2


def stairs(*rates: float) -> Curve:
    return lambda time: rates[min(int(time * len(rates)), len(rates) - 1)]


def per_epoch(curve: Curve) -> Curve:
    return lambda time: curve(int(time * (EPOCHS - 1e-6)) / EPOCHS)


def clipping(clipped=12, steps=STEPS, skipped=0, max_norm=1.0, optimizer=0):
    return ClippedSteps(optimizer=optimizer, steps=steps, clipped=clipped, skipped=skipped, max_norm=max_norm)


def matrix(recalls: Sequence[float], samples: int = 100, stage: str = "val") -> ConfusionMatrix:
    counts = []
    for place, recall in enumerate(recalls):
        row = [0] * len(recalls)
        row[place] = round(recall * samples)
        row[(place + 1) % len(recalls)] += samples - row[place]
        counts.append(row)
    return ConfusionMatrix(stage=stage, epoch=19, classes=[f"c{place}" for place in range(len(recalls))], counts=counts)


def reliability(*share: float, label: str = "accuracy", confidence=(0.6, 0.8, 0.95)) -> Reliability:
    return Reliability(
        stage="val", epoch=19, label=label, confidence=list(confidence), share=list(share), weight=[0.2, 0.3, 0.5]
    )


LOSS, VAL, ACC = falls(2.3, 0.3), falls(2.2, 0.45), falls(0.1, 0.88)
STEP_CURVES = {
    "train/loss": LOSS,
    "learning_rate": cosine,
    "grad_norm/pre_clip": falls(0.8, 0.4),
    "flops/mfu": constant(0.45),
}
EPOCH_CURVES = {"val/loss": VAL, "val/acc": ACC, "gpu0/memory_used_gib": constant(7.0), "host/data_wait": constant(3.0)}
NOISE = {"train/loss": 0.05, "val/loss": 0.005, "val/acc": 0.005, "grad_norm/pre_clip": 0.05}
GOOD_PARTS = [
    clipping(),
    matrix([0.9, 0.85, 0.92, 0.88]),
    reliability(0.58, 0.79, 0.94),
    DeviceUse(rank=0, data_wait=3.0),
]


def usual(of_steps=None, of_epochs=None, parts=None, noise=None, **known) -> RunRecord:
    """Make the record of a run with callbacks and without faults, but for what is given; None takes a curve away."""
    kept = [
        {k: v for k, v in {**all_, **(own or {})}.items() if v is not None}
        for all_, own in ((STEP_CURVES, of_steps), (EPOCH_CURVES, of_epochs))
    ]
    return run(*kept, noise={**NOISE, **(noise or {})}, parts=GOOD_PARTS if parts is None else parts, **known)


def other_parts(*parts, without=()):
    """The usual parts, with some instead of those of their kind, and without some kinds."""
    return [*(part for part in GOOD_PARTS if type(part) not in (*map(type, parts), *without)), *parts]


def scattered(seed: int, spread: float, classes: int, samples: int, center: float = 0.85) -> ConfusionMatrix:
    numbers = random.Random(seed)
    true = [min(max(numbers.gauss(center, spread), 0), 1) for _ in range(classes)]
    return matrix([sum(numbers.random() < share for _ in range(samples)) / samples for share in true], samples)


def keeps_up(share: float) -> DeviceUse:
    return DeviceUse(rank=0, data_wait=share, verdict=["The loader is the bottleneck; it may be."], keeps_up=True)


ANNEALED = {
    "kl_weight": lambda time: min(1.0, 2 * time),
    "train/loss": lambda time: 2 * math.exp(-40 * time) + 0.2 + 1.4 * min(1.0, 2 * time),
}
RATES: dict[str, tuple[str, Curve]] = {
    "steps by 0.9": ("MultiStepLR", stairs(*(1e-3 * 0.9**n for n in range(6)))),
    "three stairs": ("MultiStepLR", stairs(1e-3, 9e-4, 8e-4, 7e-4)),
    "plateau by small steps": ("ReduceLROnPlateau", stairs(*(1e-3 * (1 - 0.08 * n) for n in range(6)))),
    "exponential decay": ("ExponentialLR", per_epoch(lambda time: 1e-3 * 0.99 ** (20 * time))),
    "cycles": ("LambdaLR", lambda time: 1e-3 * (1.1 - abs(8 * time % 2 - 1))),
    "warm-up, stable, decay": ("LambdaLR", lambda time: 1e-3 * min(1, 10 * time, 0.001 + 5 * (1 - time))),
    "cosine to a high floor": ("LambdaLR", lambda time: 6e-4 + 0.4 * cosine(time)),
    "linear to a floor, then flat": ("LambdaLR", lambda time: 1e-3 * max(0.6, 1 - time)),
}
STEPPED = {"every_n_train_steps": {"ModelCheckpoint": 20}}
HEALTHY: dict[str, RunRecord] = {
    "classification": usual(),
    "no validation yet": usual(status="running", validation_seconds=0.0),
    "no data for validation": run(
        {"train/loss": LOSS}, noise=NOISE, setup={"has_validation": False}, validation_seconds=0.0
    ),
    "accumulation over an epoch": usual(setup={"trainer": {"accumulate_grad_batches": 20}}, step=20),
    "accumulation with a tail": usual(setup={"trainer": {"accumulate_grad_batches": 16}}, step=40),
    "monitors": usual(
        monitors=[("ModelCheckpoint", "val/loss", True, 0), ("ReduceLROnPlateau", "val/acc", True, 20)], setup=STEPPED
    ),
    "monitor of a value for callbacks alone": usual(monitors=[("EarlyStopping", "hidden", True, 0)]),
    "monitor of steps, of which few are logged": replace(
        usual(monitors=[("ModelCheckpoint", "train/loss", True, 0)], setup=STEPPED),
        rows=[Row("step", step, step // BATCHES, {"train/loss": 1 / (1 + step)}) for step in range(49, STEPS, 50)],
    ),
    "validation in each fifth epoch": replace(
        run(length=9, monitors=[("EarlyStopping", "val/loss", True, 0)]), rows=[Row("epoch", 99, 4, {"val/loss": 0.5})]
    ),
    "schedules to their end": usual(
        schedules=[
            ("CosineAnnealingLR", "epoch", 20, 20),
            ("CosineAnnealingLR", "epoch", 20, 19),
            ("CosineAnnealingLR", "step", 400, 400),
            ("OneCycleLR", "step", 400, 401),
        ]
    ),
    "cosine in many cycles": usual(schedules=[("CosineAnnealingLR", "step", 400, 40)]),
    "stopped early": usual(schedules=[("CosineAnnealingLR", "epoch", 20, 100)]),
    "not clipped, not measured": run({"train/loss": LOSS}, {"val/loss": VAL}, noise=NOISE),
    **{
        name: usual({"learning_rate": rate}, setup={"schedulers": [kind], "waits_for_plateau": "Plateau" in kind})
        for name, (kind, rate) in RATES.items()
    },
    "warm restarts": usual(
        {
            "learning_rate": lambda time: cosine(3 * time % 1),
            "train/loss": lambda time: LOSS(time) + 0.25 * (1 - 3 * time % 1),
        }
    ),
    "schedule-free": usual(
        {"learning_rate": constant(1e-3)}, setup={"schedulers": [], "optimizers": ["AdamWScheduleFree"]}
    ),
    "annealed KL": usual(ANNEALED, {"val/loss": None, "val/acc": None}),
    "annealed KL in validation": usual(
        ANNEALED, {"val/acc": None, "val/loss": lambda time: 0.3 + 1.4 * min(1.0, 2 * time)}
    ),
    "GAN with losses of validation": usual(
        {"train/loss": None, "train/g_loss": lambda time: 0.7 + 2 * time, "train/d_loss": falls(1.4, 0.6)},
        {"val/loss": None, "val/acc": None, "val/g_loss": lambda time: 0.7 + 2 * time, "val/d_loss": falls(1.4, 0.6)},
    ),
    "reinforcement": usual(
        {"train/loss": lambda time: 0.1 + 3 * time, "episode_reward": lambda time: 200 * time},
        {"val/loss": None, "val/acc": None},
        noise={"episode_reward": 5.0},
    ),
    "policy loss": usual(
        {"train/loss": lambda time: 0.0}, {"val/loss": None, "val/acc": None}, noise={"train/loss": 0.1}
    ),
    "self-supervised": usual(
        {"train/loss": lambda time: 2 * math.exp(-60 * time) + 0.1 + 0.5 * time}, {"val/loss": None}
    ),
    "contrastive with a queue": usual(
        {"train/loss": lambda time: 9 * min(1, 20 * time) * math.exp(-0.5 * time)}, {"val/loss": None, "val/acc": None}
    ),
    "spike that heals": usual({"train/loss": lambda time: LOSS(time) + 5 * (0.6 < time < 0.65)}),
    "negative log-likelihood below 0": usual(
        {"train/loss": falls(5.0, -120.0)},
        {"val/loss": falls(5.0, -110.0), "val/acc": None},
        noise={"train/loss": 3.0, "val/loss": 1.0},
    ),
    "continual learning": usual(
        {"train/loss": lambda time: 0.2 + 2 * math.exp(-12 * (4 * time % 1 if time < 1 else 1))}
    ),
    "AGC": usual(parts=other_parts(clipping(STEPS, max_norm=None))),
    "clipped in a third": usual(parts=other_parts(clipping(STEPS // 3))),
    "loss of validation rises, accuracy as well": usual(
        of_epochs={"val/loss": lambda time: 0.5 + 0.4 * abs(time - 0.3), "val/acc": falls(0.1, 0.9, 3)}
    ),
    "loss of validation rises at the very end": usual(
        of_epochs={"val/acc": None, "val/loss": lambda time: 0.5 + max(0.75 - time, 5 * (time - 0.77))}
    ),
    "noisy validation": usual(of_epochs={"val/acc": None}, noise={"val/loss": 0.1}, seed=3),
    "three epochs": usual(length=3, of_epochs={"val/loss": [0.5, 0.4, 0.41], "val/acc": [0.8, 0.85, 0.84]}),
    "many classes": usual(parts=other_parts(scattered(0, 0.13, 100, 100, 0.75))),
    "few samples of each class": usual(parts=other_parts(scattered(1, 0.0, 10, 12, 0.9))),
    "hard task": usual(
        parts=other_parts(scattered(2, 0.05, 20, 50, 0.4), reliability(0.35, 0.4, 0.45, confidence=(0.33, 0.41, 0.46)))
    ),
    "two balanced classes": usual(parts=other_parts(matrix([0.92, 0.86], 200))),
    "class without samples": usual(parts=other_parts(matrix([0.9, 0.9, 0.0], 5))),
    "share of positives": usual(parts=other_parts(reliability(0.3, 0.5, 0.7, label="share of positives"))),
    "memory of a second stage": usual(of_epochs={"gpu0/memory_used_gib": stairs(5.0, 5.0, 9.0)}),
    "progressive resizing": usual(of_epochs={"gpu0/memory_used_gib": stairs(4.0, 6.0, 8.0, 11.0)}),
    "cache that fills": usual(of_epochs={"gpu0/memory_used_gib": lambda time: 9 - 4 * math.exp(-6 * time)}),
    "peaks now and then": usual(of_epochs={"gpu0/peak_memory_gib": lambda time: 5 + math.log(1 + 40 * time)}),
    "other programs take memory": usual(of_epochs={"host/ram_used_gib": lambda time: 20 + 30 * time}),
    "replay buffer": usual(of_epochs={"replay_buffer/memory_gib": lambda time: 1 + 10 * time}),
    "allocated since the start": usual(
        of_epochs={"stats/allocated_bytes.all.allocated": lambda time: 1e9 + 1e12 * time}
    ),
    "free memory": usual(of_epochs={"gpu0/memory_free_gib": lambda time: 3 + 10 * time}),
    "host waits, GPU works": usual(parts=other_parts(keeps_up(60.0))),
    "host waits, GPU works, not over": usual(
        status="running",
        of_epochs={"host/data_wait": constant(60.0), "gpu0/data_wait": constant(2.0)},
        parts=other_parts(without=(DeviceUse,)),
    ),
    "not over": usual(
        status="running",
        of_epochs={"val/loss": lambda time: 2 - time, "val/acc": None},
        of_steps={"learning_rate": lambda time: cosine(0.4 * time)},
    ),
    "first batch waits": usual(
        of_epochs={"host/data_wait": [90.0] + [2.0] * 19}, parts=other_parts(without=(DeviceUse,))
    ),
    "first MFU is low": usual({"flops/mfu": [0.01] + [0.4] * 30}),
    "not seeded, no step": run(step=0, is_seeded=False, status="running"),
    "annealed to the end": usual(
        {"learning_rate": lambda time: 1e-3 * (1 - time)}, {"val/acc": None, "val/loss": lambda time: 1.5 - time}
    ),
    "overfit_batches=1.0": usual(setup={"trainer": {"overfit_batches": 1.0}}),
    **{
        f"seed {seed}": usual(seed=seed, noise={"val/loss": 0.03, "val/acc": 0.02, "train/loss": 0.15})
        for seed in range(10, 30)
    },
}

NO_VAL = {"val/loss": None, "val/acc": None}
GIT = {"commit": "c0ffee" * 6 + "abcd", "diff": "+1\n"}


def overfit(start: float, **more) -> RunRecord:
    return usual(
        of_epochs={"val/acc": None, "val/loss": lambda time: 0.4 + 2 * math.exp(-20 * time) + max(0, time - start)},
        **more,
    )


def leaks(key: str, start: float, pace: float, kind: str = "of_epochs", noise: float = 0.0) -> RunRecord:
    return usual(**{kind: {key: lambda time: start + pace * time}}, noise={key: noise})


def waited(share: float) -> RunRecord:
    return usual(parts=other_parts(DeviceUse(rank=0, data_wait=share, verdict=["The loader keeps up: once."])))


# finding -> what its sentence says, and runs that deserve it
DESERVING: dict[str, tuple[str, list[RunRecord]]] = {
    "stopped": (r"^The run was stopped at step 70, in epoch 3\.$", [usual(status="stopped", step=70, epochs=3)]),
    "not finite": (
        r"loss\w* was (NaN|inf|-inf) at step",
        [
            usual({"train/loss": [1.0] * 100 + [math.inf] + [0.9] * 299}),
            usual(of_epochs={"val/loss": [1.0] * 10 + [math.nan] + [0.9] * 9}),
            usual({"train/loss": None, "loss": [0.5] * 20 + [-math.inf] + [0.4] * 379}),
        ],
    ),
    "diverged": (
        r"rose from .* to .* at the end: training diverged",
        [
            usual({"train/loss": lambda time: LOSS(time) + 4 * max(0, time - 0.5)}, NO_VAL, noise={"train/loss": 0.3}),
            usual(
                {"train/loss": None, "loss": lambda time: 2.3 if time > 0.6 else LOSS(time)},
                NO_VAL,
                noise={"loss": 0.05},
            ),
            usual({"train/loss": lambda time: 2.3 * math.exp(8 * time)}, NO_VAL),
            usual(
                {"train/loss": None, "train_loss": lambda time: -100 + 150 * abs(time - 0.5) * 2},
                NO_VAL,
                noise={"train_loss": 5.0},
            ),
            run(
                {},
                {
                    "train_loss": [2.3, 1.2, 0.8, 0.6, 0.5, 0.45, 1.9, 5.0, 9.0, 20.0, 45.0],
                    "val_acc": [0.1, 0.5, 0.6, 0.7, 0.72, 0.73, 0.3, 0.1, 0.1, 0.1, 0.1],
                },
                length=11,
            ),
        ],
    ),
    "overfits": (
        r"the model overfits; use the checkpoint of (epoch|step)",
        [
            overfit(0.3),
            overfit(0.3, of_steps={"train/loss": [0.1] * (STEPS - 1) + [9.0]}),
            overfit(0.2, noise={"val/loss": 0.02}),
            usual(
                of_epochs={
                    "val/loss": None,
                    "val/acc": lambda time: 0.9 - 0.5 * max(0, 0.2 - time) * 5 - 0.3 * max(0, time - 0.2),
                }
            ),
            run({"loss": LOSS}, {"validation_loss": [0.5, 0.4, 0.45, 0.55, 0.6, 0.7]}, length=6, noise={"loss": 0.02}),
        ],
    ),
    "best long before the end": (
        r"(lowest|highest) in epoch \d+ .* in epoch \d+: use the checkpoint of epoch",
        [
            run({}, {"val/loss": [1.0, 0.5, 0.4, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9]}, length=10),
            usual(
                {"train/loss": lambda time: LOSS(time) + 1.2 * max(0, time - 0.4)},
                {"val/acc": None, "val/loss": lambda time: VAL(time) + max(0, time - 0.4)},
                noise={"train/loss": 0.01},
            ),
        ],
    ),
    "clipped": (
        r"^100 % of 400 steps of optimizer 1 were clipped.* Most updates were rescaled",
        [
            usual(
                {
                    "grad_norm/pre_clip": None,
                    "grad_norm/0/pre_clip": constant(0.1),
                    "grad_norm/1/pre_clip": constant(9.0),
                },
                parts=other_parts(clipping(9), clipping(STEPS, optimizer=1)),
            )
        ],
    ),
    "limit without effect": (
        r"^No step of optimizer 1 was clipped: max_norm=1 is far above the largest logged norm, 0\.\d+\.$",
        [
            usual(
                {
                    "grad_norm/pre_clip": None,
                    "grad_norm/0/pre_clip": constant(0.9),
                    "grad_norm/1/pre_clip": constant(0.05),
                },
                parts=other_parts(clipping(), clipping(0, optimizer=1)),
            )
        ],
    ),
    "skipped": (
        r"steps.* were skipped: gradients were NaN or Inf\.$",
        [
            usual(parts=other_parts(clipping(0, skipped=300))),
            usual(parts=other_parts(clipping(0, skipped=60)), setup={"trainer": {"precision": "16-mixed"}}),
            usual(parts=other_parts(clipping(), clipping(0, skipped=5, optimizer=1))),
        ],
    ),
    "weak class": (
        r"^Class 'c\d' has a recall of .* were predicted as 'c\d'\.$",
        [
            usual(parts=other_parts(matrix(recalls, samples)))
            for recalls, samples in (
                ([0.9, 0.3, 0.95], 10),
                ([0.95, 0.4], 100),
                ([0.9, 0.92, 0.5, 0.88, 0.91], 50),
                ([0.6, 0.65, 0.1, 0.62], 200),
                ([1.0, 1.0, 1.0, 0.75], 400),
            )
        ],
    ),
    "still improving": (
        r"was best at the end .* of the improvement came in the last quarter: train longer\.$",
        [
            usual({"learning_rate": None}, {"val/acc": None, "val/loss": lambda time: 2 - time}),
            usual(
                {"learning_rate": lambda time: 1e-3 * min(1, 5 * time)},
                {"val/acc": None, "val/loss": lambda time: 2 - time},
            ),
            usual(
                {"learning_rate": lambda time: cosine(0.2 * time)},
                {"val/acc": None, "val/loss": lambda time: 1 / (1 + time)},
            ),
        ],
    ),
    "schedule without effect": (
        r"^The learning rate was 0\.1 in all steps: StepLR never changed it\.$",
        [usual({"learning_rate": constant(0.1)}, setup={"schedulers": ["StepLR"]})],
    ),
    "schedule longer than the run": (
        r"^The learning rate ended at \d+ % of its peak of .* and was still falling: the schedule is longer",
        [
            usual({"learning_rate": lambda time: cosine(0.4 * time)}),
            usual({"learning_rate": per_epoch(lambda time: cosine(0.45 * time))}),
            usual({"learning_rate": lambda time: 1e-3 * min(10 * time, 1 - 0.4 * (time - 0.1))}),
            usual(
                {
                    "learning_rate": None,
                    "learning_rate/0.0": constant(1e-5),
                    "learning_rate/0.1": per_epoch(lambda time: 1e-3 * (1 - 0.4 * time)),
                }
            ),
        ],
    ),
    "calibration": (
        r"^The model is (overconfident|underconfident|overconfident in some) .*calibration error 0",
        [
            usual(parts=other_parts(reliability(*shares)))
            for shares in ((0.4, 0.5, 0.7), (0.5, 0.6, 0.8), (0.9, 0.95, 1.0), (0.55, 0.6, 0.85), (0.95, 0.85, 0.8))
        ],
    ),
    "validation that never ran": (
        r"^Validation never ran: (an epoch had 15 batches, and .* last of the 20 that|20 epochs with check)",
        [
            run(
                {"train/loss": LOSS},
                validation_seconds=0.0,
                batches=15,
                noise=NOISE,
                setup={"trainer": {"max_epochs": 20}},
            ),
            run({"train/loss": LOSS}, validation_seconds=0.0, noise=NOISE),
        ],
    ),
    "accumulation over more than an epoch": (
        r"^accumulate_grad_batches=64 is more than the 20 batches of an epoch, which ends with a step: no step was",
        [usual(setup={"trainer": {"accumulate_grad_batches": 64}}, step=20)],
    ),
    "a monitor that was never logged": (
        r"^EarlyStopping monitors 'val_los', which was never logged: it had no effect\. Keys that were logged: ",
        [usual(monitors=[("EarlyStopping", "val_los", False, 0)])],
    ),
    "old values decided": (
        r" decided \d+ times by 'val/loss', of which there were \d+ values: it compared old ones again\.",
        [
            usual(
                monitors=[("ModelCheckpoint", "val/loss", True, 0)],
                setup={"every_n_train_steps": {"ModelCheckpoint": 5}},
            ),
            run({}, {"val/loss": [0.5, 0.4]}, length=4, monitors=[("ReduceLROnPlateau", "val/loss", True, 4)]),
        ],
    ),
    "a monitor that was no longer logged": (
        r"^EarlyStopping monitors 'val/loss', which was last logged in epoch 1 of 20: since then",
        [run({"train/loss": LOSS}, {"val/loss": [0.5, 0.4]}, monitors=[("EarlyStopping", "val/loss", True, 0)])],
    ),
    "a cosine past its end": (
        r"^CosineAnnealingLR went past its T_max=\d+ to \d+ (step|epoch)s: the learning rate rose again\. Set T_max",
        [
            usual(schedules=[("CosineAnnealingLR", *of)])
            for of in (("step", 400, 20), ("step", 400, 300), ("epoch", 20, 15))
        ],
    ),
    "a schedule of steps, stepped by epochs": (
        r"^OneCycleLR made 20 of its 400 steps, one each epoch\. Return it with \"interval\": \"step\"",
        [usual(schedules=[("OneCycleLR", "epoch", 20, 400)])],
    ),
    "told by a callback": (
        r"^The weights of rank 1 differ\.$",
        [usual(parts=[*GOOD_PARTS, Facts(title="Run fingerprint", warnings=["The weights of rank 1 differ."])])],
    ),
    "waited": (
        r"^Training waited for data \d+ % of the time: ",
        [
            waited(11.0),
            usual(
                of_epochs={"host/data_wait": constant(50.0), "gpu0/memory_used_gib": None},
                parts=other_parts(without=(DeviceUse,)),
            ),
            usual(
                of_epochs={"gpu0/data_wait": constant(30.0)}, parts=other_parts(without=(DeviceUse,)), status="running"
            ),
        ],
    ),
    "memory": (
        r" grew from .* and was still growing at the end: ",
        [
            leaks("gpu0/memory_used_gib", 2.0, 6.0),
            leaks("DeviceStatsMonitor.on_train_batch_start/allocated_bytes.all.current", 2e9, 6e9, "of_steps", 1e8),
            leaks("memory_allocated", 1000.0, 500.0, "of_steps", 5.0),
            leaks("gpu0/peak_memory_gib", 2.0, 6.0),
        ],
    ),
    "uncommitted": (
        r"^2 files differ from commit c0ffeec0ff: the differences are in the section Code\.$",
        [usual(git=GitState(**GIT, changed=[" M a", "M  b", "?? c"]))],
    ),
}
