"""Several optimizers as one: the oracle is each of them, stepped by hand."""

import copy
import io
import json
import os
import pickle
import signal
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    GradientAccumulationScheduler,
    LearningRateMonitor,
    StochasticWeightAveraging,
)
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from packaging.version import Version
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from lightning_tricks import (
    AutoResume,
    GradientClipping,
    GradualUnfreezing,
    Microbatching,
    OptimizerSpec,
    ScheduleSpec,
    Tricks,
    TricksMixin,
    seed_everything,
)
from lightning_tricks.ensembles import FastGeometricClassifier, VotingClassifier
from lightning_tricks.lr_schedules import CombinedOptimizer, build_optimizer, build_schedule, parameter_groups
from tests.small import QUIET, Hooks, HostReads, Net, cases, digits, fit, fork, loader, real_fp16, same

pytestmark = pytest.mark.oldest

HAS_MUON = hasattr(torch.optim, "Muon")
KIND = "Muon" if HAS_MUON else "SGD"  # torch before 2.9 has no optimizer for matrices
ONLY = ["blocks.*.weight"] if HAS_MUON else [r"re:^blocks\..*(into|out|up|down)\.weight$"]  # SGD takes vectors as well
SPEC = OptimizerSpec(KIND, lr=0.02, only=ONLY, rest=OptimizerSpec(lr=3e-3))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(16), nn.LayerNorm(16)
        self.into, self.out, self.up, self.down = (
            nn.Linear(*size) for size in ((16, 48), (16, 16), (16, 32), (32, 16))
        )

    def forward(self, x):
        query, key, value = self.into(self.norm1(x)).chunk(3, -1)
        x = x + self.out(nn.functional.scaled_dot_product_attention(query, key, value))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Small(LightningModule):
    """A transformer for digits, whose rows are its tokens; its optimizers as one, or stepped by hand."""

    def __init__(self, spec=SPEC, schedule=None, by_hand=False, accumulated=1, compiled=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Linear(8, 16)
        self.blocks = nn.Sequential(Block(), Block())
        if compiled:
            self.blocks = torch.compile(self.blocks, backend="aot_eager")
        self.head = nn.Linear(16, 10)
        self.specs, self.accumulated = (spec, schedule), accumulated
        self.automatic_optimization = not by_hand
        self.rates = []

    def forward(self, x):
        return self.head(self.blocks(self.embedding(x.view(len(x), 8, 8))).mean(1))

    def training_step(self, batch, batch_idx):
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        if not self.automatic_optimization:
            self.by_hand(loss, batch_idx)
        return loss

    def by_hand(self, loss, batch_idx):
        for optimizer in self.optimizers() if batch_idx % self.accumulated == 0 else ():
            optimizer.zero_grad()
        with torch.autocast("cpu", enabled=False):  # outside of it, Muon multiplies in bfloat16; Lightning steps there
            self.manual_backward(loss / self.accumulated)
            if (batch_idx + 1) % self.accumulated and not self.trainer.is_last_batch:
                return
            for optimizer in self.optimizers():
                optimizer.step()
        for scheduler in self.lr_schedulers() or ():
            scheduler.step()

    def configure_optimizers(self):
        if not self.automatic_optimization:
            optimizers = by_hand(self)
            factors = (lambda step: 0.9**step, lambda step: 1 / (1 + step))
            schedules = [LambdaLR(*pair) for pair in zip(optimizers, factors, strict=True)]
            return optimizers, schedules if self.specs[1] else []
        optimizer = build_optimizer(self, self.specs[0])
        if self.specs[1] is None:
            return optimizer
        return [optimizer], [build_schedule(optimizer, self.specs[1], self.trainer)]

    def on_before_optimizer_step(self, optimizer):
        self.rates.append([group["lr"] for group in optimizer.param_groups])


def by_hand(module, **fused):
    """Both optimizers as one writes them, without any helper."""
    named = {name.replace("_orig_mod.", ""): one for name, one in module.named_parameters()}
    matrices = {name: one for name, one in named.items() if name.startswith("blocks.") and one.ndim == 2}
    rest = {name: one for name, one in named.items() if name not in matrices}
    exempt = {name: one for name, one in rest.items() if "norm" in name or "bias" in name}
    groups = [
        {"params": [one for name, one in rest.items() if name not in exempt]},
        {"params": list(exempt.values()), "weight_decay": 0.0},
    ]
    kind = getattr(torch.optim, KIND)
    return [kind(matrices.values(), lr=0.02), torch.optim.AdamW(groups, lr=3e-3, weight_decay=0.01, **fused)]


def weights(module):
    return {name.replace("_orig_mod.", ""): value.clone() for name, value in module.state_dict().items()}


WAYS = {
    "fp32": {},
    "bf16": {"precision": "bf16-mixed"},
    "fp16": {"plugins": real_fp16},
    "accumulation": {"accumulate_grad_batches": 4},
    "compile": {"compiled": True},
}


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # by torch.compile
@pytest.mark.parametrize("way", WAYS)
def test_is_the_optimizers_stepped_by_hand(way):
    options = {name: value() if callable(value) else value for name, value in WAYS[way].items()}
    compiled = options.pop("compiled", False)
    automatic = Small(compiled=compiled)
    trainer = fit(automatic, max_epochs=2, **options)
    manual = Small(by_hand=True, accumulated=options.pop("accumulate_grad_batches", 1), compiled=compiled)
    if "plugins" in options:
        options["plugins"] = real_fp16()
    other = fit(manual, max_epochs=2, **options)
    assert same(weights(automatic), weights(manual))
    assert not same(weights(automatic), weights(Small()))
    ours, theirs = trainer.optimizers[0].state, {p: s for one in other.optimizers for p, s in one.state.items()}
    names = {parameter: name for name, parameter in manual.named_parameters()}
    states = {names[p]: state for p, state in theirs.items()}
    assert same(
        {name: ours[p] for name, p in automatic.named_parameters()},
        {name: states.get(name, {}) for name, _ in automatic.named_parameters()},  # SGD has none
    )


def test_a_schedule_for_each_part_and_one_for_all():
    schedule = ScheduleSpec("exponential", gamma=0.9, rest=ScheduleSpec("inverse_sqrt", warmup=2))
    module = Small(schedule=schedule)
    fit(module)
    rest = ScheduleSpec("inverse_sqrt", warmup=2).factors(9)
    assert [rates[0] for rates in module.rates] == pytest.approx([0.02 * 0.9**step for step in range(10)])
    assert [rates[1] for rates in module.rates] == pytest.approx([3e-3 * factor for factor in rest])
    module = Small(schedule=ScheduleSpec("exponential", gamma=0.9))
    fit(module)
    assert [rates[1] for rates in module.rates] == pytest.approx([3e-3 * 0.9**step for step in range(10)])


def test_schedules_of_parts_are_those_by_hand():
    module, manual = Small(schedule=ScheduleSpec("constant")), Small(by_hand=True, schedule=True)
    built = module.configure_optimizers

    def both():
        (optimizer,), (config,) = built()
        config["scheduler"].factor = [lambda step: 0.9**step, lambda step: 1 / (1 + step)]
        return [optimizer], [config]

    module.configure_optimizers = both
    fit(module)
    fit(manual)
    assert same(weights(module), weights(manual))


def test_more_schedules_than_optimizers_are_refused():
    schedule = ScheduleSpec("constant", rest=ScheduleSpec("constant"))
    words = "describes 2 schedules, and there are only 1 optimizers: give the OptimizerSpec"
    with pytest.raises(ValueError, match=words):
        build_schedule(build_optimizer(Small(), OptimizerSpec()), schedule, Trainer(**QUIET))


def grad_scaled_by_hand(module, batches, scale, norm=None, **fused):
    """Train in fp16 with one GradScaler: a step that overflows in one optimizer is a step of none."""
    scaler, optimizers = torch.amp.GradScaler("cpu", init_scale=scale), by_hand(module, **fused)
    skipped = 0
    for pixels, labels in batches:
        with torch.autocast("cpu", torch.float16):
            loss = nn.functional.cross_entropy(module(pixels), labels)
        for optimizer in optimizers:
            optimizer.zero_grad()
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.unscale_(optimizer)
        finite = all(one.grad.isfinite().all() for one in module.parameters())
        skipped += not finite
        if norm is not None and finite:
            nn.utils.clip_grad_norm_(in_order(optimizers), norm)
        for optimizer in optimizers if finite else ():
            optimizer.step()
        scaler.update()
    return skipped


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("clips", [False, True])
def test_a_skipped_step_skips_all(fused, clips):
    rest = OptimizerSpec(lr=3e-3, fused=fused)
    module, oracle = Small(OptimizerSpec(KIND, lr=0.02, only=ONLY, rest=rest)), Small()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    plugin = real_fp16()
    plugin.scaler = scaler
    callbacks = [GradientClipping(0.1)] if clips else []
    trainer = fit(module, *callbacks, max_epochs=2, plugins=plugin)
    assert "fused" in trainer.optimizers[0].parts["AdamW"].defaults
    skipped = grad_scaled_by_hand(oracle, [*loader()] * 2, 2.0**24, norm=0.1 if clips else None, fused=fused)
    assert 0 < skipped < 20
    assert same(weights(module), weights(oracle))


def in_order(optimizers):
    return [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]


@pytest.mark.parametrize("on_nonfinite", ["ignore", "skip", "raise"])
def test_is_clipped_as_one(on_nonfinite):
    module = Small()
    clipping = GradientClipping(0.1, on_nonfinite=on_nonfinite)
    trainer = fit(module, clipping)
    oracle = Small()
    optimizers = by_hand(oracle)
    for pixels, labels in loader():
        for optimizer in optimizers:
            optimizer.zero_grad()
        nn.functional.cross_entropy(oracle(pixels), labels).backward()
        nn.utils.clip_grad_norm_(in_order(optimizers), 0.1)
        for optimizer in optimizers:
            optimizer.step()
    assert same(weights(module), weights(oracle))
    assert trainer.callback_metrics["grad_norm/clipped_fraction"] == 1


def test_a_step_that_clipping_skips_leaves_all_as_it_was():
    module = Small()
    before = {}

    def spoil(trainer, module):
        if trainer.global_step == 5:
            before.update(weights=weights(module), state=copy.deepcopy(trainer.optimizers[0].state_dict()["state"]))
            module.embedding.weight.grad.fill_(torch.nan)

    def check(trainer, module, *_):
        if trainer.global_step == 6:
            assert same(weights(module), before["weights"])
            assert same(trainer.optimizers[0].state_dict()["state"], before["state"])

    hooks = Hooks(on_after_backward=spoil, on_train_batch_end=check)
    trainer = fit(module, hooks, GradientClipping(0.1, on_nonfinite="skip"))
    assert before
    assert trainer.callback_metrics["grad_norm/skipped_steps"] == 1


def test_nothing_more_is_read_from_the_device():
    def reads(module):
        with HostReads() as counted:
            fit(module)
        return counted.count

    reads(Small())  # the first fit of a process reads some more
    assert reads(Small()) == reads(Small(by_hand=True)) > 0


class Halves(Net):
    """One optimizer, or two of its kind as one, whose steps are the same bits."""

    def __init__(self, kind="halves", **arguments):
        super().__init__(**arguments)
        self.kind = kind

    def configure_optimizers(self):
        parameters = list(self.parameters())
        adam = partial(torch.optim.AdamW, lr=0.01, weight_decay=0.1)
        if self.kind == "whole":
            return adam([{"params": parameters[:2]}, {"params": parameters[2:]}])
        return CombinedOptimizer([adam(parameters[:2]), adam(parameters[2:])])


def both_ways(*callbacks, **trainer):
    """Fit with one optimizer and with its halves, and return both modules, which must be equal."""
    modules = []
    for kind in ("whole", "halves"):
        torch.manual_seed(0)
        modules.append(Halves(kind, dropout=0.2))
        fit(modules[-1], *[make() for make in callbacks], **{"max_epochs": 3, **trainer})
    assert same(*(dict(one.state_dict()) for one in modules))
    return modules


def swa():
    return StochasticWeightAveraging(swa_lrs=0.05, swa_epoch_start=1)


@cases(
    "callback, options",
    pytest.param(swa, {}, id="stochastic weight averaging"),
    pytest.param(lambda: Microbatching(2), {}, id="microbatches"),
    pytest.param(lambda: Microbatching(2), {"accumulate_grad_batches": 3}, id="accumulated microbatches"),
    pytest.param(lambda: GradualUnfreezing({0: "net.4.*", 1: "*"}), {}, id="unfreezing"),
    pytest.param(lambda: GradientAccumulationScheduler({0: 1, 1: 4}), {}, id="accumulation that changes"),
    pytest.param(Hooks, {"strategy": "ddp_fork", "devices": 2}, id="DDP"),
    pytest.param(Hooks, {"gradient_clip_val": 0.1}, id="Lightning's clipping"),
)
def test_halves_are_a_whole(callback, options):
    both_ways(callback, **options)


@pytest.mark.filterwarnings("ignore:You're using the WeightAveraging callback")
def test_halves_are_a_whole_in_averages():
    if not hasattr(lightning_callbacks, "EMAWeightAveraging"):
        pytest.skip("Lightning 2.6 has EMAWeightAveraging")
    both_ways(lambda: lightning_callbacks.EMAWeightAveraging(decay=0.9))


@pytest.mark.parametrize("kind", ["adam", KIND])
def test_resumes_from_a_checkpoint_of_lightning(kind, tmp_path):
    make = (
        Halves if kind == "adam" else partial(Small, schedule=ScheduleSpec("wsd", rest=ScheduleSpec("warmup_cosine")))
    )
    torch.manual_seed(0)
    whole = make()

    def save(trainer, *_):
        if trainer.current_epoch == 0:
            trainer.save_checkpoint(tmp_path / "one.ckpt")

    fit(whole, Hooks(on_train_epoch_end=save), max_epochs=3)
    torch.load(tmp_path / "one.ckpt", weights_only=True)
    resumed = make()
    trainer = Trainer(**QUIET, max_epochs=3)
    trainer.fit(resumed, loader(), ckpt_path=tmp_path / "one.ckpt")
    assert same(dict(resumed.state_dict()), dict(whole.state_dict()))
    first = next(iter(trainer.optimizers[0].parts.values()))
    assert first.param_groups[0] is trainer.optimizers[0].param_groups[0]
    assert first.state is trainer.optimizers[0].state


def test_a_killed_run_resumes_in_the_middle_of_an_epoch(tmp_path, lightning_log):
    def run(folder, killed=False):
        def kill(trainer, *_):
            if killed and trainer.global_step == 17:
                os.kill(os.getpid(), signal.SIGKILL)

        seed_everything(1, verbose=False)
        module = Small(schedule=ScheduleSpec("wsd", rest=ScheduleSpec("constant")))
        callbacks = AutoResume(folder, every_n_train_steps=5), Hooks(on_train_batch_end=kill)
        trainer = fit(module, *callbacks, data=loader(shuffle=True), max_epochs=3)
        return dict(module.state_dict()), trainer.optimizers[0].state_dict()

    with pytest.raises(SystemExit):
        fork(lambda rank: run(tmp_path / "killed", killed=True), 1)
    resumed = run(tmp_path / "killed")
    assert any("resumes at epoch 1, step 15" in message for _, message in lightning_log)
    assert same(resumed, run(tmp_path / "whole"))


def test_two_fits_with_one_module():
    module, manual = Small(), Small(by_hand=True)
    for one in (module, manual, module, manual):
        fit(one)
    assert same(weights(module), weights(manual))


def test_schedulers_of_torch_reach_the_parts():
    module = Small()
    optimizer = build_optimizer(module, SPEC)
    plateau = ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
    for loss in (1.0, 2.0):
        plateau.step(loss)
    assert [group["lr"] for part in optimizer.parts.values() for group in part.param_groups] == [0.01, 1.5e-3, 1.5e-3]
    cycle = OneCycleLR(optimizer, [0.1, 0.2, 0.2], total_steps=10, cycle_momentum=False)
    assert optimizer.parts["AdamW"].param_groups[0]["lr"] == cycle.get_last_lr()[1] == pytest.approx(0.008)
    if HAS_MUON:
        with pytest.raises(ValueError, match="must support momentum or beta"):
            OneCycleLR(build_optimizer(module, SPEC), 0.1, total_steps=10)


def test_is_copied_and_pickled_with_what_is_shared():
    module = Small()
    optimizer = build_optimizer(module, SPEC)
    module(digits()[:4][0]).sum().backward()
    optimizer.step()
    for other in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert list(other.parts) == [KIND, "AdamW"]
        for part in other.parts.values():
            assert part.state is other.state
            assert all(any(group is one for one in other.param_groups) for group in part.param_groups)
        before = [one.detach().clone() for group in other.param_groups for one in group["params"]]
        for group in other.param_groups:
            for one in group["params"]:
                one.grad = torch.ones_like(one)
        other.step()
        after = [one for group in other.param_groups for one in group["params"]]
        assert not any(torch.equal(*pair) for pair in zip(before, after, strict=True))
    buffer = io.BytesIO()
    torch.save(optimizer.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    other = build_optimizer(Small(), SPEC)
    other.load_state_dict(state)
    assert same(other.state_dict(), optimizer.state_dict())


def test_hooks_of_all_are_called():
    module = Small()
    optimizer = build_optimizer(module, SPEC)
    called = []
    for name, one in {"all": optimizer, **optimizer.parts}.items():
        one.register_step_pre_hook(lambda *_, name=name: called.append(name))
    optimizer.register_state_dict_post_hook(lambda one, state: state.update(more=1))
    optimizer.register_load_state_dict_pre_hook(lambda one, state: called.append(state.pop("more")))
    loss = optimizer.step(lambda: called.append("closure") or torch.ones(()))
    optimizer.load_state_dict(optimizer.state_dict())
    assert called == ["all", "closure", KIND, "AdamW", 1]
    assert loss == 1


def test_a_group_that_is_added_names_its_part():
    module = Small()
    optimizer = build_optimizer(module, SPEC)
    new = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(ValueError, match=f"give the group 'optimizer': '{KIND}' or 'AdamW', got None"):
        optimizer.add_param_group({"params": [new]})
    optimizer.add_param_group({"params": [new], "lr": 0.5, "optimizer": "AdamW"})
    new.grad = torch.ones(2, 2)
    optimizer.step()
    assert torch.allclose(new, torch.full((2, 2), 1 - 0.5 - 0.5 * 0.01), atol=1e-3)
    assert optimizer.parts["AdamW"].param_groups[-1] is optimizer.param_groups[-1]


def test_a_finetuning_callback_of_lightning_hears_what_to_write():
    class Unfreezing(BaseFinetuning):
        def freeze_before_training(self, pl_module):
            self.freeze(pl_module.embedding)

        def finetune_function(self, pl_module, epoch, optimizer):
            self.unfreeze_and_add_param_group(pl_module.embedding, optimizer, lr=0.5)

    with pytest.raises(ValueError, match="cannot know which of its parts steps a new group"):
        fit(Small(), Unfreezing())


def test_groups_that_are_split_stay_with_their_part():
    callback = GradualUnfreezing({0: "*"}, lr_multipliers={"embedding.*": 0.1, "blocks.0.*": 0.5})
    trainer = fit(Small(), callback)
    rates = {group["name"]: (group["optimizer"], group["lr"]) for group in trainer.optimizers[0].param_groups}
    assert rates[f"{KIND} x0.5"] == (KIND, 0.01)
    assert rates["AdamW x0.1"] == ("AdamW", pytest.approx(3e-4))


def test_rates_by_layer_and_groups_are_those_of_a_plain_spec():
    options = {"layer_decay": 0.5, "weight_decay": 0.1, "groups": {"blocks.1.*": {"lr": 0.5}}}
    module = Small()
    plain = {p: group for group in parameter_groups(module, OptimizerSpec(lr=0.02, **options)) for p in group["params"]}
    rest = OptimizerSpec(lr=0.02, **options)
    spec = OptimizerSpec(KIND, lr=0.02, only=ONLY, rest=rest, **options)
    groups = parameter_groups(module, spec)
    assert len({group["name"] for group in groups}) == len(groups)
    for group in groups:
        for parameter in group["params"]:
            assert (group["lr"], group["weight_decay"]) == (plain[parameter]["lr"], plain[parameter]["weight_decay"])
    assert sum(len(group["params"]) for group in groups) == len(plain)


def test_three_optimizers_of_two_kinds(lightning_log, tmp_path):
    last = OptimizerSpec("SGD", lr=0.1)
    spec = OptimizerSpec(lr=1e-3, only="embedding.*", rest=OptimizerSpec(lr=1e-2, only=["head.*"], rest=last))
    module = Small(spec)
    trainer = fit(module, LearningRateMonitor(), logger=CSVLogger(tmp_path), log_every_n_steps=1)
    assert list(trainer.optimizers[0].parts) == ["AdamW", "AdamW 2", "SGD"]
    logged = next(tmp_path.rglob("metrics.csv")).read_text()
    assert "lr-CombinedOptimizer/AdamW 2, no decay" in logged


@pytest.mark.skipif(not HAS_MUON, reason="torch 2.9 has Muon")
def test_says_which_optimizer_steps_what(lightning_log):
    build_optimizer(Small(), SPEC)
    said = [message for _, message in lightning_log]
    assert any(
        "Muon with 1 parameter group: Muon (4,096 values). It steps 8 parameters: blocks.0." in one for one in said
    )
    assert any(
        "8 parameters that `only` names and that are not 2-D go to `rest`: blocks.0.self_attn" in m for m in said
    ) or any(
        "4 parameters that `only` names and that are not 2-D go to `rest`: blocks.0.norm1.weight (16)" in m
        for m in said
    )
    assert any(
        "AdamW with 2 parameter groups: " in one and "It steps 20 parameters: embedding.weight" in one for one in said
    )


@pytest.mark.skipif(not HAS_MUON, reason="torch 2.9 has Muon")
@cases(
    "spec, words",
    ({}, r"which of them is for you to say"),
    ({"rest": OptimizerSpec()}, r"blocks\.\*\.up\.weight: 2 of 32x16\n"),
    ({"rest": OptimizerSpec()}, r"\n  only=\['blocks.\*.weight'\]  # without the first and"),
    ({"rest": OptimizerSpec()}, r"\n  only=\['embedding.weight', .*, 'head.weight'\]  # all of them"),
    ({"only": ["bloks.*"], "rest": OptimizerSpec()}, r"pattern 'bloks.\*' matches none of the 28 parameters: embed"),
    ({"only": ["blocks.*"]}, r"20 trainable .*would have no optimizer.*only=\['blocks.\*'\]: embedding"),
    (
        {"only": ["*.bias"], "rest": OptimizerSpec()},
        r"Muon has nothing to step: only=\['\*.bias'\] holds no trainable 2-D weights, all it takes: embedding.bias",
    ),
    (
        {"only": ["*"], "rest": OptimizerSpec("SGD", only=["*"], rest=OptimizerSpec())},
        "AdamW has nothing to step: what the others leave holds no trainable parameters",
    ),
    (
        {"only": ["blocks.*"], "rest": OptimizerSpec("LBFGS", weight_decay=0)},
        "cannot step LBFGS as one of several: its step computes the gradients several times",
    ),
    (
        {"only": ["blocks.*"], "rest": OptimizerSpec(groups={"blocks.0.linear1.weight": {"lr": 1.0}})},
        "pattern 'blocks.0.linear1.weight' matches none",
    ),
)
def test_a_model_refuses_a_spec(spec, words):
    with pytest.raises(ValueError, match=words):
        build_optimizer(Small(), OptimizerSpec("Muon", lr=0.02, **spec))


@pytest.mark.skipif(not HAS_MUON, reason="torch 2.9 has Muon")
def test_says_where_convolutions_and_tied_weights_go(lightning_log):
    """Muon takes 2-D weights; the embedding is stepped by the optimizer that names the layer that shares it."""
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
    net[2].weight = net[1].weight
    with pytest.raises(ValueError, match=r"no trainable 2-D weights, all it takes: 0.weight \(2x1x3x3\) is for rest"):
        build_optimizer(net, OptimizerSpec("Muon", only=["0.weight"], rest=OptimizerSpec()))
    build_optimizer(net, OptimizerSpec("Muon", only=["2.weight"], rest=OptimizerSpec()))
    assert any("It steps 1 parameter: 1.weight = 2.weight." in message for _, message in lightning_log)
    assert {spec.decay for spec in (OptimizerSpec("Muon", only=["*"]), OptimizerSpec("Muon", weight_decay=0))} == {
        0.1,
        0,
    }


@pytest.mark.skipif(not HAS_MUON, reason="torch 2.9 has Muon")
def test_what_it_proposes_works():
    """Each line of the error, given as it stands."""
    nets = [nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 2)), Small(), nn.Linear(4, 4)]
    for net in nets:
        with pytest.raises(ValueError, match="takes matrices only") as error:
            build_optimizer(net, OptimizerSpec("Muon", lr=0.02))
        lines = [line.split("#")[0].strip() for line in str(error.value).splitlines() if "only=[" in line]
        assert len(lines) == 1 + (net is not nets[2])
        for line in lines:
            spec = eval(f"OptimizerSpec('Muon', lr=0.02, {line}, rest=OptimizerSpec())")
            assert build_optimizer(net, spec).parts["Muon"].param_groups
    with pytest.raises(ValueError, match="Muon takes matrices only, and Conv2d has none that it could train"):
        build_optimizer(nn.Conv2d(1, 1, 1), OptimizerSpec("Muon"))


