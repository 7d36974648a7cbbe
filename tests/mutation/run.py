"""Put small faults into the package, one at a time, and see which of them the tests do not find.

`python -m tests.mutation.run` is what `make mutants` runs. A process for each room collects its tests. A fork of it
runs them once, and notes how long each takes and which functions it calls. Then a fork for each fault gives the
function that has it the changed code, and runs the tests that call this function, quick ones first, until one fails.
That one must pass in another fork without the fault, after the same tests; else it is left out from then on.
A fault that no test finds has survived. Tests that start other programs do not see it, and some that take long are left
out: `--kept FILE` keeps what was found, and a second run with `--slow --seconds 120` tries the survivors with them.
`results.md` lists the survivors of each seed with what was said of them: that is written by hand, and kept. Tests are
written for survivors; what share is found, only a seed tells that nobody has seen.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import CodeType, FunctionType

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported

import lightning  # noqa: F401
import pytest
import torchmetrics  # noqa: F401

from tests.mutation.results import write
from tests.mutation.sampling import FILES, Mutant, few, sample

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).with_name("results.md")
NOT_RUN = (
    *(f"tests/auto_resume/test_{name}.py" for name in ("exit_codes", "kills", "requeues", "scenarios", "torchrun")),
    "tests/flops/test_torchvision.py",
    "tests/flops/test_transformers.py",
    "tests/flops/test_thop_rules.py",
)
SLOW = (
    "FSDP2 or compile or real_fp16 or test_outputs_agree or test_the_order_of_a_file_does_not_matter"
    " or test_other_words_never_mislead"
)

# Whose tests meet what lies below the rooms
USERS = {
    "_shared": ("tests/flops", "tests/model_report", "tests/seeding", "tests/metrics"),
    "_lightning_compat": (
        *("tests/gradient_clipping", "tests/microbatching", "tests/spike_guard", "tests/seeding", "tests/metrics"),
        *("tests/auto_resume/test_callback.py", "tests/auto_resume/test_loaders.py"),
    ),
}


class Watch:
    """Notes how long each test takes, whether it passes, and which functions of the cores it calls."""

    def __init__(self) -> None:
        self.now = ""
        self.seconds: dict[str, float] = defaultdict(float)
        self.called: dict[str, set[tuple[str, int]]] = defaultdict(set)
        self.bad: set[str] = set()
        self.forks: set[str] = set()
        self._names = {str(ROOT / file): file for file in FILES}
        os.register_at_fork(before=lambda: self.forks.add(self.now), after_in_child=lambda: sys.settrace(None))

    def trace(self, frame, event, argument):
        """Note a call; Python asks this before each."""
        file = self._names.get(frame.f_code.co_filename)
        if file is not None:
            self.called[self.now].add((file, frame.f_code.co_firstlineno))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item):
        """Trace one test, its fixtures among it."""
        self.now = item.nodeid
        sys.settrace(self.trace)
        threading.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            threading.settrace(None)

    def pytest_runtest_logreport(self, report):
        """Note the time and a failure."""
        self.seconds[report.nodeid] += report.duration
        if report.outcome != "passed":
            self.bad.add(report.nodeid)


def in_fork(work: Callable[[], int], cpu: float, wall: float) -> int:
    """Run `work` in a fork and return its status; 98 where it took too long or died."""
    child = os.fork()
    if child == 0:
        status = 97
        try:
            os.setsid()
            resource.setrlimit(resource.RLIMIT_CPU, (int(cpu), int(cpu) + 5))
            resource.setrlimit(resource.RLIMIT_DATA, (12 << 30, 12 << 30))
            status = work()
        finally:
            os._exit(status)
    found, status, end = 0, 0, time.monotonic() + wall
    while not found and time.monotonic() < end:
        time.sleep(0.01)
        found, status = os.waitpid(child, os.WNOHANG)
    with suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what the tests left behind as well
    if not found:
        os.waitpid(child, 0)
        return 98
    return os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else 98


def functions_of(file: str) -> list[FunctionType]:
    """The functions of a file that are alive."""
    path = str(ROOT / file)
    return [it for it in gc.get_objects() if type(it) is FunctionType and it.__code__.co_filename == path]


def code_of(mutant: Mutant) -> CodeType:
    """The code of the function that has the fault."""
    waiting = [compile(mutant.code, str(ROOT / mutant.file), "exec")]
    for code in waiting:
        if (code.co_firstlineno, code.co_name) == (mutant.first_line, mutant.name):
            return code
        waiting += [part for part in code.co_consts if isinstance(part, CodeType)]
    raise ValueError(f"{mutant.file} has no function {mutant.name} in line {mutant.first_line}")


class Room:
    """A pytest plugin that runs a room's tests for each fault instead of once."""

    def __init__(self, mutants: list[Mutant], seconds: float, tell: Callable[[str], None]) -> None:
        self.mutants, self.seconds, self.tell = mutants, seconds, tell
        self.found: dict[str, bool] = {}
        self.has_failed = False

    def pytest_collection_modifyitems(self, items):
        """Leave out of the contract what is promised of other rooms' callbacks."""
        own = f"lightning_tricks.{self.mutants[0].room}."
        items[:] = [
            item
            for item in items
            if "tests/contract" not in item.nodeid
            or (
                item.originalname == "test_promise" and item.callspec.params["case"].callback.__module__.startswith(own)
            )
        ]

    def pytest_runtest_logreport(self, report):
        """Note a failure."""
        self.has_failed = self.has_failed or report.failed

    def pytest_runtestloop(self, session):
        """Take the place of pytest's loop."""
        self.items = {item.nodeid: item for item in session.items}
        self.watched = self._watch(session.config)
        for mutant in self.mutants:
            import_module(mutant.file.removesuffix(".py").replace("/", "."))  # what a test would import only later
        alive = {mutant.file: functions_of(mutant.file) for mutant in self.mutants}
        gc.freeze()
        for number, mutant in enumerate(self.mutants, 1):
            start, names = time.monotonic(), self._tests_for(mutant)
            code = code_of(mutant)
            functions = [f for f in alive[mutant.file] if f.__code__.co_firstlineno == mutant.first_line]
            if not functions or any(f.__code__.co_freevars != code.co_freevars for f in functions):
                continue  # nothing imports it, or it cannot be exchanged
            self.found[mutant.key] = self._is_found(functions, code, names)
            word, took = "found" if self.found[mutant.key] else "SURVIVED", time.monotonic() - start
            self.tell(f"{number}/{len(self.mutants)} {word}, {len(names)} tests, {took:.1f} s: {mutant.key}")
        return True

    def _run(self, names: list[str]) -> str | None:
        """Run tests until one fails, and return its name."""
        items = [self.items[name] for name in names]
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.has_failed:
                return item.nodeid
        return None

    def _watch(self, config: pytest.Config) -> dict[str, dict]:
        with tempfile.TemporaryDirectory() as folder:
            notes = Path(folder) / "notes.json"

            def work() -> int:
                watch = Watch()
                config.pluginmanager.register(watch)
                for name in self.items:
                    self._run([name])
                    self.has_failed = False
                good = {name: seconds for name, seconds in watch.seconds.items() if name not in watch.bad}
                called = {name: sorted(places) for name, places in watch.called.items()}
                notes.write_text(json.dumps({"seconds": good, "called": called, "forks": sorted(watch.forks)}))
                return 0

            status = in_fork(work, 1800, 5400)
            if status:
                raise RuntimeError(f"the tests ended with {status} before any fault was made")
            return json.loads(notes.read_text())

    def _tests_for(self, mutant: Mutant) -> list[str]:
        """The tests that call the changed function, quick ones first, and those that may in a fork; all without any."""
        times, calls = self.watched["seconds"], self.watched["called"]
        place, seconds, chosen = [mutant.file, mutant.first_line], self.seconds, []
        direct = {name for name in times if place in calls.get(name, ())}
        names = direct | (times.keys() & self.watched["forks"]) or times.keys()
        for name in sorted(names, key=lambda name: (name not in direct, times[name])):
            seconds -= times[name]
            if seconds < 0 and chosen:
                break
            chosen.append(name)
        return chosen

    def _is_found(self, functions: list[FunctionType], code: CodeType, names: list[str]) -> bool:
        """Run tests with the fault in place."""

        def put_in() -> None:
            for function in functions:
                function.__code__ = code

        while (failed := self._first_that_fails(names, put_in)) in names:
            before = names[: names.index(failed) + 1]
            if self._first_that_fails(before) is None:
                return True
            self.tell(f"left out, as it fails without a fault: {failed}")
            del self.watched["seconds"][failed]
            names = [name for name in names if name != failed]
        return failed is not None

    def _first_that_fails(self, names: list[str], change: Callable[[], None] = lambda: None) -> str | None:
        """Run tests in a fork after a change; return the first one that fails, or "" if it died or took too long."""
        with tempfile.TemporaryDirectory() as folder:
            note = Path(folder) / "failed"

            def work() -> int:
                change()
                note.write_text(self._run(names) or "")
                return 0

            expected = sum(self.watched["seconds"][name] for name in names)
            status = in_fork(work, 10 + 5 * expected, 60 + 10 * expected)
            return (note.read_text() or None) if status == 0 else ""


