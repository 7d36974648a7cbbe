"""Seeding against Lightning's own, and captured random states against themselves."""

import os
import random
from contextlib import suppress

import lightning
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tricks import seed_everything
from lightning_tricks._shared.rng import HeldRngState
from lightning_tricks.seeding import capture_rng_state, derive_seed, isolated_rng, isolated_seeding, restore_rng_state
from tests.small import same


def _draw():
    return [random.random(), random.gauss(0, 1), *np.random.rand(3), np.random.randn(), *torch.randn(3).tolist()]


@pytest.fixture(autouse=True)
def _no_seed_in_the_environment(monkeypatch):
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS", "CUBLAS_WORKSPACE_CONFIG"):
        monkeypatch.delenv(name, raising=False)


@settings(derandomize=True, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), workers=st.booleans())
def test_equals_lightnings_random_state_and_environment(seed, workers):
    results = []
    for function in (seed_everything, lightning.seed_everything):
        returned = function(seed, workers=workers, verbose=False)
        results.append((returned, _draw(), os.environ["PL_GLOBAL_SEED"], os.environ["PL_SEED_WORKERS"]))
    assert results[0] == results[1]


@pytest.mark.parametrize("seed", [-1, 2**32, 10**20])
def test_refuses_seeds_out_of_range(seed):
    state = capture_rng_state()
    with pytest.raises(ValueError, match=rf"\[0, 2\*\*32 - 1\] = \[0, 4294967295\], got {seed}"):
        seed_everything(seed)
    assert same(capture_rng_state(), state)
    assert "PL_GLOBAL_SEED" not in os.environ


@pytest.mark.parametrize("seed", [True, 1.0, "1", [1], np.float64(1), torch.tensor(1)], ids=repr)
def test_refuses_what_is_no_integer(seed):
    with pytest.raises(TypeError, match=r"integer in \[0, 2\*\*32 - 1\].* got .*" + type(seed).__name__):
        seed_everything(seed)


def test_takes_numpy_integers():
    assert type(seed_everything(np.int64(3), verbose=False)) is int


def test_takes_the_seed_of_the_environment(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "17")
    assert seed_everything() == 17
    monkeypatch.setenv("PL_GLOBAL_SEED", "seventeen")
    with pytest.raises(ValueError, match=r"PL_GLOBAL_SEED is 'seventeen'.*unset it"):
        seed_everything()
    monkeypatch.delenv("PL_GLOBAL_SEED")
    with pytest.warns(UserWarning, match="PL_GLOBAL_SEED is not set: the seed is 0"):
        assert seed_everything() == 0


def test_leaves_the_switches_alone_unless_asked():
    cudnn = torch.backends.cudnn
    cudnn.enabled, cudnn.deterministic, cudnn.benchmark = False, True, True
    seed_everything(1, verbose=False)
    assert (cudnn.enabled, cudnn.deterministic, cudnn.benchmark) == (False, True, True)
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_sets_every_switch():
    cudnn = torch.backends.cudnn
    cudnn.enabled, cudnn.benchmark = False, True
    seed_everything(1, verbose=False, deterministic=True)
    assert (cudnn.enabled, cudnn.deterministic, cudnn.benchmark) == (True, True, False)
    assert torch.are_deterministic_algorithms_enabled()
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"

    seed_everything(1, verbose=False, deterministic="warn")
    assert torch.is_deterministic_algorithms_warn_only_enabled()

    seed_everything(1, verbose=False, deterministic=False, benchmark=True)
    assert (cudnn.enabled, cudnn.deterministic, cudnn.benchmark) == (True, False, True)
    assert not torch.are_deterministic_algorithms_enabled()


