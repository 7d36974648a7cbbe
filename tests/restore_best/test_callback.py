"""RestoreBest in real fits: what it keeps, what it leaves in the module, and what a resumed run knows."""

import math

import lightning.pytorch.callbacks as lightning_callbacks
import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import (
    BatchSizeFinder,
    EarlyStopping,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
)
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from packaging.version import Version
from torch import nn

from lightning_tricks import AutoResume, LoRA, MetricsMonitor, PrefixTuning, RestoreBest
from lightning_tricks.finetuning import merge
from lightning_tricks.metrics import multiclass_metrics
from lightning_tricks.seeding import isolated_rng
from tests.contract.checks import Interrupts
from tests.restore_best.contract import Validated, Watches, state_of
from tests.small import QUIET, EvaluatedNet, Hooks, cases, fork, loader, same


class Scored(EvaluatedNet):
    """Logs the score of a list for each validation, beside its loss; with a BatchNorm and a buffer in no state dict."""

    def __init__(self, scores=(3.0, 1.0, 2.0, 1.0), **net):
        super().__init__(**net)
        self.net.insert(1, nn.BatchNorm1d(16))
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.scores = scores

    def training_step(self, batch, batch_idx):
        self.seen += 1
        return super().training_step(batch, batch_idx)

    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            validated = self.trainer.current_epoch * max(1, round(1 / self.trainer.val_check_interval))
            self.log("score", self.scores[min(validated, len(self.scores) - 1)])


def fit(callbacks, module, **trainer):
    trainer = Trainer(callbacks=callbacks, **{**QUIET, "max_epochs": 4, **trainer})
    trainer.fit(module, loader(), loader())
    return trainer


def loss_of(module):
    (result,) = Trainer(**QUIET).validate(module, loader(), verbose=False)
    return result["loss"]


@cases(
    "mode, scores, best",
    ("min", (3.0, 1.0, 2.0, 1.0), 1),
    ("max", (3.0, 1.0, 3.0, 1.0), 0),
    ("min", (math.nan, 2.0, math.nan, 3.0), 1),
    ("max", (math.nan, math.inf, 5.0, math.nan), 1),
    ("min", (math.inf, math.nan, math.inf, math.nan), 0),
    ("max", (-math.inf, -7.0, -9.0, -8.0), 1),
)
def test_the_module_ends_with_the_bits_of_the_best_validation(tmp_path, lightning_log, mode, scores, best):
    module, callback, watches = Scored(scores), RestoreBest("score", mode), Watches(tmp_path, "score")
    fit([callback, watches], module)
    assert same(state_of(module), watches.seen()[best][1])
    assert module.seen.item() == 10 * (best + 1), "a buffer that no state dict has"
    assert (callback.best_value, callback.best_epoch, callback.best_step) == (scores[best], best, 10 * (best + 1))
    (said,) = (message for _, message in lightning_log if "RestoreBest" in message)
    assert f"restored the weights of epoch {best}, step {10 * (best + 1)}: score {scores[best]:.6g}" in said


def test_several_validations_in_an_epoch_and_fewer_than_epochs(tmp_path):
    for cadence, validations in (
        ({"val_check_interval": 0.2, "max_epochs": 2}, 10),
        ({"check_val_every_n_epoch": 3}, 1),
    ):
        module, watches = EvaluatedNet(), Watches(tmp_path)
        callback = RestoreBest("loss")
        fit([watches, callback], module, **cadence)
        values = [value for value, _ in watches.seen()]
        assert len(values) == validations
        assert callback.best_value == min(values)
        assert same(state_of(module), watches.seen()[values.index(min(values))][1])


def test_the_sanity_check_does_not_count():
    callback = RestoreBest("loss", "max")  # the untrained net is the worst
    fit([callback], module := EvaluatedNet(), num_sanity_val_steps=-1, max_epochs=2)
    assert callback.best_step == 10
    assert loss_of(module) == callback.best_value


def test_validations_of_a_finder_do_not_count(tmp_path):
    module, callback = Scored(), RestoreBest("score")
    module.batch_size = 4
    finder = BatchSizeFinder(steps_per_trial=1, max_trials=1, init_val=4)
    module.train_dataloader = module.val_dataloader = loader
    trainer = Trainer(
        callbacks=[finder, callback], max_epochs=3, **{**QUIET, "num_sanity_val_steps": 2}, default_root_dir=tmp_path
    )
    trainer.fit(module)
    assert (callback.best_value, callback.best_epoch) == (1.0, 1)


