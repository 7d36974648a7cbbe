"""Seed, capture, restore and isolate the global random number generators: `random`, `numpy.random`, torch, CUDA."""

from __future__ import annotations

import os
import random
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from ctypes import string_at
from typing import Any

import numpy as np
import torch

MAX_SEED = 2**32 - 1  # numpy's limit, the narrowest of the three libraries
_ENVIRONMENT = ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "CUBLAS_WORKSPACE_CONFIG")
_RNGS = ("python", "numpy", "torch", "cuda")


def check_seed(seed: object) -> int:
    """Return `seed` as an int, or raise an error if it is not a valid seed.

    Args:
        seed: A Python or numpy integer in [0, 2**32 - 1].

    Returns:
        The seed as a plain int.

    Raises:
        TypeError: If `seed` is not an integer; a bool is refused, too.
        ValueError: If `seed` is out of range.
    """
    remedy = f"seed must be an integer in [0, 2**32 - 1] = [0, {MAX_SEED}]"
    if isinstance(seed, bool) or not isinstance(seed, int | np.integer):
        raise TypeError(f"{remedy}, got {seed!r} ({type(seed).__name__}).")
    if not 0 <= seed <= MAX_SEED:
        raise ValueError(f"{remedy}, got {seed}.")
    return int(seed)


def seed_global_rngs(seed: int) -> None:
    """Seed the global generators, without setting environment variables or flags.

    Args:
        seed: An integer in [0, 2**32 - 1].
    """
    seed = check_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def derive_seed(seed: int, *keys: int) -> int:
    """Derive an independent seed from a seed and keys such as a rank and a step.

    Args:
        seed: An integer in [0, 2**32 - 1].
        *keys: Non-negative integers that identify the derived seed. Compare only calls with the same number of keys:
            (1,) and (1, 0) give the same seed.

    Returns:
        A seed in [0, 2**32 - 1], by numpy's `SeedSequence` hash (O'Neill, 2015).

    Examples:
        >>> derive_seed(42, 0, 100) == derive_seed(42, 1, 100)
        False
    """
    return int(np.random.SeedSequence([check_seed(seed), *keys]).generate_state(1)[0])


def loader_generators(loader: Any) -> list[torch.Generator]:
    """Return the generators from which a DataLoader and its samplers draw, each once; none for other iterables."""
    sampler, batches = getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)
    owners = (loader, sampler, batches, getattr(batches, "sampler", None))
    # on several ranks, Lightning wraps samplers that are not torch's (`DistributedSamplerWrapper`)
    wrapped = [getattr(getattr(owner, "dataset", None), "_sampler", None) for owner in owners[1:]]
    found = [getattr(owner, "generator", None) for owner in (*owners, *wrapped)]
    return list(dict.fromkeys(value for value in found if isinstance(value, torch.Generator)))


@contextmanager
def kept_generators(loader: Any) -> Iterator[None]:
    """Restore the states of the `loader_generators` of a loader on leaving."""
    states = [(generator, generator.get_state()) for generator in loader_generators(loader)]
    try:
        yield
    finally:
        for generator, state in states:
            generator.set_state(state)


def determinism_settings() -> dict[str, bool | str]:
    """Return the settings that `set_determinism` changes.

    Returns:
        Setting -> value, as plain values for logs and checkpoints.
    """
    return {
        "cudnn.enabled": torch.backends.cudnn.enabled,
        "cudnn.deterministic": torch.backends.cudnn.deterministic,
        "cudnn.benchmark": torch.backends.cudnn.benchmark,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
        "CUBLAS_WORKSPACE_CONFIG": os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""),
    }


def capture_rng_state() -> dict[str, Any]:
    """Return a copy of the state of the global random number generators.

    CUDA generators are captured only if CUDA is initialized; capturing never creates a CUDA context.

    Returns:
        `python` (version, words as an int64 tensor (625,), cached Gaussian), `numpy` (generator, words as an int64
        tensor (624,), position, cached Gaussian's flag and value), `torch` (a uint8 tensor) and `cuda` (one uint8
        tensor for each device, on the CPU). Plain values and tensors: it loads with `weights_only=True`.

    Raises:
        ValueError: If numpy's global generator is not MT19937, its default.

    Examples:
        >>> state = capture_rng_state()
        >>> first = torch.rand(2), random.random()
        >>> restore_rng_state(state)
        >>> torch.equal(torch.rand(2), first[0]), random.random() == first[1]
        (True, True)
    """
    return HeldRngState()()