def test_keeps_the_users_deterministic_workspace(monkeypatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    seed_everything(1, verbose=False, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    seed_everything(1, verbose=False, deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


def test_says_that_benchmark_spoils_determinism():
    with pytest.warns(UserWarning, match="benchmark=True picks convolution algorithms by their timing"):
        seed_everything(1, verbose=False, deterministic=True, benchmark=True)


def test_refuses_an_unknown_switch():
    with pytest.raises(ValueError, match="deterministic must be True, False, 'warn' or None, got 'yes'"):
        seed_everything(1, deterministic="yes")
    assert "PL_GLOBAL_SEED" not in os.environ


def test_logs_the_seed_only_when_asked(lightning_log):
    seed_everything(5, verbose=False)
    assert not lightning_log
    seed_everything(5)
    assert lightning_log == [("lightning.pytorch.tricks.seeding", "Seed set to 5")]


@settings(derandomize=True, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), odd_draws=st.booleans())
def test_a_restored_state_repeats_the_numbers(seed, odd_draws):
    seed_everything(seed, verbose=False)
    if odd_draws:  # the second half of a Gaussian pair is cached in the state
        random.gauss(0, 1), np.random.randn()
    state = capture_rng_state()
    first = _draw()
    assert _draw() != first
    restore_rng_state(state)
    assert _draw() == first


@settings(derandomize=True, max_examples=60)
@given(draws=st.lists(st.sampled_from(["uniform", "gaussian", "python", "torch", "seed", "nothing"]), max_size=12))
def test_what_is_held_after_what_was_held_before_is_the_state_of_now(draws):
    functions = {"uniform": np.random.rand, "gaussian": np.random.randn, "python": random.random}
    functions |= {"torch": lambda: torch.rand(1), "seed": lambda: np.random.seed(3), "nothing": lambda: None}
    held = HeldRngState()
    for draw in draws:
        functions[draw]()
        held = HeldRngState(held)
        assert same(held(), capture_rng_state())


def test_a_state_loads_with_weights_only(tmp_path):
    state = capture_rng_state()
    torch.save(state, tmp_path / "rng.pt")
    first = _draw()
    loaded = torch.load(tmp_path / "rng.pt", weights_only=True)
    assert same(loaded, state)
    restore_rng_state(loaded)
    assert _draw() == first


def test_a_state_that_lacks_a_generator_changes_nothing():
    before = capture_rng_state()
    with pytest.raises(ValueError, match=r"lacks \['numpy', 'cuda'\]"):
        restore_rng_state({"python": before["python"], "torch": before["torch"]})
    assert same(capture_rng_state(), before)


def test_a_state_with_more_devices_than_the_machine(monkeypatch):
    state = capture_rng_state()
    state["cuda"] = [torch.zeros(16, dtype=torch.uint8)] * (torch.cuda.device_count() + 2)
    with pytest.warns(UserWarning, match=r"holds generators of \d+ CUDA devices, but this machine has \d+"):
        restore_rng_state(state)


def test_isolated_block_leaves_the_random_state_untouched():
    before = capture_rng_state()
    with isolated_rng():
        continued = _draw()
    assert same(capture_rng_state(), before)
    assert _draw() == continued


def test_isolated_block_starts_from_its_seed():
    seed_everything(9, verbose=False)
    expected = _draw()
    before = capture_rng_state()
    with isolated_rng(seed=9):
        assert _draw() == expected
    assert same(capture_rng_state(), before)
    assert os.environ["PL_GLOBAL_SEED"] == "9"


def test_isolated_block_restores_through_an_exception_and_decorates():
    before = capture_rng_state()

    @isolated_rng(seed=1)
    def fails():
        _draw()
        raise KeyError

    for _ in range(2):
        with pytest.raises(KeyError):
            fails()
    assert same(capture_rng_state(), before)
    with pytest.raises(ValueError, match="got -3"), isolated_rng(seed=-3):
        pass


def test_derived_seeds_are_distinct_and_in_range():
    seeds = {derive_seed(seed, step, rank) for seed in range(5) for step in range(40) for rank in range(10)}
    assert len(seeds) == 5 * 40 * 10
    assert all(0 <= seed < 2**32 for seed in seeds)


def _switches():
    cudnn = torch.backends.cudnn
    algorithms = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    return cudnn.enabled, cudnn.deterministic, cudnn.benchmark, *algorithms, os.environ.get("CUBLAS_WORKSPACE_CONFIG")


def test_isolated_seeding_restores_random_state_switches_and_environment(monkeypatch):
    monkeypatch.setenv("PL_GLOBAL_SEED", "8")
    before, switches = capture_rng_state(), _switches()
    with isolated_seeding():
        seed_everything(1, verbose=False, deterministic=True)
        assert torch.are_deterministic_algorithms_enabled()
    assert same(capture_rng_state(), before)
    assert _switches() == switches
    assert os.environ["PL_GLOBAL_SEED"] == "8"
    assert not {"PL_SEED_WORKERS", "CUBLAS_WORKSPACE_CONFIG"} & os.environ.keys()


@pytest.mark.parametrize("deterministic", [True, "warn", False])
@pytest.mark.parametrize("fails", [False, True])
def test_isolated_seeding_restores_what_was_switched_the_other_way(monkeypatch, deterministic, fails):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    seed_everything(1, verbose=False, deterministic=deterministic)
    torch.backends.cudnn.enabled, torch.backends.cudnn.benchmark = False, True
    switches = _switches()
    with suppress(KeyError), isolated_seeding():
        seed_everything(2, verbose=False, deterministic=not deterministic, benchmark=False)
        torch.backends.cudnn.enabled = True
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":0:0"
        if fails:
            raise KeyError
    assert _switches() == switches
    assert os.environ["PL_GLOBAL_SEED"] == "1"


def test_benchmark_alone_switches_cudnn_on():
    torch.backends.cudnn.enabled = False
    seed_everything(1, verbose=False, benchmark=True)
    assert torch.backends.cudnn.enabled
    torch.backends.cudnn.enabled = False
    seed_everything(1, verbose=False, deterministic=False, benchmark=False)
    assert not torch.backends.cudnn.enabled


@pytest.mark.parametrize("made_inside", [False, True])
def test_generators_of_a_context_that_a_block_makes_start_from_their_seed(monkeypatch, made_inside):
    class Generator:
        seeded = ()

        def initial_seed(self):
            return 99

        def manual_seed(self, seed):
            self.seeded += (seed,)

    contexts, generators = [], (Generator(), Generator())
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(contexts))
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    with isolated_rng(seed=1):
        contexts.extend(["a context"] * made_inside)
    assert [generator.seeded for generator in generators] == [(99,) * made_inside] * 2


@pytest.mark.parametrize("made_inside", [False, True])
def test_isolated_seeding_leaves_cuda_the_seed_of_the_program(monkeypatch, made_inside):
    # this machine may lack CUDA: mocks say whether there is a context, and record its seeds
    queued, contexts = [], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: bool(contexts))
    monkeypatch.setattr(torch.cuda, "manual_seed_all", queued.append)
    monkeypatch.setattr(torch.cuda, "default_generators", ())
    seed_everything(99, verbose=False)
    with isolated_seeding():
        seed_everything(1, verbose=False)
        contexts.extend(["a context"] * made_inside)
    assert queued[-1] == 99


def test_another_numpy_generator_is_named(monkeypatch):
    monkeypatch.setattr(np.random, "get_state", lambda legacy: {"bit_generator": "PCG64"})
    with pytest.raises(ValueError, match="numpy's global generator is PCG64"):
        capture_rng_state()


@pytest.mark.gpu
def test_cuda_generators():
    seed_everything(3, verbose=False)
    state = capture_rng_state()
    first = torch.rand(3, device="cuda")
    with isolated_rng(seed=3):
        torch.rand(5, device="cuda")
    second = torch.rand(3, device="cuda")
    restore_rng_state(state)
    assert torch.equal(torch.rand(3, device="cuda"), first)
    assert torch.equal(torch.rand(3, device="cuda"), second)