def test_nan_alone_is_never_the_best(tmp_path, lightning_log):
    module, watches = Scored((math.nan,)), Watches(tmp_path, "score")
    with pytest.warns(UserWarning, match="keeps the last weights. score was NaN in 4 "):
        fit([RestoreBest("score"), watches], module)
    assert same(state_of(module), watches.seen()[-1][1])


@pytest.mark.parametrize("options", [{"max_epochs": 0}, {"limit_val_batches": 0, "max_epochs": 1}])
def test_without_a_validation_the_module_stays(lightning_log, options):
    """Also after a fit that had some."""
    fit([callback := RestoreBest("loss")], EvaluatedNet(), max_epochs=1)
    fit([callback], EvaluatedNet(), **options)
    assert (callback.best_value, callback.best_epoch, callback.best_step) == (None, -1, -1)
    assert any("no validation ran" in message for _, message in lightning_log)


def test_a_missing_value_names_those_that_there_are():
    words = r"Log it, or name one of the logged values: loss. Did you mean 'loss'\?"
    with pytest.raises(MisconfigurationException, match=words):
        fit([RestoreBest("los")], EvaluatedNet())


@cases(
    "arguments, words",
    ((["loss", "acc"],), r"one logged value, such as 'val/loss', got \['loss', 'acc'\]"),
    (("",), "got ''"),
    (("loss", "smallest"), "mode must be one of min, max, got 'smallest'"),
)
def test_wrong_arguments(arguments, words):
    with pytest.raises((TypeError, ValueError), match=words):
        RestoreBest(*arguments)


def test_early_stopping_ends_with_the_best():
    module, callback = Scored(), RestoreBest("score")
    trainer = fit([EarlyStopping("score", patience=1), callback], module, max_epochs=9)
    assert trainer.current_epoch == 3
    assert module.seen.item() == 20


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback with a model")
@pytest.mark.parametrize("comes_first", [True, False])
@pytest.mark.skipif(not hasattr(lightning_callbacks, "EMAWeightAveraging"), reason="Lightning 2.6 brings it")
def test_with_averaged_weights_those_that_were_validated_are_restored(comes_first):
    averaging = lightning_callbacks.EMAWeightAveraging(decay=0.5)
    callbacks = [callback := RestoreBest("loss", "max"), averaging]
    fit(callbacks if comes_first else callbacks[::-1], module := EvaluatedNet())
    assert callback.best_epoch == 0
    assert loss_of(module) == callback.best_value


class Exchanges(Callback):
    """Validates with weights of its own, as averages of one's own making do, and takes them out in a late hook."""

    def __init__(self, late):
        self.late = late

    def on_validation_start(self, trainer, pl_module):
        self.own = {name: value.clone() for name, value in pl_module.state_dict().items()}
        with torch.no_grad():
            for parameter in pl_module.parameters():
                parameter.data.mul_(0.5)  # which no version counter tells

    def on_validation_epoch_end(self, trainer, pl_module):
        if not self.late:
            pl_module.load_state_dict(self.own)

    def on_validation_end(self, trainer, pl_module):
        if self.late:
            pl_module.load_state_dict(self.own)


@pytest.mark.parametrize("late", [True, False])
@pytest.mark.parametrize("comes_first", [True, False])
def test_with_weights_that_somebody_exchanges(late, comes_first):
    callbacks = [callback := RestoreBest("loss"), Exchanges(late)]
    fit(callbacks if comes_first else callbacks[::-1], module := EvaluatedNet())
    assert loss_of(module) == callback.best_value


def test_with_stochastic_weight_averaging():
    callback = RestoreBest("loss", "max")
    fit([StochasticWeightAveraging(0.01, swa_epoch_start=2), callback], module := Scored(), max_epochs=4)
    assert loss_of(module) == callback.best_value


@pytest.mark.parametrize("adaptation", [lambda: LoRA(4), lambda: PrefixTuning(2)])
def test_with_added_weights(adaptation):
    callback = RestoreBest("loss", "max")
    fit([adaptation(), callback], module := EvaluatedNet(attention=True))
    assert callback.best_epoch == 0
    assert loss_of(module) == callback.best_value


def test_layers_that_change_since_are_named_and_nothing_is_mixed(tmp_path):
    def merges(trainer, module):
        if trainer.current_epoch == 2:
            merge(module)
            module.requires_grad_()

    watches = Watches(tmp_path, "score")
    with pytest.warns(UserWarning, match=r"other layers than in its best validation, in epoch 1: .*lora"):
        fit([LoRA(4), RestoreBest("score"), Hooks(on_train_epoch_start=merges), watches], module := Scored())
    assert same(state_of(module), watches.seen()[-1][1])


