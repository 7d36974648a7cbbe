"""A private symbol that Lightning renames is an error that names the trick, where it is read and where it is set."""

import operator
import types

import lightning
import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.combined_loader import CombinedLoader, _MaxSizeCycle

from lightning_tricks._lightning_compat import (
    callbacks,
    checkpoints,
    ending_loaders,
    fit,
    fit_observer,
    loaders,
    loggers,
    observers,
    results,
)
from lightning_tricks._lightning_compat.guards import needs_private, overriding, set_private
from tests.small import QUIET, Hooks, Net, cases, loader

_TRICKS = (
    "Probe|AutoResume|AutoResume or CheckpointRemapping|AutoResume or ValidateFirst|EndTogether|TrainableCheckpoint|"
    "RestoreBest|ExponentialMovingAverage"
)
MATCH = f"^({_TRICKS}) does not work with lightning {lightning.__version__}.*install"


def _run(call):
    """Call a function in the middle of an epoch, where the Trainer has all its parts."""
    calls = Hooks(on_train_batch_start=lambda trainer, module, batch, number: call(trainer) if number == 1 else None)
    Trainer(max_epochs=1, limit_train_batches=3, callbacks=[calls], **QUIET).fit(Net(), loader())


def _parts(trainer):
    loop = trainer.fit_loop
    return {
        "connector": trainer._checkpoint_connector,
        "logging": trainer._logger_connector,
        "signals": trainer._signal_connector,
        "fit": loop,
        "epoch": loop.epoch_loop,
        "validation": loop.epoch_loop.val_loop,
        "fetcher": loop._data_fetcher,
        "iterator": loop._data_fetcher and loop._data_fetcher.combined_loader._iterator,
        "strategy": trainer.strategy,
    }


def _rename(owner, name):
    """Rename an attribute of an object, or of its class until the test ends."""
    vars(owner)[f"{name}_renamed"] = vars(owner).pop(name)


def _state(trainer):
    return results.capture_loop_state(trainer)


@cases(
    "part, name, call",
    ("fetcher", "fetched", loaders.recreate_iterators),
    ("fetcher", "length", loaders.fetches_ahead),
    ("fetcher", "batches", loaders.train_iterators),
    ("iterator", "_consumed", loaders.restarted_loaders),
    ("iterator", "_consumed", lambda trainer: loaders.mark_restarted_loaders(trainer, [True])),
    ("fit", "_combined_loader", lambda trainer: loaders.iterated_as(trainer, [], list).__enter__()),
    ("fit", "_data_source", loaders.given_train_loaders),
    ("fit", "_data_fetcher", loaders.train_iterators),
    ("epoch", "batch_progress", fit.num_batches_done),
    ("validation", "_restarting", fit.skip_sanity_check),
    ("validation", "_restarting", fit.clear_restart_flags),
    ("epoch", "_loaded_from_state_dict", fit.clear_restart_flags),
    ("fit", "_last_train_dl_reload_epoch", _state),
    ("validation", "_last_val_dl_reload_epoch", _state),
    ("validation", "_seen_batches_per_dataloader", _state),
    ("logging", "_logged_metrics", _state),
    ("logging", "_first_loop_iter", _state),
)
def test_a_renamed_attribute_of_the_loops(part, name, call):
    asked = []

    def rename_and_call(trainer):
        owner = _parts(trainer)[part]
        _rename(owner, name)
        try:
            with pytest.raises(RuntimeError, match=MATCH):
                call(trainer)
        finally:
            vars(owner).pop(name, None)
            vars(owner)[name] = vars(owner).pop(f"{name}_renamed")
        asked.append(name)

    _run(rename_and_call)
    assert asked == [name]


@cases(
    "part, name",
    ("fit", "_last_train_dl_reload_epoch"),
    ("validation", "_last_val_dl_reload_epoch"),
    ("logging", "_callback_metrics"),
    ("logging", "_current_fx"),
    ("logging", "_first_loop_iter"),
)
def test_a_renamed_attribute_is_not_set_anew(part, name):
    """Restoring a state is an error as well, and adds nothing under the old name."""
    states = []
    _run(lambda trainer: states.append(_state(trainer)))
    trainer = Trainer(**QUIET)
    owner = _parts(trainer)[part]
    _rename(owner, name)
    with pytest.raises(RuntimeError, match=MATCH):
        results.restore_loop_state(trainer, states[0])
    assert name not in vars(owner)


