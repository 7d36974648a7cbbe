"""Optimizers and learning rate schedules from two short descriptions, sized to the run.

When to use it: instead of writing `configure_optimizers` again: no weight decay for biases and norms, another learning
rate for the backbone, warm-up, then a cosine. `OptimizerSpec` and `ScheduleSpec` describe it, in code or in YAML;
`Tricks(optimizer=..., schedule=...)` builds them, or `build_optimizer` and `build_schedule` do in a module's own
`configure_optimizers`.

What copied code does not do: count the steps of a run as the Trainer makes them (accumulation that changes from epoch
to epoch, limits, ranks), or tell you why that is impossible. A schedule never starts at a learning rate of 0 and never
rises again after its end. It accepts parameter groups that are added during the run, and resumes exactly, because every
schedule is a closed formula of the step.

Caveats: momentum is not cycled; a schedule that depends on the length of the run changes if you resume with another.

Sources: Loshchilov and Hutter, arXiv 1608.03983 (cosine); Hu et al., arXiv 2404.06395 (warm-up, stable, decay); Smith
and Topin, arXiv 1708.07120 (one cycle); Clark et al., arXiv 2003.10555 (layer-wise learning rates).
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.lr_schedules.builders import build_optimizer as build_optimizer
    from lightning_tricks.lr_schedules.builders import build_schedule as build_schedule
    from lightning_tricks.lr_schedules.builders import total_steps as total_steps
    from lightning_tricks.lr_schedules.core.combined_optimizer import CombinedOptimizer as CombinedOptimizer
    from lightning_tricks.lr_schedules.core.optimizer_spec import OptimizerSpec as OptimizerSpec
    from lightning_tricks.lr_schedules.core.parameter_groups import layer_of_parameters as layer_of_parameters
    from lightning_tricks.lr_schedules.core.parameter_groups import parameter_groups as parameter_groups
    from lightning_tricks.lr_schedules.core.schedule_spec import ScheduleSpec as ScheduleSpec
    from lightning_tricks.lr_schedules.core.schedule_spec import plot_schedule as plot_schedule
    from lightning_tricks.lr_schedules.core.schedules import FactorLR as FactorLR
    from lightning_tricks.lr_schedules.core.schedules import constant as constant
    from lightning_tricks.lr_schedules.core.schedules import exponential as exponential
    from lightning_tricks.lr_schedules.core.schedules import inverse_sqrt as inverse_sqrt
    from lightning_tricks.lr_schedules.core.schedules import multistep as multistep
    from lightning_tricks.lr_schedules.core.schedules import one_cycle as one_cycle
    from lightning_tricks.lr_schedules.core.schedules import polynomial as polynomial
    from lightning_tricks.lr_schedules.core.schedules import ramp as ramp
    from lightning_tricks.lr_schedules.core.schedules import step as step
    from lightning_tricks.lr_schedules.core.schedules import warmup_cosine as warmup_cosine
    from lightning_tricks.lr_schedules.core.schedules import warmup_linear as warmup_linear
    from lightning_tricks.lr_schedules.core.schedules import wsd as wsd
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
