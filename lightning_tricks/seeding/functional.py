"""Seeding for any training loop, and the settings of determinism."""

from __future__ import annotations

import os
import warnings
from typing import Literal

import torch

from lightning_tricks._shared.lightning_name import lightning_logger
from lightning_tricks._shared.rng import MAX_SEED, check_seed, seed_global_rngs

Deterministic = bool | Literal["warn"] | None

_DETERMINISTIC_CUBLAS = (":4096:8", ":16:8")

# A child of Lightning's logger: shown and silenced together with Lightning's own messages.


def check_determinism(deterministic: Deterministic) -> Deterministic:
    """Return `deterministic`, or raise a ValueError that lists the valid values."""
    if deterministic not in (None, True, False, "warn"):
        raise ValueError(f"deterministic must be True, False, 'warn' or None, got {deterministic!r}.")
    return deterministic


def seed_everything(
    seed: int | None = None,
    workers: bool = True,
    verbose: bool = True,
    *,
    deterministic: Deterministic = None,
    benchmark: bool | None = None,
) -> int:
    """Seed `random`, `numpy.random` and torch on all devices, and configure determinism.

    Call it before the model is built: initial weights are drawn from these generators. It is a superset of
    `lightning.seed_everything`: with the same `seed` and `workers`, random numbers and environment variables are equal.

    Args:
        seed: An integer in [0, 2**32 - 1]. None takes `PL_GLOBAL_SEED` from the environment, or 0 when it is not set.
        workers: Whether Lightning derives the seed of each DataLoader worker from its rank as well (environment
            variable `PL_SEED_WORKERS`), so that workers of different ranks draw different numbers. The default of
            `lightning.seed_everything` is False.
        verbose: Whether to log the seed, through Lightning's logger once Lightning is imported.
        deterministic: True makes torch, cuDNN and cuBLAS use deterministic algorithms, and raise an error if there is
            none; "warn" warns instead; False allows nondeterministic algorithms. None changes nothing.
        benchmark: Whether cuDNN times its convolution algorithms and uses the fastest. None changes nothing, except
            that `deterministic` turns it off.

    If one of the two is turned on, so is cuDNN itself (`torch.backends.cudnn.enabled`).

    Returns:
        The seed that was set.

    Raises:
        TypeError: If `seed` is not an integer.
        ValueError: If `seed` (or `PL_GLOBAL_SEED`) is out of range, or `deterministic` has an unknown value.

    Examples:
        >>> seed_everything(42, verbose=False)
        42
        >>> torch.rand(1)
        tensor([0.8823])
    """
    seed = _seed_from_environment(verbose) if seed is None else check_seed(seed)
    set_determinism(deterministic, benchmark)
    os.environ["PL_GLOBAL_SEED"] = str(seed)
    os.environ["PL_SEED_WORKERS"] = str(int(workers))
    seed_global_rngs(seed)
    if verbose:
        lightning_logger("seeding").info("Seed set to %d", seed)
    return seed


def set_determinism(deterministic: Deterministic = None, benchmark: bool | None = None) -> None:
    """Configure the determinism of torch, cuDNN and cuBLAS, as `seed_everything` does.

    Args:
        deterministic: True, "warn", False, or None for no change.
        benchmark: True, False, or None for no change.

    Raises:
        ValueError: If `deterministic` has another value.
    """
    check_determinism(deterministic)
    if deterministic and benchmark:
        warnings.warn(
            "benchmark=True picks convolution algorithms by their timing, which differs from run to run, in spite of "
            f"deterministic={deterministic!r}. Omit benchmark for reproducible results.",
            stacklevel=3,
        )
    if deterministic or benchmark:
        torch.backends.cudnn.enabled = True
    if deterministic is not None:
        torch.backends.cudnn.deterministic = bool(deterministic)
        torch.use_deterministic_algorithms(bool(deterministic), warn_only=deterministic == "warn")
    if deterministic and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in _DETERMINISTIC_CUBLAS:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = _DETERMINISTIC_CUBLAS[0]
    if benchmark is not None or deterministic:
        torch.backends.cudnn.benchmark = bool(benchmark)


def _seed_from_environment(verbose: bool) -> int:
    value = os.environ.get("PL_GLOBAL_SEED")
    if value is None:
        if verbose:
            warnings.warn("No seed is given and PL_GLOBAL_SEED is not set: the seed is 0.", stacklevel=3)
        return 0
    try:
        return check_seed(int(value))
    except ValueError as error:
        raise ValueError(
            f"The environment variable PL_GLOBAL_SEED is {value!r}, but must be an integer in [0, {MAX_SEED}]: "
            "correct it, unset it, or pass a seed."
        ) from error
