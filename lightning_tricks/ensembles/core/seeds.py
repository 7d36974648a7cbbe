"""The seeds of an ensemble: one for each purpose, so that no two of them draw the same numbers."""

from __future__ import annotations

from lightning_tricks._shared.rng import derive_seed

INITIAL_WEIGHTS, SAMPLE_ORDER, BOOTSTRAP, WORKERS, HELD_OUT, CROSS_VALIDATION = range(6)  # purposes


def purpose_seed(seed: int, *path: int) -> int:
    """Derive the seed for one purpose from the seed of the ensemble.

    Args:
        seed: Seed of the ensemble, >= 0.
        *path: The purpose and whole numbers >= 0 that go with it, such as the member and the epoch. Paths of different
            length have different seeds: (1,) and (1, 0) differ.

    Returns:
        A seed in [0, 2**32 - 1].
    """
    # numpy's SeedSequence does not tell (1,) from (1, 0): the length of the path is hashed as well
    return derive_seed(len(path), seed, *path)