@cases(
    "make, error, words",
    (lambda a, b: CombinedOptimizer([]), ValueError, "needs one optimizer at least"),
    (
        lambda a, b: CombinedOptimizer([a, None]),
        TypeError,
        "takes a list of torch.optim.Optimizer, got a NoneType in it",
    ),
    (lambda a, b: CombinedOptimizer([a, a]), ValueError, "more than one parameter group"),
    (lambda a, b: CombinedOptimizer([CombinedOptimizer([a]), b]), ValueError, "give its parts themselves"),
)
def test_refuses(make, error, words):
    parameters = nn.Linear(2, 2).parameters()
    a, b = (torch.optim.SGD([one], lr=0.1) for one in parameters)
    with pytest.raises(error, match=words):
        make(a, b)


def test_refuses_one_that_saves_its_state_in_its_own_form():
    class Own(torch.optim.SGD):
        def state_dict(self):
            return {"own": super().state_dict()}

    with pytest.raises(ValueError, match="cannot step Own as one of several: it saves its state in a form of its own"):
        CombinedOptimizer([Own(nn.Linear(2, 2).parameters(), lr=0.1)])


def test_refuses_the_state_of_other_optimizers():
    def make(*kinds):
        parameters = nn.Linear(2, 2).parameters()
        return CombinedOptimizer([kind([one], lr=0.1) for kind, one in zip(kinds, parameters, strict=True)])

    saved = make(torch.optim.SGD, torch.optim.Adam).state_dict()
    other = make(torch.optim.Adam, torch.optim.SGD)
    with pytest.raises(ValueError, match=r"\['SGD', 'Adam'\] step its parameter groups, and here \['Adam', 'SGD'\]"):
        other.load_state_dict(saved)