def test_pruning_that_is_made_permanent_at_the_end_is_named():
    pruning = ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)
    with pytest.warns(UserWarning, match=r"other layers than in its best validation.*weight_orig"):
        fit([pruning, RestoreBest("loss")], EvaluatedNet())


def test_a_buffer_that_grows_has_its_size_of_then(tmp_path):
    class Grows(Scored):
        def on_train_epoch_start(self):
            self.seen = torch.ones(self.trainer.current_epoch + 1)

    watches = Watches(tmp_path, "score")
    fit([RestoreBest("score"), watches], module := Grows())
    assert same(state_of(module), watches.seen()[1][1])


def test_checkpoints_hold_the_last_weights(tmp_path):
    last = ModelCheckpoint(tmp_path, save_last=True, save_top_k=0)
    watches = Watches(tmp_path, "score")
    fit([RestoreBest("score"), watches, last], Scored(), enable_checkpointing=True)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=True)
    final = watches.seen()[-1][1]
    assert all(torch.equal(value, final[name]) for name, value in saved["state_dict"].items())
    (state,) = (state for key, state in saved["callbacks"].items() if "RestoreBest" in key)
    assert same(state["weights"], watches.seen()[1][1])


@pytest.mark.parametrize("way", ["AutoResume", "ckpt_path"])
def test_more_epochs_continue_from_the_last_weights_and_know_the_best(tmp_path, way):
    def run(epochs, name):
        with isolated_rng(seed=0):
            module = Scored((1.0, 4.0, 3.0, 2.0), dropout=0.2)
        callback, path = RestoreBest("score"), tmp_path / f"{name}.ckpt"
        watches = Watches(tmp_path / name, "score")
        (tmp_path / name).mkdir(exist_ok=True)
        own = [AutoResume(tmp_path / f"{name}-runs")] if way == "AutoResume" else []
        saves = [Hooks(on_train_end=lambda trainer, _: trainer.save_checkpoint(path))] if way == "ckpt_path" else []
        trainer = Trainer(callbacks=[*own, callback, watches, *saves], max_epochs=epochs, **QUIET)
        with isolated_rng(seed=1):
            trainer.fit(module, loader(), loader(), ckpt_path=path if path.exists() and way == "ckpt_path" else None)
        return module, callback, watches.seen()

    module, callback, whole = run(4, "whole")
    assert same(state_of(module), whole[0][1])
    run(2, "parts")
    longer, extended, parts = run(4, "parts")
    assert same([state for _, state in parts], [state for _, state in whole[2:]]) or way == "ckpt_path"
    assert same(state_of(longer), state_of(module))
    assert (extended.best_value, extended.best_epoch) == (callback.best_value, callback.best_epoch) == (1.0, 0)
    again, _, seen = run(4, "parts")
    assert not seen or way == "ckpt_path"
    assert same(state_of(again), state_of(module)), "a run that had finished"


def resumed(path, module, *arguments, **record):
    """Resume the two epochs of a fit for the smallest score with another module; return the callback."""
    saves = Hooks(on_train_end=lambda trainer, _: trainer.save_checkpoint(path))
    fit([RestoreBest("score"), saves], Scored((0.3, 0.2)), max_epochs=2)
    saved = torch.load(path, weights_only=True)
    saved["callbacks"][RestoreBest("score").state_key] |= record
    torch.save(saved, path)
    trainer = Trainer(callbacks=[callback := RestoreBest(*arguments)], max_epochs=4, **QUIET)
    trainer.fit(module, loader(), loader(), ckpt_path=path)
    return callback


@pytest.mark.parametrize(("arguments", "best"), [(("score", "max"), 2), (("loss", "min"), 3)])
def test_a_resumed_run_with_another_monitor_starts_anew(tmp_path, arguments, best):
    with pytest.warns(UserWarning, match=r"checkpoint is by \['score', 'min'\], not by .*\]: it is ignored"):
        callback = resumed(tmp_path / "a.ckpt", Scored((0.0, 0.0, 0.1, 0.05)), *arguments)
    assert callback.best_epoch == best


def test_the_shards_of_another_rank_do_not_count(tmp_path):
    with (
        pytest.warns(UserWarning, match="are shards of another number of ranks. They are dropped"),
        pytest.warns(UserWarning, match="keeps the last weights.*or the run was resumed from a checkpoint that has"),
    ):
        resumed(tmp_path / "a.ckpt", Scored((math.nan,)), "score", rank=[0, 2])