def run_room(mutants: list[Mutant], seconds: float, slow: bool) -> dict[str, bool]:
    """Test the faults of one room, in this process, which is of no use for anything else then."""
    room, folder, output = mutants[0].room, Path(tempfile.mkdtemp()), os.dup(1)
    with (folder / "log.txt").open("wb") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    plugin = Room(mutants, seconds, lambda words: os.write(output, f"{room} {words}\n".encode()) and None)
    options = ["-q", "-p", "no:cacheprovider", "--hypothesis-seed=0", f"--basetemp={folder / 'temporary'}"]
    if not slow:
        options += ["-k", f"not ({SLOW})", *(f"--ignore={path}" for path in NOT_RUN)]
    options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that Lightning has imported already
    folders = [f"tests/{room.strip('_')}", f"lightning_tricks/{room}", *USERS.get(room, ())]
    folders += ["tests/contract/test_contract.py"] if (ROOT / f"tests/{room}/contract.py").exists() else []
    pytest.main([*options, f"--rootdir={ROOT}", *folders], plugins=[plugin])
    if not plugin.found:
        os.write(output, (folder / "log.txt").read_bytes()[-3000:])
    shutil.rmtree(folder, ignore_errors=True)
    return plugin.found


def main() -> None:
    """Draw faults, test them, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=480, help="faults in the cores, and in the shells (%(default)s)")
    parser.add_argument("--most", type=int, default=1000, help="of them in each part of each room")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=20, help="of tests for each fault (%(default)s)")
    parser.add_argument("--room", action="append", help="this room alone")
    parser.add_argument(
        "--kept", type=Path, help="a file that keeps what was found: a later run tests the survivors alone"
    )
    parser.add_argument("--slow", action="store_true", help="with the tests that take long")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    drawn = sample(ROOT, arguments.count, arguments.seed)
    mutants = few(drawn, arguments.most, arguments.seed)
    kept = arguments.kept or Path(tempfile.mkstemp()[1])
    done: dict[str, bool] = json.loads(kept.read_text() or "{}") if kept.exists() else {}
    for room in arguments.room or dict.fromkeys(mutant.room for mutant in mutants):
        waiting = [mutant for mutant in mutants if mutant.room == room and not done.get(mutant.key)]
        if waiting and os.fork() == 0:
            kept.write_text(json.dumps({**done, **run_room(waiting, arguments.seconds, arguments.slow)}))
            os._exit(0)
        if waiting:
            os.wait()
            done = json.loads(kept.read_text() or "{}")
            write(RESULTS, arguments.seed, drawn, done)


if __name__ == "__main__":
    main()
