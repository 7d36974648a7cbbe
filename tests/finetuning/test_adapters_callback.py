"""The callbacks Adapters and PrefixTuning in the Trainer, on a transformer."""

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_tricks import Adapters, LoRA, PrefixTuning
from lightning_tricks.seeding import isolated_rng
from tests.finetuning.models import ReadsWeights
from tests.small import QUIET, loader


def _added(module):
    names = {name for name, _ in module.named_parameters()}
    return {name for name in names if any(kind in name for kind in (".lora_", ".prefix.", ".adapter."))}


METHODS = {
    "houlsby": lambda: Adapters(4, kind="houlsby"),
    "pfeiffer": lambda: Adapters(4),
    "parallel": lambda: Adapters(4, kind="parallel"),
    "prefix": lambda: PrefixTuning(3),
}


class Classifier(LightningModule):
    def __init__(self):
        super().__init__()
        with isolated_rng(seed=0):
            layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 2)
            self.head = nn.Linear(8, 10)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.head(self.encoder(batch[0].unflatten(1, (8, 8))).mean(1)), batch[1])

    def validation_step(self, batch, batch_idx):
        self.log("loss", self.training_step(batch, batch_idx), batch_size=4, sync_dist=True)

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.head(self.encoder(batch[0].unflatten(1, (8, 8))).mean(1))

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=0.01)


def _trainer(*callbacks, **options):
    return Trainer(callbacks=list(callbacks), **{**QUIET, "max_epochs": 2, **options})


@pytest.mark.trap("finetuning: evaluation is of a model without its adapters")
@pytest.mark.parametrize("method", METHODS)
def test_it_is_evaluated_as_it_was_trained(method):
    module = Classifier()
    _trainer(METHODS[method]()).fit(module, loader(), loader())
    (trained, *_) = _trainer(METHODS[method](), inference_mode=True).predict(module, loader())
    batch = next(iter(loader()))
    torch.testing.assert_close(trained, module.train().predict_step(batch, 0).detach())
    added = {name for name in _added(module) if name.endswith(("up_weight", "values"))}
    with torch.no_grad():
        for name in added:
            module.get_parameter(name).mul_(-1)
    (changed, *_) = _trainer().predict(module, loader())
    assert not torch.allclose(changed, trained, atol=1e-3)


@pytest.mark.parametrize("others", ["before", "after"])
def test_with_lora_and_prefixes_in_one_trainer(others):
    module = Classifier()
    callbacks = [LoRA(2), PrefixTuning(3)]
    callbacks.insert(2 if others == "before" else 0, Adapters(4))
    for _ in range(2):
        _trainer(*callbacks).fit(module, loader(), loader())
    trained = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    assert trained == _added(module) | {"head.weight", "head.bias"}
    for kind in ("lora_", "prefix", "adapter"):
        assert any(kind in name for name in trained), kind
    assert all(module.get_parameter(name).abs().sum() > 0 for name in trained)


class _ReadsWeights(Classifier):
    """Computes with the weight of a layer that it does not call."""

    def __init__(self):
        super().__init__()
        self.encoder = nn.ModuleDict({"read": ReadsWeights(), "called": nn.Linear(8, 8)})

    def training_step(self, batch, batch_idx):
        x = self.encoder["called"](self.encoder["read"](batch[0].unflatten(1, (8, 8))))
        return nn.functional.cross_entropy(self.head(x.mean(1)), batch[1])


@pytest.mark.trap("finetuning: adapters of layers whose weights are read are silently untrained")
def test_an_adapter_that_nothing_calls_is_named():
    adapters = Adapters(4, ["encoder.read.proj", "encoder.called"])
    words = "Adapters: 1 of 2 adapted modules have no effect in training: encoder.read.proj.*use LoRA"
    with pytest.raises(MisconfigurationException, match=words):
        _trainer(adapters).fit(_ReadsWeights(), loader(), loader())
