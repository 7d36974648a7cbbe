"""Seed all random number generators of a run, record the seed, and give each rank its own random numbers.

When to use it: in every run that you want to reproduce. Call `seed_everything` before the model is built, or use the
callback `SeedEverything` if the model is built in `configure_model` (or with the mixin).

What it covers: `random`, `numpy.random`, torch on CPU and on all CUDA devices, DataLoader workers, and, on request, the
settings that make cuDNN, cuBLAS and torch choose deterministic kernels.

Caveats: the same seed gives the same bits only with the same versions and hardware; atomics on a GPU stay
nondeterministic unless `deterministic=True`. A resumed run derives its random numbers from the seed and the step at
which it resumes: it is reproducible, but equals the uninterrupted run only with `AutoResume`.

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