def test_muon_needs_torch_2_9(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    with pytest.raises(ValueError, match=r"Muon needs torch 2.9 or newer, and this is torch 2\."):
        OptimizerSpec("Muon")


def test_the_mixin_saves_it_as_plain_values(tmp_path):
    class Module(TricksMixin, LightningModule):
        def __init__(self, tricks: Tricks | None = None):
            super().__init__(tricks=tricks)
            self.save_hyperparameters()
            self.net = Small()

        def training_step(self, batch):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    only = [pattern.replace("^blocks", "^net.blocks").replace("blocks.*", "net.blocks.*") for pattern in ONLY]
    tricks = Tricks(
        optimizer=OptimizerSpec(KIND, lr=0.02, only=only, rest=OptimizerSpec(lr=3e-3)),
        schedule={"kind": "wsd", "rest": {"kind": "constant"}},
    )
    module = Module(tricks)
    trainer = fit(module)
    assert [type(one).__name__ for one in trainer.optimizers[0].parts.values()] == [KIND, "AdamW"]
    assert Tricks(**module.hparams.tricks) == tricks
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    saved = torch.load(tmp_path / "one.ckpt", weights_only=True)
    assert saved["hyper_parameters"]["tricks"]["optimizer"]["rest"]["lr"] == 3e-3
    again = Module.load_from_checkpoint(tmp_path / "one.ckpt")
    assert again.tricks == tricks


def test_yaml(monkeypatch, tmp_path):
    class Configured(Small):
        def __init__(self, optimizer: OptimizerSpec, schedule: ScheduleSpec | None = None):
            super().__init__(optimizer, schedule)

    (tmp_path / "config.yaml").write_text(
        f"""
model:
  optimizer:
    name: {KIND}
    lr: 0.02
    only: {json.dumps(SPEC.only)}
    rest: {{name: AdamW, lr: 0.003}}
  schedule:
    kind: wsd
    rest: {{kind: constant}}
"""
    )
    monkeypatch.setattr(sys, "argv", ["program", "--config", str(tmp_path / "config.yaml")])
    cli = LightningCLI(Configured, run=False, save_config_callback=None, seed_everything_default=False)
    assert cli.model.specs == (SPEC, ScheduleSpec("wsd", rest=ScheduleSpec("constant")))
    assert cli.parser.dump(cli.config)


class Sharded(Small):
    def configure_model(self):
        if self.device_mesh is not None:
            from torch.distributed.fsdp import fully_shard

            for block in (*self.blocks, self):
                fully_shard(block, mesh=self.device_mesh["data_parallel"])


@pytest.mark.skipif(Version(torch.__version__) < Version("2.7"), reason="FSDP2 of torch 2.6 needs an accelerator")
@pytest.mark.parametrize(("first", "apart"), [(KIND, 5e-2), ("SGD", 1e-9)])  # Muon multiplies in bfloat16
def test_fsdp2_trains_as_one_process_and_resumes(first, apart, tmp_path):
    spec = replace(SPEC, name=first, kwargs={"momentum": 0.9})  # torch resumes no shards without a state

    def sharded(epochs, path=None):
        module, strategy = Sharded(spec), ModelParallelStrategy(2, 1)
        trainer = Trainer(**QUIET, max_epochs=epochs, devices=2, strategy=strategy, use_distributed_sampler=False)
        trainer.fit(module, loader(), ckpt_path=path)
        return trainer, {name: value.full_tensor() for name, value in module.state_dict().items()}

    def work(rank):
        _, whole = sharded(2)
        trainer, _ = sharded(1)
        trainer.save_checkpoint(tmp_path / "sharded.ckpt")
        trainer, resumed = sharded(2, tmp_path / "sharded.ckpt")
        torch.save((whole, resumed, list(trainer.optimizers[0].parts)), tmp_path / f"{rank}.pt")

    fork(work, 2)
    whole, resumed, parts = torch.load(tmp_path / "0.pt", weights_only=True)
    assert parts == [first, "AdamW"]
    assert same(resumed, whole)
    module = Small(spec)
    fit(module, max_epochs=2)
    alone, start = weights(module), weights(Small())
    moved, error = (sum((alone[n] - other[n]).square().sum() for n in alone) for other in (start, whole))
    assert error < apart * moved


def net():
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 10))