@pytest.mark.parametrize("name", ["_ckpt_path", "_loaded_checkpoint"])
def test_a_renamed_attribute_of_the_checkpoint_connector(name):
    trainer = Trainer(max_epochs=1, **QUIET)
    connector = trainer._checkpoint_connector
    with fit.override_resume_checkpoint(trainer, lambda path: ("memory", fit.dump_checkpoint(trainer))):
        _rename(connector, name)
        with pytest.raises(RuntimeError, match=MATCH):
            trainer.fit(Net(), loader())
    assert name not in vars(connector)
    assert "resume_start" not in vars(connector)


@cases(
    "owner, name, install",
    ("connector", "resume_start", lambda trainer: fit.override_resume_checkpoint(trainer, lambda path: None)),
    *(
        ("connector", name, lambda trainer: checkpoints.checkpoint_contents_changed(trainer, dict, dict))
        for name in ("dump_checkpoint", "restore_model")
    ),
    ("epoch", "_on_before_fetch", lambda trainer: observers.observe_fetches(trainer, print, print, "Probe")),
    ("fit", "run", lambda trainer: observers.observe_errors(trainer, print, "Probe")),
    ("validation", "_on_evaluation_epoch_end", lambda trainer: observers.observe_validation_ends(trainer, print)),
    ("fit", "on_run_end", lambda trainer: fit.call_after_train_hook(trainer, "end", lambda: None)),
    ("fit", "on_run_start", lambda trainer: fit.call_after_train_hook(trainer, "start", lambda: None)),
    *(
        (owner, name, lambda trainer: ending_loaders.loaders_ending_together(trainer, {"train": 0, "val": 0}, bool))
        for owner, name in (("fit", "_load_combined_loader_states"), ("validation", "setup_data"))
    ),
    ("signals", "teardown", lambda trainer: fit.call_after_teardown(trainer, print)),
    *(
        (owner, name, lambda trainer: fit_observer.observe_fit(trainer, fit_observer.FitObserver()))
        for owner, name in (
            ("strategy", "setup_optimizers"),
            ("signals", "register_signal_handlers"),
            ("fit", "_load_combined_loader_states"),
            ("fit", "setup_data"),
            ("fit", "on_advance_start"),
            ("validation", "setup_data"),
            ("epoch", "reset"),
            ("epoch", "on_run_start"),
            ("epoch", "on_advance_end"),
        )
    ),
)
def test_a_renamed_method_is_not_overridden(monkeypatch, owner, name, install):
    trainer = Trainer(**QUIET)
    part = _parts(trainer)[owner]
    (kind,) = [kind for kind in type(part).__mro__ if name in vars(kind)][:1]
    before = {one: set(vars(of)) for one, of in _parts(trainer).items() if of is not None}
    with monkeypatch.context() as renamed:
        renamed.setattr(kind, f"{name}_renamed", vars(kind)[name], raising=False)
        renamed.delattr(kind, name)
        if hasattr(part, name):  # inherited, as of the base class of loops
            renamed.delattr(_Loop, name)
        with pytest.raises(RuntimeError, match=MATCH), install(trainer):
            pytest.fail("nothing is installed")
    assert {one: set(vars(of)) for one, of in _parts(trainer).items() if of is not None} == before


@pytest.mark.parametrize("innermost", [True, False])
def test_a_renamed_attribute_of_a_strategy(innermost):
    strategy = types.SimpleNamespace(checkpoint_io=None)
    with (
        pytest.raises(RuntimeError, match=MATCH),
        checkpoints.checkpoint_io_inserted(strategy, lambda inner: inner, innermost=innermost),
    ):
        pytest.fail("nothing is inserted")
    assert vars(strategy) == {"checkpoint_io": None}


def _csv_logger():
    return CSVLogger(".", version=1)


def _averaging():
    averaging = StochasticWeightAveraging(0.1)
    averaging._scheduler_state = {"base_lrs": [0.1]}
    return averaging


