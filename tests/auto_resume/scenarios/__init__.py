"""Training scripts as strangers write them, and what AutoResume owes each: name -> `Scenario`.

Each is a small program of its own. A run of it that was killed anywhere and started again must end as the undisturbed
one, bit for bit, or say what differs.
"""

from tests.auto_resume.scenarios import (
    callbacks,
    changed_back,
    changed_once,
    data,
    ensembles,
    epochs,
    holders,
    memory,
    metrics,
)
from tests.auto_resume.scenarios.frame import BATCHES, SCENARIOS, Scenario

__all__ = [
    "BATCHES",
    "SCENARIOS",
    "Scenario",
    "callbacks",
    "changed_back",
    "changed_once",
    "data",
    "ensembles",
    "epochs",
    "holders",
    "memory",
    "metrics",
]