@pytest.mark.parametrize("first", [KIND, "SGD"])
def test_members_of_an_ensemble_are_trained_by_it(first):
    spec = OptimizerSpec(first, lr=0.05, only=["2.weight"], rest=OptimizerSpec(lr=0.01))
    torch.manual_seed(0)
    ensemble = VotingClassifier(net, 3, optimizer=spec, seed=1)
    fit(ensemble)
    alone = VotingClassifier(net, 3, optimizer=spec, seed=1, vectorize=False)
    fit(alone)
    left, right = ensemble.state_dict(), alone.state_dict()
    assert all(torch.allclose(left[name], right[name], 1e-3, 1e-5) for name in left)
    assert len(ensemble.trainer.optimizers[0].parts) == 2
    again = type(ensemble)(**{**ensemble.hparams, "estimator": net})
    assert again.hparams.optimizer == ensemble.hparams.optimizer


def test_cycles_of_an_ensemble_scale_the_rates_of_all():
    spec = OptimizerSpec(KIND, lr=0.05, only=["2.weight"], rest=OptimizerSpec(lr=0.01))
    ensemble = FastGeometricClassifier(net, 2, optimizer=spec, cycle=1, lr_1=0.025, lr_2=0.005, base_epochs=1)
    seen = []
    fit(
        ensemble,
        Hooks(
            on_train_batch_start=lambda trainer, *_: seen.append([g["lr"] for g in trainer.optimizers[0].param_groups])
        ),
        max_epochs=3,
    )
    assert all(first == pytest.approx(5 * second) for first, second, *_ in seen)
    assert min(first for first, *_ in seen) == pytest.approx(0.005)
