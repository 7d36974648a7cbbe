"""One thread for everything: ranks are forked, and two cores carry them all."""

import gc
import inspect
import logging
import multiprocessing
import os
import shutil
import signal
import zlib
from collections import Counter, defaultdict
from contextlib import nullcontext

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, settings
from packaging.version import Version
from torch.utils.data import BatchSampler, DataLoader

_TESTS = Path(__file__).parent
pytest.register_assert_rewrite(
    "tests.contract.checks", *(f"tests.{path.parent.name}.contract" for path in _TESTS.glob("*/contract.py"))
)

from lightning_tricks.seeding import isolated_seeding  # noqa: E402
from tests.contract.lab import Lab  # noqa: E402
from tests.emulated_cuda.device import EmulatedCuda  # noqa: E402

torch.set_num_threads(1)

# If the first backward pass of a process is without data, as torch.compile may run it, forked ranks cannot run any
torch.zeros((), requires_grad=True).backward()

# How fast examples are made depends on what else the machine does
settings.register_profile("thorough", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("tests", settings.get_profile("thorough"), max_examples=40)

if Version(torch.__version__) < Version("2.8"):
    # Its cache of compiled code asks backends that are gone whether they equal new ones, and crashes at times
    _BACKENDS = []
    _make_backend = torch._TorchCompileWrapper.__init__

    def _make_lasting_backend(self, *args, **kwargs):
        _BACKENDS.append(self)
        _make_backend(self, *args, **kwargs)

    torch._TorchCompileWrapper.__init__ = _make_lasting_backend

_IN_MEMORY = Path("/dev/shm")
if _IN_MEMORY.is_dir() and shutil.disk_usage(_IN_MEMORY).free > 4 << 30:
    # Where tests write: what they flush to a disk takes as long as all they compute
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(_IN_MEMORY))


@pytest.fixture(autouse=True)
def _end_in_time():
    """Let a test whose ranks wait for ever fail after a quarter of an hour, and the others run."""

    def end(*args):
        for child in multiprocessing.active_children():
            child.kill()
        raise TimeoutError("This test takes more than 15 minutes: above is where it was after 5.")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(900)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(autouse=True, scope="module")
def _collect_garbage_once():
    """Let no garbage collection look at modules again: it takes 0.3 s, and in each forked process once more."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _leave_no_trace(monkeypatch, tmp_path):
    """Undo what a test does to the process: seeds, switches, environment, loggers, working directory, Ctrl+C.

    A shell starts what it runs in the background with SIGINT ignored; Python then installs no handler, and what a test
    starts inherits that. A test of Ctrl+C means a run in a terminal: each begins with Python's handler. Lightning too
    lets a process ignore SIGINT, after a fit that KeyboardInterrupt has ended.
    """
    monkeypatch.chdir(tmp_path)
    interrupt = signal.signal(signal.SIGINT, signal.default_int_handler)
    levels = {logger: logger.level for logger in map(logging.getLogger, ("lightning.pytorch", "lightning.fabric"))}
    with patch.dict(os.environ), isolated_seeding():
        yield
    signal.signal(signal.SIGINT, interrupt)
    for logger, level in levels.items():
        logger.setLevel(level)
    for owner in (DataLoader, BatchSampler):
        _unwrap_methods(owner)


def _unwrap_methods(owner):
    """Lightning wraps methods of a class and those that inherit while it asks for loaders; if that raises, for ever."""
    for name in ("__init__", "__setattr__", "__delattr__"):
        if f"__old{name}" in vars(owner):  # itself a wrapper, where loaders were asked for once more
            setattr(owner, name, inspect.unwrap(vars(owner)[name]))
            delattr(owner, f"__old{name}")
    for child in owner.__subclasses__():
        _unwrap_methods(child)


@pytest.fixture(autouse=True)
def _emulated_gpu(request, _leave_no_trace):
    """Let a test of a GPU run on an emulated one where there is none; with `--emulated`, all tests beside one."""
    needs_one = request.node.get_closest_marker("gpu") is not None and not torch.cuda.is_available()
    beside_one = request.config.getoption("emulated")
    with EmulatedCuda() if needs_one else EmulatedCuda(1) if beside_one else nullcontext():
        yield


def pytest_sessionfinish():
    """Let all be torn down at the end."""
    gc.unfreeze()


def pytest_addoption(parser):
    """Add what `make test-oldest` and `make thorough` give."""
    parser.addoption("--oldest", action="store_true", help="of files with tests that are marked `oldest`, run these")
    parser.addoption("--emulated", action="store_true", help="run the tests as on a machine with a GPU")
    parser.addoption("--thorough", action="store_true", help="run what is marked `thorough` too, and notebooks in full")


def pytest_configure(config):
    """Before tests are imported, choose how many examples of each property they make."""
    settings.load_profile("thorough" if config.getoption("thorough") else "tests")


def pytest_collection_modifyitems(config, items):
    """Leave out what is for `make thorough` or not for the oldest versions; skip what only a real GPU can do."""
    left_out = set() if config.getoption("thorough") else _for_thorough_runs(items)
    if config.getoption("oldest"):
        files = {item.path for item in items if item.get_closest_marker("oldest")}
        left_out |= {item for item in items if item.get_closest_marker("newest")}
        left_out |= {item for item in items if item.path in files and not item.get_closest_marker("oldest")}
        if not config.getoption("thorough"):
            left_out |= _each_second(item for item in items if item not in left_out)
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item in left_out])
        items[:] = [item for item in items if item not in left_out]
    if torch.cuda.is_available():
        return
    for item in items:
        if (gpu := item.get_closest_marker("gpu")) is not None and gpu.args:
            item.add_marker(pytest.mark.skip(reason=f"needs a CUDA device, this machine has none: {gpu.args[0]}"))


def _for_thorough_runs(items):
    """What is marked `thorough`, and of what is marked `sampled(n, first)` all but each n-th case from the first."""
    found, seen = set(), Counter()
    for item in items:
        if item.get_closest_marker("thorough"):
            found.add(item)
        if (sampled := item.get_closest_marker("sampled")) is not None:
            step, *first = sampled.args
            test = item.path, item.originalname
            if (seen[test] - sum(first)) % step:
                found.add(item)
            seen[test] += 1
    return found


def _each_second(items):
    """Half of the cases of each test that has at least four; which half differs from test to test."""
    cases = defaultdict(list)
    for item in items:
        cases[item.path, item.originalname].append(item)
    return {
        item for (_, name), own in cases.items() if len(own) > 3 for item in own[zlib.crc32(name.encode()) % 2 :: 2]
    }


@pytest.fixture
def lightning_log():
    """What Lightning's logger says, line by line: (logger, message)."""

    class Keeps(logging.Handler):
        def emit(self, record):
            lines.append((record.name, record.getMessage()))

    lines, handler, logger = [], Keeps(), logging.getLogger("lightning.pytorch")
    logger.addHandler(handler)
    yield lines
    logger.removeHandler(handler)


@pytest.fixture
def lab(tmp_path):
    """A place to fit small nets with callbacks and see what they did."""
    return Lab(tmp_path)
