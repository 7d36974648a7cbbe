"""An assertion for the tests of users: a run that is stopped and resumed ends as if it had never been stopped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessExitedException, start_processes

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.fit import dump_checkpoint
from lightning_tricks._lightning_compat.flavor import Callback, Timer, Trainer
from lightning_tricks._lightning_compat.trainer import callbacks_of, callbacks_of_type
from lightning_tricks._shared.checks import check_count
from lightning_tricks._shared.patterns import as_patterns
from lightning_tricks._shared.rng import capture_rng_state, isolated_rng, seed_global_rngs
from lightning_tricks._shared.tensors import replace_tensors
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.distributed import allow_forked_ranks
from lightning_tricks.auto_resume import AutoResume
from lightning_tricks.auto_resume.core.attributes.encoding import differing_paths
from lightning_tricks.auto_resume.fit_state import NOT_COMPARED_ENTRIES
from lightning_tricks.run_fingerprint import Comparison, RunFingerprint, compare, fingerprint, read_ranks

_KILL = "SIGKILL"  # which Windows lacks
_BEFORE_THE_STOP = """This is before the first stop: two runs that are never stopped differ as well. Seed the \
function before it creates the module and the data, as by seed_everything(42, workers=True), and let nothing depend on \
the clock."""
_AFTER_THE_STOP = """Usual causes: a loader or generator that is seeded by the clock or not at all; a dataset, a \
metric or a callback that remembers what cannot be saved; a value that depends on the clock or the process; a file, an \
environment variable or an attribute of the Trainer that the run changes and a new start finds otherwise. Keep what is \
remembered in plain attributes, buffers, or state_dict and load_state_dict; ignore=[...] leaves out metrics."""


def assert_resumable(make: Callable[[Path], Any], *, stops: int = 3, ignore: Sequence[str] = ()) -> Comparison:
    """Train once as a whole, once with stops and resumes, and compare the two runs, bit for bit.

    The stops are spread over the run. The first one is a SIGTERM in training, at which `AutoResume` saves and exits;
    the second one a SIGKILL, during validation if there is one, after which the steps since the last save are repeated;
    and so on in turn. Each start is a process of its own, forked from the test, with other random states until `make`
    sets them.

    Compared are, on each rank: what `RunFingerprint` records of each batch by layer; before each batch the learning
    rates and `trainer.callback_metrics`; and at the end these, the checkpoint that the Trainer would write, and the
    random states.

    It needs Linux or macOS, and a process that has not used a GPU; on a machine with a GPU, one that has not run a
    backward pass either. It computes with one thread. Multiple ranks need `strategy="ddp_fork"`.

    Args:
        make: Takes a folder for all that the run writes, which is empty at the first start, and returns (trainer,
            module), (trainer, module, datamodule) or (trainer, module, train_loader, val_loader). It may be a lambda.
            An `AutoResume` of the project must have its `dirpath` in the folder; one is added if there is none.
        stops: How many times the run is stopped; at least 1.
        ignore: Patterns over names of metrics that are not compared, such as "time/*": a glob, or `re:` and a regular
            expression.

    Returns:
        The comparison of the training batches.

    Raises:
        AssertionError: If the runs differ, or one that was stopped fails. The message says what differs first, what
            `AutoResume` could not restore, and what to look for.
        torch.multiprocessing.ProcessRaisedException: What the whole run raises, with its traceback.

    Examples:
        >>> from lightning.pytorch import Trainer, seed_everything
        >>> from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel
        >>> def make(folder):
        ...     seed_everything(1, workers=True, verbose=False)
        ...     trainer = Trainer(max_epochs=1, limit_train_batches=6, accelerator="cpu", default_root_dir=folder)
        ...     return trainer, BoringModel(), BoringDataModule()
        >>> print(assert_resumable(make))
        No difference: 6 batches are equal, bit for bit.
    """
    check_count("stops", stops)
    as_patterns("ignore", ignore)
    if sys.platform == "win32" or torch.cuda.is_initialized():
        raise RuntimeError("assert_resumable forks a process that has used no GPU, on Linux or macOS: run it alone.")
    with tempfile.TemporaryDirectory(prefix="assert_resumable-", ignore_cleanup_errors=True) as folder:
        whole, resumed, run = (Path(folder, name) for name in ("whole", "resumed", "run"))
        _run(make, run, _Recorder(whole, ignore))
        shutil.rmtree(run)  # the other run has the same paths
        for number, (name, places) in enumerate([*_plan(whole, stops), ("", [])], 1):
            try:
                _run(make, run, _Recorder(resumed, ignore, name, places))
            except Exception as error:
                if not isinstance(error, ProcessExitedException) or len(_notes(resumed, "stops")) < number:
                    raise AssertionError(f"The run cannot be resumed: it {_history(resumed)}\n{error}") from error
            if "end" in _rows(resumed, 0):
                break
        return _compare(whole, resumed)


def _plan(whole: Path, stops: int) -> list[tuple[str, Sequence[str]]]:
    """Return signals, each with the place at which it is sent and all later ones; one for a kill is in validation."""
    places, plan, of_validation = [*_rows(whole, 0)][:-1], {}, {*_notes(whole, "validation")}
    training = [index for index, place in enumerate(places) if place not in of_validation]
    validation = [index for index, place in enumerate(places) if place in of_validation] or training
    for number in range(1, stops + 1 if training else 1):
        is_kill = number % 2 == 0
        those = validation if is_kill else training
        plan[those[(number * len(those) - is_kill) // (stops + 1)]] = _KILL if is_kill else "SIGTERM"
    return [(name, places[index:]) for index, name in sorted(plan.items())]


def _run(make: Callable[[Path], Any], run: Path, recorder: _Recorder) -> None:
    """Train in a process of its own, which ends with its ranks and workers where this one is interrupted."""
    run.mkdir(exist_ok=True)
    recorder.into.mkdir(exist_ok=True)
    context: Any = start_processes(_train, (make, run, recorder), nprocs=1, join=False, start_method="fork")
    try:
        while not context.join():
            pass
    finally:
        with suppress(ProcessLookupError):
            os.kill(-context.pids()[0], getattr(signal, _KILL))
        context.processes[0].join()
        Path(context.error_files[0]).unlink(missing_ok=True)


def _train(_: int, make: Callable[[Path], Any], run: Path, recorder: _Recorder) -> None:
    """Train as a script does that is started anew, and record it."""
    if sys.platform != "win32":
        os.setpgid(0, 0)
    warnings.simplefilter("default")
    warnings.showwarning = lambda message, *_, **__: _note(recorder.into, "warned", str(message))
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # of a test that ran before
        os.environ.pop(name, None)
    seed_global_rngs(int.from_bytes(os.urandom(4), "big"))
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["TMPDIR"] = tempfile.tempdir = str(recorder.into.parent)
    allow_forked_ranks()
    torch.set_num_threads(1)  # a fork hangs that waits for its parent's threads of OpenMP
    made = make(run)
    if not (isinstance(made, tuple) and len(made) > 1 and isinstance(made[0], Trainer)):
        raise TypeError(f"The function must return (trainer, module, ...), got {made!r} ({type(made).__name__}).")
    trainer, module, *data = made
    launcher = trainer.strategy.launcher
    if launcher is not None and not launcher.is_interactive_compatible:
        raise ValueError(f'Give the Trainer strategy="ddp_fork": {trainer.strategy} starts ranks by this command.')
    callbacks, own = callbacks_of(trainer), module.configure_callbacks()
    found = [*callbacks, *([own] if isinstance(own, Callback) else own)]
    resumes = [callback for callback in found if isinstance(callback, AutoResume)]
    for callback in resumes:
        if not Path(callback.dirpath).resolve().is_relative_to(run.resolve()):
            raise ValueError(f"AutoResume must save to the folder that the function takes, got {callback.dirpath}.")
    added = [recorder] if resumes else [AutoResume(run / "auto_resume"), recorder]
    kept = [callback for callback in callbacks if not isinstance(callback, RunFingerprint)]
    callbacks[:] = [RunFingerprint(recorder.into / "run.jsonl", detail="layer"), *kept, *added]
    trainer.fit(module, *data)


class _Recorder(TrickCallback):
    """Writes metrics and the state at the end to a folder, and sends a signal at the first place that is reached."""

    def __init__(self, into: Path, ignore: Sequence[str], name: str = "", places: Sequence[str] = ()) -> None:
        self.into, self.ignore, self.name, self.places = into, as_patterns("ignore", ignore), name, places
        super().__init__()

    def resumed(self, trainer: Any, not_restored: Sequence[str]) -> None:
        """Note a resume."""
        if trainer.is_global_zero:
            _note(self.into, "resumes", trainer.global_step)
            _note(self.into, "history", f"resumed at step {trainer.global_step}")

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        """Look at the moment before a batch."""
        self._look(trainer, "")

    def on_validation_batch_start(
        self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Look at the moment before a batch."""
        if not trainer.sanity_checking:
            place = self._look(trainer, f", validation batch {batch_idx} of loader {dataloader_idx}")
            _note(self.into, "validation", place)

    def _look(self, trainer: Any, more: str) -> str:
        place = f"epoch {trainer.current_epoch}, batch {trainer.fit_loop.batch_idx}{more}"
        rates = [group.get("lr") for optimizer in trainer.optimizers for group in optimizer.param_groups]
        self._note_row(trainer, place, {"learning_rates": rates})
        if place in self.places and trainer.is_global_zero:
            _note(self.into, "stops", place)
            _note(self.into, "history", f"was stopped by {self.name} in {place}")
            self.places = ()
            os.kill(os.getpid() if self.name == "SIGTERM" else 0, getattr(signal, self.name))  # 0: the process group
        return place

    def _note_row(self, trainer: Any, place: str, values: dict[str, Any]) -> None:
        metrics = trainer.callback_metrics.items()
        kept = {name: value for name, value in metrics if not any(each.matches(name) for each in self.ignore)}
        row = replace_tensors({**values, "callback_metrics": kept}, lambda _, tensor: int(fingerprint(tensor)))
        _note(self.into, f"rows.rank{trainer.global_rank}", [place, row])

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Write what this rank ends with."""
        random_states = capture_rng_state()
        if trainer.world_size > 1:
            del random_states["python"]  # what starts ranks draws from it, now more, now less
        with isolated_rng():  # hooks may draw
            checkpoint = dump_checkpoint(trainer)
        for timer in callbacks_of_type(trainer, Timer):
            checkpoint["callbacks"].pop(timer.state_key, None)
        state = {name: value for name, value in checkpoint.items() if name not in NOT_COMPARED_ENTRIES}
        self._note_row(trainer, "end", {**state, "random_states": random_states})
        super().on_fit_end(trainer, pl_module)


def _note(into: Path, kind: str, value: Any) -> None:
    with (into / f"{kind}.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(value, default=lambda other: type(other).__name__) + "\n")


def _notes(into: Path, kind: str) -> list[Any]:
    file = into / f"{kind}.jsonl"
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []


def _rows(into: Path, rank: int) -> dict[str, Any]:
    """Return the metrics before each batch; where a batch was repeated, the last ones."""
    return dict(_notes(into, f"rows.rank{rank}"))


def _history(into: Path) -> str:
    return "\n".join([(", ".join(_notes(into, "history")) or "was not stopped") + ".", *_warnings(into)])


def _warnings(into: Path) -> list[str]:
    return [said for said in dict.fromkeys(_notes(into, "warned")) if said.startswith("AutoResume: ")]


def _compare(whole: Path, resumed: Path) -> Comparison:
    """Compare what two runs recorded, and raise an error for the first difference."""
    if not _notes(resumed, "resumes"):
        raise AssertionError(f"No resume was tested, as the run {_history(resumed)} Let it train more batches.")
    comparison = compare(read_ranks(whole / "run.jsonl"), read_ranks(resumed / "run.jsonl"))
    ranks, first = range(len([*whole.glob("rows.rank*")])), comparison.divergence
    paths = [path for rank in ranks for path in differing_paths(_rows(whole, rank), _rows(resumed, rank))]
    if first is None and not comparison.longer_run and not paths:
        for said in _warnings(resumed):
            warnings.warn(said, stacklevel=3)
        return comparison
    found = [path.partition(".")[0] for path in paths[:1]]
    found += [f"epoch {first.epoch}, batch {max(first.batch_idx, 0)}"] if first else []
    before_stop = [*takewhile(_notes(resumed, "stops")[0].__ne__, _rows(whole, 0)), _notes(resumed, "stops")[0]]
    named = {name: place for place, _, name in (path.partition(".") for path in reversed(paths))}
    values = list_names([f"{name} ({place})" for name, place in reversed(named.items())])
    raise AssertionError(
        f"The run that was stopped and resumed, B, differs from the whole one, A.\nTraining: {comparison}\n"
        f"Logged values, and the state at the end: {values} differ.\n"
        f"B {_history(resumed)}\n{_BEFORE_THE_STOP if {*found} & {*before_stop} else _AFTER_THE_STOP}"
    )
