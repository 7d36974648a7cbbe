"""Probes of the moments of fetching and of the step at an epoch's end; run with the oldest and the newest Lightning."""

from contextlib import ExitStack

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader, IterableDataset

from lightning_tricks._lightning_compat.logged_values import epoch_end_step, observe_log_calls
from lightning_tricks._lightning_compat.observers import observe_fetches, observe_iterators
from tests.small import BATCHES, QUIET, EvaluatedNet, Hooks, Net, cases, digits, fit, loader

VAL, TEST = 3, 2
_STEPS = {
    "on_train_batch_start": "train",
    "on_validation_batch_start": "val",
    "on_test_batch_start": "test",
    "on_predict_batch_start": "predict",
}


def _observes(events, observe=observe_fetches):
    """Writes down fetches and steps in their order."""

    def setup(trainer, module, stage):
        said = (lambda fetched, what=what: events.append((what, fetched)) for what in ("start", "end"))
        installed.enter_context(observe(trainer, *said, "Probe"))

    installed = ExitStack()
    steps = {} if observe is observe_iterators else _STEPS
    hooks = {hook: lambda *_, stage=stage: events.append(("step", stage)) for hook, stage in steps.items()}
    ends = dict.fromkeys(("teardown", "on_exception"), lambda *_, **__: installed.close())
    return Hooks(setup=setup, **hooks, **ends)


class _Unsized(IterableDataset):
    def __init__(self, error=None):
        self.error = error

    def __iter__(self):
        yield from (digits()[index] for index in range(8))
        if self.error:
            raise self.error


def _expected(stage, count):
    return [("start", stage), ("end", stage), ("step", stage)] * count


def _run(function, *data):
    events = []
    observes = _observes(events)
    trainer = Trainer(max_epochs=1, limit_val_batches=VAL, limit_test_batches=TEST, callbacks=[observes], **QUIET)
    getattr(trainer, function)(Net() if function == "fit" and len(data) == 1 else EvaluatedNet(), *data)
    return events, trainer


def test_fetches_of_a_fit_with_validation():
    events, trainer = _run("fit", loader(), loader())
    assert events == _expected("train", BATCHES) + _expected("val", VAL)
    loops = (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop, trainer.predict_loop)
    assert all("_on_before_fetch" not in vars(loop) for loop in loops)


@cases("function, stage, count", ("validate", "val", VAL), ("test", "test", TEST), ("predict", "predict", BATCHES))
def test_fetches_of_a_stage_alone(function, stage, count):
    assert _run(function, loader())[0] == _expected(stage, count)


def test_the_end_of_unsized_data_is_a_fetch_too():
    """The first batch is fetched where no profiler looks yet, and the fetch that finds nothing ends as well."""
    events = _run("fit", DataLoader(_Unsized(), batch_size=4))[0]
    assert events == [("start", "train"), ("end", "train"), ("step", "train")] * 2


def test_a_fetch_that_fails_ends():
    events = []
    with pytest.raises(ZeroDivisionError):
        fit(Net(), _observes(events), data=DataLoader(_Unsized(ZeroDivisionError())))
    assert events.count(("start", "train")) == events.count(("end", "train")) > 0


def test_iterators_are_made_between_the_calls():
    events = []

    class Data(IterableDataset):
        def __init__(self, stage):
            self.stage = stage

        def __iter__(self):
            events.append(("made", self.stage))
            return iter([digits()[index] for index in range(8)])

    data = [DataLoader(Data(stage), batch_size=4) for stage in ("train", "val")]
    trainer = Trainer(max_epochs=2, callbacks=[_observes(events, observe_iterators)], **QUIET)
    trainer.fit(EvaluatedNet(), *data)
    train, val = ([(what, stage) for what in ("start", "made", "end")] for stage in ("train", "val"))
    assert events == [train[1], train[0], train[2], *val, *train, *val], "the first is made before the epoch starts"
    loops = (trainer.fit_loop.epoch_loop, trainer.fit_loop.epoch_loop.val_loop)
    assert not any({"on_run_start", "reset"} & vars(loop).keys() for loop in loops)


def test_epoch_end_step_is_that_of_the_trainers_own_values(tmp_path):
    def probe(trainer, module):
        steps.append(epoch_end_step(trainer))
        module.log("probe", 1.0)

    steps, options = [], {"max_epochs": 2, "accumulate_grad_batches": 3, "log_every_n_steps": 1}
    fit(Net(), Hooks(on_train_epoch_end=probe), logger=CSVLogger(tmp_path, version=0), **options)
    lines = (tmp_path / "lightning_logs" / "version_0" / "metrics.csv").read_text().splitlines()
    column = lines[0].split(",").index("step")
    assert steps == [int(line.split(",")[column]) for line in lines[1:]]
    assert len(steps) == 2


def test_each_call_of_log_is_observed_before_it_is_carried_out():
    calls = []
    trainer = Trainer(max_epochs=1, **QUIET)
    with observe_log_calls(
        trainer, lambda stage, name: calls.append((stage, name, "loss" in trainer.callback_metrics))
    ):
        trainer.fit(module := EvaluatedNet(), loader(), loader())
        trainer.test(module, loader(), verbose=False)
    assert calls[0] == ("val", "loss", False)
    assert {call[:2] for call in calls} == {("val", "loss"), ("test", "loss")}
    assert "log" not in vars(trainer.fit_loop.epoch_loop.val_loop._results)
