"""Average the weights over the steps of training (EMA), and evaluate and keep the average.

When to use it: the average of the last steps is often better than the last weights, above all in image models,
diffusion models and GANs, and its metrics vary less from epoch to epoch.

Caveats: it needs memory for one more copy of the weights that are trained, and for another one during a validation. A
second `fit` of the module begins with the average, a resumed one with the weights of training. FSDP1 and DeepSpeed are
refused.

Source: Polyak and Juditsky, "Acceleration of Stochastic Approximation by Averaging" (1992); Tarvainen and Valpola,
"Mean teachers are better role models" (2017); the warm-up of TensorFlow, `ExponentialMovingAverage(num_updates=)`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks.moving_average.callback import ExponentialMovingAverage as ExponentialMovingAverage
    from lightning_tricks.moving_average.functional import MovingAverage as MovingAverage
    from lightning_tricks.moving_average.functional import decay_at as decay_at
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