class HeldRngState:
    """The state that the global random number generators have now; a call returns it as `capture_rng_state` does.

    Args:
        before: What was held before. Where the words of numpy's generator in memory are those of then, the rest of its
            state, which takes 40 times as long to get, is taken from it.

    Raises:
        ValueError: If numpy's global generator is not MT19937, its default.
    """

    def __init__(self, before: HeldRngState | None = None) -> None:
        self._python, self._torch = random.getstate(), torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
        self._words = _numpy_words()
        is_kept = before is not None and self._words and self._words == before._words
        self._numpy: Any = before._numpy if before is not None and is_kept else np.random.get_state(legacy=True)
        if not isinstance(self._numpy, tuple):
            raise ValueError(
                f"numpy's global generator is {self._numpy['bit_generator']}; its state can be captured only when it "
                "is numpy's default, MT19937 (np.random.set_bit_generator chooses it)."
            )
        _, key, position, has_gauss, _ = self._numpy
        # a Gaussian that is cached stands elsewhere, and is used without a new word
        if has_gauss or self._words != key.tobytes() + np.intc(position).tobytes():
            self._words = b""

    def __call__(self) -> dict[str, Any]:
        """Return what `capture_rng_state` does."""
        version, words, gauss = self._python
        name, key, *rest = self._numpy
        return {
            "python": (version, torch.from_numpy(np.array(words, np.int64)), gauss),  # ten times as fast as `tensor`
            "numpy": (str(name), torch.from_numpy(np.asarray(key).astype(np.int64)), *rest),
            "torch": self._torch,
            "cuda": self._cuda,
        }


def _numpy_words() -> bytes:
    """Return the words and the position of numpy's global generator; nothing for one that is not its default."""
    get_generator = getattr(np.random, "get_bit_generator", None)  # numpy 1.24
    generator = get_generator and get_generator()
    return string_at(generator.ctypes.state_address, 4 * (624 + 1)) if type(generator) is np.random.MT19937 else b""


def restore_rng_state(state: Mapping[str, Any]) -> None:
    """Restore the state of the global random number generators.

    Args:
        state: The result of `capture_rng_state`, possibly saved and loaded since (on any device).

    Raises:
        ValueError: If a generator is missing from `state`; no generator is changed then.
    """
    missing = [name for name in _RNGS if name not in state]
    if missing:
        raise ValueError(f"The random state lacks {missing}; it must be what capture_rng_state() returned.")
    version, words, gauss = state["python"]
    name, key, position, has_gauss, cached_gauss = state["numpy"]
    cuda_states = [cuda_state.cpu() for cuda_state in state["cuda"]]

    random.setstate((version, tuple(words.tolist()), gauss))
    np.random.set_state((name, key.cpu().numpy().astype(np.uint32), position, has_gauss, cached_gauss))
    torch.set_rng_state(state["torch"].cpu())
    devices = torch.cuda.device_count() if cuda_states else 0
    if len(cuda_states) != devices:
        warnings.warn(
            f"The random state holds generators of {len(cuda_states)} CUDA devices, but this machine has {devices}: "
            f"{min(devices, len(cuda_states))} were restored.",
            stacklevel=2,
        )
    for device, cuda_state in enumerate(cuda_states[:devices]):
        torch.cuda.set_rng_state(cuda_state, device)


@contextmanager
def isolated_rng(seed: int | None = None) -> Iterator[None]:
    """Run a block or a decorated function, then restore the global random number generators.

    Args:
        seed: The seed inside the block; None keeps the present state. As a decorator it does not work for generator
            functions.

    Yields:
        Nothing. The state is restored on leaving, also after an exception.

    Examples:
        >>> before = torch.get_rng_state()
        >>> with isolated_rng(seed=1):
        ...     noise = torch.randn(3)
        >>> torch.equal(torch.get_rng_state(), before)
        True
    """
    if seed is not None:
        seed = check_seed(seed)
    state = capture_rng_state()
    cuda_was_initialized = torch.cuda.is_initialized()
    try:
        if seed is not None:
            random.seed(seed)
            np.random.seed(seed)
            torch.default_generator.manual_seed(seed)
            # torch.manual_seed would queue this seed for a CUDA context that is created after the block
            if cuda_was_initialized:
                torch.cuda.manual_seed_all(seed)
        yield
    finally:
        restore_rng_state(state)
        if torch.cuda.is_initialized() and not cuda_was_initialized:
            for generator in torch.cuda.default_generators:
                generator.manual_seed(generator.initial_seed())


@contextmanager
def isolated_seeding() -> Iterator[None]:
    """Run a block, then restore generators, determinism and environment variables.

    Yields:
        Nothing. Everything is restored on leaving, also after an exception.
    """
    environment = {name: os.environ.get(name) for name in _ENVIRONMENT}
    settings = determinism_settings()
    cuda_was_initialized = torch.cuda.is_initialized()
    try:
        with isolated_rng():
            yield
    finally:
        if not cuda_was_initialized:
            # the block may have queued a seed for a CUDA context that it, or the program after it, creates
            torch.cuda.manual_seed_all(torch.initial_seed())
        torch.use_deterministic_algorithms(
            bool(settings["deterministic_algorithms"]), warn_only=bool(settings["deterministic_warn_only"])
        )
        for name in ("enabled", "deterministic", "benchmark"):
            setattr(torch.backends.cudnn, name, settings[f"cudnn.{name}"])
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