def test_a_resumed_run_may_lack_the_value_in_some_validations(tmp_path):
    class Gaps(Scored):
        def on_validation_epoch_end(self):
            if self.trainer.current_epoch != 2:
                super().on_validation_epoch_end()

    words = "this validation did not log it. Log it, or name one of the logged values: loss"
    with pytest.warns(UserWarning, match=words):
        callback = resumed(tmp_path / "a.ckpt", Gaps((0.0, 0.0, 0.0, 0.1)), "score")
    assert callback.best_epoch == 3


def test_a_test_of_a_checkpoint_does_not_change_what_is_known_of_the_fit(tmp_path):
    module, callback = Scored((3.0, 2.0, 1.0)), RestoreBest("score")
    saves = ModelCheckpoint(tmp_path, filename="{epoch}", save_top_k=-1)
    trainer = fit([callback, saves], module, max_epochs=3, enable_checkpointing=True)
    trainer.test(module, loader(), ckpt_path=tmp_path / "epoch=0.ckpt", verbose=False)
    assert (callback.best_value, callback.best_epoch, callback._kept) == (1.0, 2, None)


def test_a_run_that_was_stopped_in_the_middle_ends_as_undisturbed(tmp_path):
    def run(name, *others):
        with isolated_rng(seed=0):
            module = Scored((1.0, 4.0, 3.0, 0.5), dropout=0.2)
        callback = RestoreBest("score")
        with isolated_rng(seed=1):
            fit([AutoResume(tmp_path / name), callback, *others], module, val_check_interval=0.5)
        return module, callback

    whole, _ = run("whole")
    with pytest.raises(SystemExit):
        run("parts", Interrupts(27))
    resumed, callback = run("parts")
    assert same(state_of(resumed), state_of(whole))
    assert callback.best_step == 25, "before it was stopped"


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_after_an_exception_or_ctrl_c_the_module_is_as_it_was_and_the_best_can_be_had(tmp_path, error):
    def breaks(trainer, module, *_):
        if trainer.current_epoch == 3:
            last.update(state_of(module))
            raise error

    last, callback, watches = {}, RestoreBest("score"), Watches(tmp_path, "score")
    module = Scored()
    with pytest.raises((ZeroDivisionError, SystemExit)):
        fit([callback, watches, Hooks(on_train_batch_start=breaks)], module)
    assert same(state_of(module), last)
    callback.restore(module)
    assert same(state_of(module), watches.seen()[1][1])
    with pytest.raises(MisconfigurationException, match="has no weights to restore"):
        callback.restore(module)


def test_values_of_metrics_monitor():
    callback = RestoreBest("val/acc", "max")
    trainer = fit([callback, MetricsMonitor(multiclass_metrics(10))], module := EvaluatedNet())
    assert callback.best_value is not None
    (again,) = trainer.validate(module, loader(), verbose=False)
    assert again["val/acc"] == callback.best_value


class _OwnScore(Scored):
    """On each rank another score, which is not synchronised, and other statistics of BatchNorm."""

    def validation_step(self, batch, batch_idx):
        self.net(batch[0])

    def on_validation_epoch_end(self):
        rank = self.trainer.global_rank
        self.log("score", [(1.0, 2.0, 3.0), (9.0, 8.0, 7.0)][rank][self.trainer.current_epoch])


@pytest.mark.filterwarnings("ignore:.*sync_dist=True")
def test_ranks_agree_where_their_values_do_not(tmp_path):
    watches = Watches(tmp_path, "score")
    fit([RestoreBest("score"), watches], _OwnScore(), strategy="ddp_fork", devices=2, max_epochs=3)
    for rank in range(2):
        seen, final = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert same(final, seen[0][1]), "the value of rank zero counts"


@pytest.mark.skipif(Version(torch.__version__) < Version("2.7"), reason="FSDP2 needs an accelerator there")
def test_shards_are_kept_and_resumed(tmp_path):
    def run(rank, epochs, name):
        (tmp_path / name).mkdir(exist_ok=True)
        callbacks = [AutoResume(tmp_path / "runs"), RestoreBest("worse"), Watches(tmp_path / name, "worse")]
        strategy = ModelParallelStrategy(2, tensor_parallel_size=1)
        with isolated_rng(seed=0):
            module = Validated(built_late=True)
            fit(callbacks, module, strategy=strategy, devices=2, max_epochs=epochs)

    for epochs, name in ((2, "first"), (3, "extended"), (3, "finished")):
        fork(lambda rank, epochs=epochs, name=name: run(rank, epochs, name), 2)
    for rank in range(2):
        (seen, final), *later = (
            torch.load(tmp_path / name / f"{rank}.pt", weights_only=False) for name in ("first", "extended", "finished")
        )
        assert same(final, seen[0][1])
        assert len(later[0][0]) == 1
        for _, state in later:
            assert same(state, final)
