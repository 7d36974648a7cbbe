"""Seed all random number generators of a run, record the seed, and give each rank random numbers of its own.

When to use it: in every run whose result you want to reproduce. `seed_everything` before the model is built, or the
callback `SeedEverything` when the model is built in `configure_model` (or by the mixin).

What it covers: `random`, `numpy.random`, torch on CPU and on all CUDA devices, DataLoader workers, and, on request, the
settings that make cuDNN, cuBLAS and torch choose deterministic kernels.

Caveats: the same seed gives the same bits only on the same versions and hardware; atomics on a GPU stay
nondeterministic unless `deterministic=True`; a resumed run draws random numbers from a seed that is derived from the
seed and the step it resumes at, so it is reproducible but not equal to the uninterrupted run, unless `AutoResume`
resumes it.

Source: PyTorch's notes on reproducibility and Lightning's `seed_everything`, of which this one is a superset. Many
blogs set `torch.backends.cudnn.enable = True`: a silent no-op, because the flag is called `enabled`.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning_tricks._shared.rng import capture_rng_state as capture_rng_state
    from lightning_tricks._shared.rng import derive_seed as derive_seed
    from lightning_tricks._shared.rng import isolated_rng as isolated_rng
    from lightning_tricks._shared.rng import isolated_seeding as isolated_seeding
    from lightning_tricks._shared.rng import restore_rng_state as restore_rng_state
    from lightning_tricks.seeding.callback import SeedEverything as SeedEverything
    from lightning_tricks.seeding.functional import seed_everything as seed_everything
else:  # or a type checker would take any name for one of the package
    from lightning_tricks._lazy import lazy_names

    __getattr__, __dir__, __all__ = lazy_names(__name__)
