"""The callback LoRA in the Trainer: when it acts, and that what it added survives everything."""

import copy
import logging

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, StochasticWeightAveraging
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from packaging.version import Version
from torch import nn
from torch.utils.data import DataLoader

from lightning_tricks import CheckpointRemapping, LoRA, OptimizerSpec, Tricks, TricksMixin
from lightning_tricks.ensembles import VotingClassifier
from lightning_tricks.finetuning import LoRASettings, add_lora
from lightning_tricks.seeding import isolated_rng
from tests.contract.lab import full
from tests.finetuning.models import encoder_layer
from tests.small import QUIET, EvaluatedNet, Hooks, Net, fit, fork, loader


class Built(EvaluatedNet):
    def __init__(self, where):
        self.where = where
        super().__init__(built_late=True)
        self.make("init")

    def make(self, where):
        if where == self.where and self.net is None:
            with isolated_rng(seed=0):
                self.build()

    def setup(self, stage):
        self.make("setup")

    def configure_model(self):
        self.make("configure_model")


def _trainer(*callbacks, **options):
    return Trainer(callbacks=list(callbacks), **{**QUIET, "max_epochs": 2, **options})


def _changes(module):
    return {name: full(value) for name, value in module.state_dict().items() if name.endswith((".A", ".B"))}


@pytest.mark.parametrize("where", ["init", "setup", "configure_model"])
def test_wherever_layers_are_made(where):
    module = Built(where)
    lora = LoRA(4)
    trainer = _trainer(lora)
    trainer.fit(module, loader(), loader())
    with isolated_rng(seed=0):
        base = Net().state_dict()
    state = module.state_dict()
    assert all(torch.equal(state[name], value) for name, value in base.items())
    assert len(_changes(module)) == 4
    trained = [p for group in trainer.optimizers[0].param_groups for p in group["params"] if p.requires_grad]
    assert len(trained) == 4
    assert len(trainer.optimizers[0].state) == 4, "frozen weights have optimizer state"
    assert "configure_model" not in vars(module)
    assert "Low-rank changes (rank 4) in 2 Linear add" in str(lora.report)


def test_a_second_fit_and_other_stages_keep_what_was_learnt():
    module, lora = Built("init"), LoRA(4)
    _trainer(lora).fit(module, loader(), loader())
    learnt = _changes(module)
    results = [_trainer(callback).test(module, loader(), verbose=False) for callback in (lora, LoRA(4))]
    results.append(_trainer().test(module, loader(), verbose=False))
    assert results[0] == results[1] == results[2]
    assert all(torch.equal(value, learnt[name]) for name, value in _changes(module).items())
    _trainer(LoRA(4), max_epochs=1).fit(module, loader(), loader())
    assert all(not torch.equal(value, learnt[name]) for name, value in _changes(module).items())
    with pytest.raises(MisconfigurationException, match="LoRA: Built has LoRA already, with other layers"):
        _trainer(LoRA(5)).fit(module, loader(), loader())


def test_a_checkpoint_is_tested_by_a_module_that_is_built_anew(tmp_path):
    module = Built("configure_model")
    saving = ModelCheckpoint(tmp_path, save_last=True)
    trainer = _trainer(LoRA(4), saving, enable_checkpointing=True)
    trainer.fit(module, loader(), loader())
    wanted = trainer.test(module, loader(), verbose=False)
    other = Built("configure_model")
    tester = _trainer(LoRA(4), ModelCheckpoint(tmp_path), enable_checkpointing=True)
    assert tester.test(other, loader(), ckpt_path=saving.last_model_path, verbose=False) == wanted


def test_pretrained_weights_are_loaded_beside_it(tmp_path):
    with isolated_rng(seed=3):
        pretrained = Net().state_dict()
    torch.save({f"module.{name}": value for name, value in pretrained.items()}, tmp_path / "pretrained.pt")
    remapping = CheckpointRemapping(str(tmp_path / "pretrained.pt"))
    for callbacks in ([remapping, LoRA(4)], [LoRA(4), remapping]):
        module = Net()
        _trainer(*callbacks).fit(module, loader())
        assert remapping.report.loaded == 6
        assert all(torch.equal(module.state_dict()[name], value) for name, value in pretrained.items())
        assert all(value.abs().sum() > 0 for value in _changes(module).values())


class _Plain(LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 16), nn.LayerNorm(16), nn.ReLU(), nn.Dropout(0), nn.Linear(16, 10))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])


def test_in_tricks(tmp_path):
    class LitNet(TricksMixin, _Plain):
        def __init__(self, tricks=None):
            super().__init__(tricks=tricks)
            self.save_hyperparameters()

    tricks = Tricks(lora={"rank": 3, "target_modules": "net.4"}, optimizer=OptimizerSpec("AdamW", lr=0.01))
    module = LitNet(tricks)
    trainer = _trainer()
    trainer.fit(module, loader())
    assert len(_changes(module)) == 2
    assert sum(len(group["params"]) for group in trainer.optimizers[0].param_groups) == 2
    assert Tricks(**module.hparams.tricks) == tricks
    trainer.save_checkpoint(tmp_path / "adapted.ckpt")
    loaded = LitNet.load_from_checkpoint(tmp_path / "adapted.ckpt")
    assert loaded.load_report.loaded == 9
    assert all(torch.equal(value, module.state_dict()[name]) for name, value in loaded.state_dict().items())
    assert all(value.requires_grad == ("lora_" in name) for name, value in loaded.named_parameters())


