"""A validation before the first training step: what the model measured before it was trained.

`ValidateFirst` runs the whole validation of a fit once before its first step, as loggers see it, at step 0. Weights,
random states and the rest of the run are those of a run without it.

When to use it: to see where a pretrained model starts, and how much training adds. Lightning's sanity check runs a few
batches and discards what they log.

Caveats: what a module or a data set counts in its own attributes during a validation, it counts here as well.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.validate_first.callback import ValidateFirst as ValidateFirst
    from lightning_tricks.validate_first.functional import unseen_iteration as unseen_iteration
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