@cases(
    "make, name, call, found",
    (ModelParallelStrategy, "_save_distributed_checkpoint", checkpoints.writes_folders, True),
    *(
        (ModelCheckpoint, name, call, ...)
        for name in ("_last_global_step_saved", "_last_checkpoint_saved", "current_score")
        for call in (
            checkpoints.checkpoint_callback_state,
            lambda it: checkpoints.restore_checkpoint_callback_state(
                it, checkpoints.checkpoint_callback_state(ModelCheckpoint())
            ),
        )
    ),
    (_csv_logger, "_version", lambda it: loggers.set_logger_version(it, 3), ...),
    (_csv_logger, "_version", lambda it: loggers.log_dir_for_version(it, 3), ...),
    (_csv_logger, "_experiment", loggers.open_csv_logger, ...),
    (_csv_logger, "_experiment", loggers.is_logger_started, False),
    (_csv_logger, "_experiment", lambda it: loggers.muted_logger(it).__enter__(), ...),
    (lambda: TensorBoardLogger(".", version=1), "_version", lambda it: loggers.set_logger_version(it, 3), ...),
    (lambda: TensorBoardLogger(".", version=1), "_experiment", loggers.close_tensorboard_logger, ...),
    *(
        (kind, "_early_exit", lambda it: fit.is_tuning(Trainer(callbacks=[it], **QUIET)), False)
        for kind in (LearningRateFinder, BatchSizeFinder)
    ),
    (lambda: ModelPruning("l1_unstructured"), "_original_layers", callbacks.capture_lottery_tickets, {}),
    (_averaging, "_swa_scheduler", lambda it: callbacks.restore_swa_scheduler(Trainer(**QUIET), it), ...),
)
def test_a_renamed_attribute_of_what_a_trainer_is_given(make, name, call, found):
    owner = make()
    assert found is ... or call(owner) == found
    _rename(owner, name)
    with pytest.raises(RuntimeError, match=MATCH):
        call(owner)
    assert name not in vars(owner)


@pytest.mark.parametrize("name", ["log_dir", "metrics_file_path", "metrics_keys", "metrics"])
def test_a_renamed_attribute_of_a_csv_writer(tmp_path, name):
    logger = CSVLogger(tmp_path, version=1)
    writer = logger.experiment
    _rename(writer, name)
    with pytest.raises(RuntimeError, match=MATCH):
        loggers.discard_unwritten_rows(logger) if name == "metrics" else loggers.open_csv_logger(logger)
    assert name not in vars(writer)


def test_restarted_loaders_in_other_modes():
    """Only where shorter loaders restart is there anything to mark."""
    for mode in ("max_size_cycle", "min_size"):
        combined = CombinedLoader([[1, 2], [1]], mode)
        iter(combined)
        fetcher = types.SimpleNamespace(combined_loader=combined)
        trainer = types.SimpleNamespace(fit_loop=types.SimpleNamespace(_data_fetcher=fetcher))
        cycles = isinstance(combined._iterator, _MaxSizeCycle)
        assert loaders.restarted_loaders(trainer) == ([False, False] if cycles else [])
        loaders.mark_restarted_loaders(trainer, [True, False])
        assert loaders.restarted_loaders(trainer) == ([True, False] if cycles else [])


class _Owner:
    def __init__(self):
        self.value = 1

    def method(self):
        return "own"


def test_set_private_sets_all_or_nothing():
    owner = _Owner()
    with pytest.raises(AttributeError, match="renamed"):
        set_private(owner, value=2, renamed=3)
    assert vars(owner) == {"value": 1}
    set_private(owner, value=2)
    assert owner.value == 2


def test_overriding_is_undone_after_an_exception():
    def fails():
        with overriding(owner, method=lambda: "other"):
            assert owner.method() == "other"
            raise ZeroDivisionError

    owner = _Owner()
    with pytest.raises(ZeroDivisionError):
        fails()
    assert owner.method() == "own"
    assert vars(owner) == {"value": 1}
    with pytest.raises(AttributeError, match="renamed"), overriding(owner, method=len, renamed=len):
        pytest.fail("nothing is overridden")
    assert vars(owner) == {"value": 1}


def test_an_error_of_a_users_code_is_passed_on():
    def hook():
        raise AttributeError("of the user")

    guard = needs_private("AutoResume")
    with pytest.raises(AttributeError, match="of the user"):
        guard(hook)()
    with pytest.raises(RuntimeError, match=MATCH):
        guard(operator.attrgetter("renamed"))(_Owner())