@pytest.mark.parametrize("is_added_before", [False, True])
def test_what_forked_ranks_add_does_not_come_back_and_that_is_said(is_added_before, tmp_path):
    """Lightning loads what the ranks trained into the module with strict=False."""
    with isolated_rng(seed=0):
        module = Net()
    if is_added_before:
        add_lora(module, LoRASettings(4))
    handler = logging.FileHandler(tmp_path / "log")
    logger = logging.getLogger("lightning.pytorch.tricks.finetuning")
    logger.addHandler(handler)
    try:
        _trainer(LoRA(4), strategy="ddp_fork", devices=1, max_epochs=1).fit(module, loader())
    finally:
        logger.removeHandler(handler)
        handler.close()
    said = "after the fit, the module has no trained changes" in (tmp_path / "log").read_text()
    assert said != is_added_before
    assert any(value.any() for name, value in _changes(module).items() if name.endswith(".B")) == is_added_before


class _Encoder(Net):
    def build(self):
        layers = nn.Linear(64, 64), nn.Unflatten(1, (4, 16)), encoder_layer(), nn.Flatten(), nn.Linear(64, 10)
        self.net = nn.Sequential(*layers)


@pytest.mark.skipif(Version(torch.__version__) < Version("2.7"), reason="FSDP2 of torch 2.6 needs an accelerator")
def test_sharded_ranks_are_one_process(tmp_path):
    """With side branches, and with weights that are computed in attention, whose shards FSDP2 looks for."""

    def run(rank=0, ranks=1):
        def save(trainer, module):
            torch.save({name: full(value) for name, value in module.state_dict().items()}, tmp_path / f"{ranks}.{rank}")

        with isolated_rng(seed=0):
            module = _Encoder("sgd")
        options = {"strategy": ModelParallelStrategy(ranks, 1), "devices": ranks} if ranks > 1 else {}
        own = DataLoader([(x[rank::ranks], y[rank::ranks]) for x, y in loader()], batch_size=None)
        torch.manual_seed(0)
        fit(module, LoRA(4), Hooks(on_train_end=save), data=own, use_distributed_sampler=False, **options)

    run()
    fork(lambda rank: run(rank, 2), 2)
    one, *two = (torch.load(tmp_path / name) for name in ("1.0", "2.0", "2.1"))
    assert sum("lora_" in name and name.endswith(".B") for name in one) == 6
    for weights in two:
        torch.testing.assert_close(weights, one, rtol=1e-4, atol=1e-6)


def test_what_does_not_fit_is_said_before_training():
    module = Net()
    state = copy.deepcopy(module.state_dict())
    with pytest.raises(MisconfigurationException, match="LoRA: target_modules: pattern 'query' matches none of the"):
        _trainer(LoRA(4, target_modules="query")).fit(module, loader())
    assert module.state_dict().keys() == state.keys()
    assert "configure_model" not in vars(module)


def test_an_exception_in_the_module_leaves_no_override():
    class Failing(Net):
        def setup(self, stage):
            raise ZeroDivisionError

    module = Failing()
    with pytest.raises(ZeroDivisionError):
        _trainer(LoRA(4)).fit(module, loader())
    assert "configure_model" not in vars(module)


def test_averaged_copies_have_the_change_or_it_is_said():
    class Optimized(_Plain):
        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.01)

    averaging = StochasticWeightAveraging(0.01, swa_epoch_start=1)
    module = Optimized()
    base = {name: value.clone() for name, value in module.state_dict().items()}
    _trainer(LoRA(4), averaging, max_epochs=3).fit(module, loader())
    assert all(torch.equal(module.state_dict()[name], value) for name, value in base.items())
    assert all(value.abs().sum() > 0 for value in _changes(module).values())
    averaging = StochasticWeightAveraging(0.01, swa_epoch_start=1)
    words = "has copied the module before LoRA changed it: pass LoRA to the"
    with pytest.raises(MisconfigurationException, match=words):
        _trainer(averaging, LoRA(4), max_epochs=3).fit(Optimized(), loader())


@pytest.mark.parametrize("targets", ["linear", "*"])
def test_stacked_members_of_an_ensemble_are_refused_with_the_remedy(targets):
    made = {"criterion": nn.CrossEntropyLoss(), "optimizer": ("SGD", {"lr": 0.1}), "vectorize": True}
    ensemble = VotingClassifier(lambda: nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10)), 3, **made)
    trainer = Trainer(callbacks=[LoRA(2, target_modules=targets)], max_epochs=1, **QUIET)
    with pytest.raises(MisconfigurationException, match=r"2 layers hold the weights of all members .*vectorize=False"):
        trainer.fit(ensemble, loader(), loader())
