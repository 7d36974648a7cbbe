"""Which modules a batch calls, and the check of it in the first batches of a run."""

import dataclasses

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn

from lightning_tricks.finetuning.adaptation import CoverageCheckingCallback
from lightning_tricks.finetuning.core.adapter_coverage import watching_coverage
from tests.contract.lab import traces
from tests.small import QUIET, EvaluatedNet, loader, recorded_warnings


class _Functional(nn.Linear):
    """A layer that reads the weight of the one inside."""

    def __init__(self):
        super().__init__(10, 10)
        self.inner = nn.ModuleList([nn.Linear(10, 10)])

    def forward(self, x):
        return super().forward(nn.functional.linear(x, self.inner[0].weight))


class _Nothing:
    """An injection that adds nothing, and names what is to be watched."""

    settings_type = dataclasses.make_dataclass("Settings", ["names"])

    def __init__(self, names):
        self.names = names

    def ensure(self, module, settings):
        return "nothing"

    def names_in(self, module):
        return self.names


class _Watched(CoverageCheckingCallback):
    injection = _Nothing

    def __init__(self, *names):
        super().__init__({"names": names})
        self.injection = _Nothing(names)


def test_modules_are_called_bypassed_or_idle():
    model = nn.Sequential(_Functional(), nn.Sequential(nn.Linear(10, 10)))
    before = traces(model)
    names = ["0", "0.inner.0", "1.0"]
    with watching_coverage(model, names) as coverage:
        model[0](torch.ones(1, 10))
    assert (coverage.called, coverage.bypassed, coverage.idle) == (["0"], ["0.inner.0"], ["1.0"])
    with watching_coverage(model, names) as coverage:
        model(torch.ones(1, 10))
    assert (coverage.called, coverage.bypassed, coverage.idle) == (["0", "1.0"], ["0.inner.0"], [])
    assert traces(model) == before


@pytest.mark.trap("finetuning: an adapter in a fused layer is ignored in evaluation")
def test_a_fused_layer_bypasses_its_parts_in_evaluation_only():
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    for training in (True, False):
        with watching_coverage(layer.train(training), ["linear2", "self_attn"]) as coverage, torch.no_grad():
            layer(torch.randn(2, 3, 8))
        assert coverage.bypassed == ([] if training else ["linear2", "self_attn"])


class _Bypassing(EvaluatedNet):
    def __init__(self, stage):
        super().__init__()
        self.stage = stage
        self.net.append(_Functional())

    def forward_in(self, stage, x):
        with_weight = self.net(x)
        return with_weight if stage == self.stage else with_weight + self.net[-1].inner[0](with_weight)

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.forward_in("training", batch[0]), batch[1])

    def evaluate(self, batch, batch_idx):
        return self.forward_in("evaluation", batch[0])

    validation_step = test_step = predict_step = evaluate


@pytest.mark.parametrize("function", ["fit", "validate", "test", "predict"])
@pytest.mark.parametrize("stage", ["training", "evaluation"])
def test_a_bypassed_module_is_named_with_the_stage(function, stage):
    module, callback = _Bypassing(stage), _Watched("net.0", "net.5.inner.0")
    trainer = Trainer(callbacks=[callback], max_epochs=1, limit_train_batches=2, **QUIET)
    run = getattr(trainer, function)
    arguments = [loader()] * (1 + (function == "fit"))
    if function != "fit" and stage == "training":
        run(module, *arguments)
    else:
        with pytest.raises(MisconfigurationException, match=rf"1 of 2 .* in {stage}: net\.5\.inner\.0.*use LoRA"):
            run(module, *arguments)
    assert not any("forward" in vars(part) for part in module.net.modules())


def test_what_a_batch_does_not_use_is_a_warning():
    module = EvaluatedNet()
    module.unused = nn.Sequential(nn.Linear(2, 2))
    trainer = Trainer(callbacks=[_Watched("net.0", "unused.0")], max_epochs=1, limit_train_batches=2, **QUIET)
    with recorded_warnings() as caught:
        trainer.fit(module, loader(), loader())
    words = [str(warning.message) for warning in caught if "_Watched" in str(warning.message)]
    assert len(words) == 3
    assert "training did not use 1 of 2" in words[0]
    assert "2 trainable parameters got no gradient: unused.0.weight, unused.0.bias." in words[1]
    assert "evaluation did not use 1 of 2" in words[2]


def test_only_the_first_batches_are_watched():
    callback = _Watched("net.0")
    trainer = Trainer(callbacks=[callback], max_epochs=1, limit_train_batches=3, **QUIET)
    seen = []
    module = EvaluatedNet()
    module.on_train_batch_end = lambda *_: seen.append(
        (callback.on_train_batch_start, "forward" in vars(module.net[0]))
    )
    trainer.fit(module, loader(), loader())
    assert seen == [(None, False)] * 3
    for _ in range(2):
        trainer.fit_loop.max_epochs += 1
        trainer.fit(module, loader(), loader())


def test_a_batch_that_the_module_skips_is_not_judged():
    module, callback = EvaluatedNet(), _Watched("net.0")
    starts = []

    def on_train_batch_start(batch, batch_idx):
        starts.append(batch_idx)
        return -1 if len(starts) == 1 else None  # skips the epoch

    module.on_train_batch_start = on_train_batch_start
    Trainer(callbacks=[callback], max_epochs=2, limit_train_batches=2, **QUIET).fit(module, loader(), loader())
    assert starts == [0, 0, 1]
    assert callback.on_train_batch_start is None
    assert "forward" not in vars(module.net[0])
