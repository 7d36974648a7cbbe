"""Ensembles that are trained in stages."""

from __future__ import annotations

from torch import nn

from lightning_tricks import StackingClassifier
from tests.auto_resume.scenarios.frame import Job, scenario


def _members() -> list[nn.Module]:
    return [nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3))]


@scenario(ranks=(1, 2), workers=(0, 2))
def stacking(job: Job) -> None:
    job.seed()
    job.fit(StackingClassifier(_members(), cv=3, optimizer=("SGD", {"lr": 0.05, "momentum": 0.9})))


@scenario(ranks=(1, 2), workers=(0, 2))
def stacking_with_a_net(job: Job) -> None:
    job.seed()
    final = nn.Sequential(nn.Linear(12, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 3))
    job.fit(StackingClassifier(_members(), final, 2, passthrough=True), max_epochs=2)
