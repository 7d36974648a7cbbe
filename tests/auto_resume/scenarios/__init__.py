"""Training scripts as strangers write them, and what AutoResume owes each: name -> `Scenario`.

Each is a small program of its own. A run of it that was killed anywhere and started again must end as the undisturbed
one, bit for bit, or say what differs. `tests/styles` has larger ones, and `tests/ensembles` those of stacking.
"""

from tests.auto_resume.scenarios import callbacks, changes, data, modules, sampling
from tests.auto_resume.scenarios.frame import BATCHES, SCENARIOS, Scenario

__all__ = ["BATCHES", "SCENARIOS", "Scenario", "callbacks", "changes", "data", "modules", "sampling"]
