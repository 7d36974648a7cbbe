"""Steps whose gradients are not finite: left out exactly, on all ranks alike, without a host read where possible."""

import copy
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from lightning_tricks import GradientClipping
from lightning_tricks.gradient_clipping import skip_step_, skip_step_on_device_, skips_on_device
from lightning_tricks.gradient_clipping.core.clip_state import ClipState, StepCounts
from lightning_tricks.gradient_clipping.core.methods import ClipResult
from tests.contract.lab import SETTINGS, full
from tests.small import HostReads, Net, cases, real_fp16, same

_OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1, fused=True),
    "momentum fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.5, fused=True),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def _train(make, bad_steps, with_skips=True):
    """A plain loop over six batches, of which the bad ones have a NaN; or a loop that does not know of them."""
    generator = torch.Generator().manual_seed(0)
    parameters = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in ((3, 2), (4,))]
    optimizer = make(parameters)
    for step in range(6):
        gradients = [torch.randn(p.shape, generator=generator) for p in parameters]
        bad = step in bad_steps
        if bad and not with_skips:
            continue
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient * (math.nan if bad else 1.0)
        if skips_on_device(optimizer):
            skip_step_on_device_(optimizer, torch.tensor(bad))
        elif bad:
            skip_step_(optimizer)
        optimizer.step()
    return parameters, optimizer


@pytest.mark.parametrize("bad_steps", [{0, 1}, {1, 2, 5}], ids=str)
@pytest.mark.parametrize("name", _OPTIMIZERS)
def test_a_loop_that_skips_is_a_loop_without_those_batches(name, bad_steps):
    (weights, optimizer), (expected, other) = (_train(_OPTIMIZERS[name], bad_steps, skips) for skips in (True, False))
    assert same([w.detach() for w in weights], [w.detach() for w in expected])
    assert same(optimizer.state_dict(), other.state_dict())
    assert not hasattr(optimizer, "found_inf")
    assert not optimizer._optimizer_step_post_hooks


class _Poisons(Net):
    """Two bad batches in a row: one rank's loss is NaN."""

    bad = (3, 4)

    def training_step(self, batch, batch_idx):
        return super().training_step(self.poisoned(batch, batch_idx), batch_idx)

    def poisoned(self, batch, batch_idx):
        is_bad = batch_idx in self.bad and self.global_rank == self.trainer.world_size - 1
        return (batch[0] * math.nan, batch[1]) if is_bad else batch


class _Spoils(Callback):
    """Puts a value into the gradient of a layer before the third step, on one rank."""

    def __init__(self, layer, value, rank=0):
        self.layer, self.value, self.rank = layer, value, rank

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step == 2:
            gradient = dict(pl_module.named_parameters())[self.layer].grad
            local = gradient.to_local() if hasattr(gradient, "to_local") else gradient
            if trainer.global_rank == self.rank:
                local.view(-1)[0] = self.value


class _Expects(Callback):
    """Asserts that some of the optimizers' steps change nothing, and the others something."""

    def __init__(self, *skipped):
        self.unchanged, self.skipped = [], skipped

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.before = self._now(trainer, pl_module)
        self.step = trainer.global_step

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.global_step > self.step:
            self.unchanged.append(same(self._now(trainer, pl_module), self.before))

    def on_train_end(self, trainer, pl_module):
        assert self.unchanged == [number in self.skipped for number in range(len(self.unchanged))]
        assert len(self.unchanged) in (3, 5, 10)
        assert all(full(p).isfinite().all() for p in pl_module.parameters())
        values = [v for k, v in trainer.callback_metrics.items() if k.endswith("skipped_steps")]
        assert {v.item() for v in values} == {len(self.skipped)}

    def _now(self, trainer, pl_module):
        weights = {name: full(value) for name, value in pl_module.state_dict().items()}
        states = [
            {key: full(v) if isinstance(v, torch.Tensor) else v for key, v in values.items()}
            for optimizer in trainer.optimizers
            for values in optimizer.state.values()
        ]
        return copy.deepcopy((weights, states))


@pytest.mark.trap("gradient_clipping: no skip on NaN in Lightning; zeroing gradients still moves weights")
@pytest.mark.sampled(2)
@pytest.mark.parametrize("setting", [n for n, s in SETTINGS.items() if not s.accelerator and n != "LBFGS"])
def test_skips_in_every_setting(lab, setting):
    chosen = SETTINGS[setting]
    # with accumulation both bad batches spoil a step: of batches 0 to 3, and 4 to 7
    expects = _Expects(0, 1) if setting == "accumulation" else _Expects(*_Poisons.bad)
    module = _Poisons(**chosen.net)
    ranks = lab.fit([GradientClipping(on_nonfinite="skip"), expects], chosen, module=module, max_epochs=1)
    assert len(ranks) == chosen.ranks
    assert all(same(rank.weights, ranks[0].weights) for rank in ranks)


@cases(
    "setting, value, layer",
    ("fp32", math.nan, "net.0.weight"),
    ("fp32", -math.inf, "net.4.bias"),
    ("bf16 fused", math.inf, "net.4.bias"),
    ("FSDP2", math.nan, "net.4.bias"),
    ("FSDP2", math.inf, "net.0.weight"),
)
def test_one_bad_value_anywhere_is_enough(lab, setting, value, layer):
    callbacks = [_Spoils(layer, value), GradientClipping(on_nonfinite="skip"), _Expects(2)]
    lab.fit(callbacks, SETTINGS[setting], max_epochs=1)


def test_ranks_agree_on_gradients_that_nobody_reduces(lab):
    """A parameter that FSDP2 does not shard has a gradient of its own on each rank."""

    class HalfSharded(Net):
        def configure_model(self):
            from torch.distributed.fsdp import fully_shard

            if self.net is None:
                self.build()
                fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])

    callbacks = [_Spoils("net.4.bias", math.nan, rank=1), GradientClipping(on_nonfinite="skip"), _Expects(2)]
    ranks = lab.fit(callbacks, SETTINGS["FSDP2"], module=HalfSharded(built_late=True), max_epochs=1)
    assert len(ranks) == 2


@pytest.mark.parametrize(("setting", "net"), [("fp32", {"optimization": "fused", "dropout": 0.1}), ("fp16", {})])
def test_fused_optimizers_and_scalers_skip_without_a_host_read(lab, setting, net):
    counts = []
    for callbacks in ([], [GradientClipping(on_nonfinite="skip")]):
        with HostReads() as reads:
            lab.fit(callbacks, SETTINGS[setting], module=_Poisons(**net), probe=False)
        counts.append(reads.count)
    assert counts[1] <= counts[0] + 2, "two at the end of the fit, to say how many steps were clipped and skipped"


class _Bad(Net):
    """In some batches a gradient of the last layer is Inf."""

    def __init__(self, when, **net):
        super().__init__(**net)
        self.when = when

    def on_after_backward(self):
        if self.when(self.trainer.fit_loop.total_batch_idx):
            self.net[4].weight.grad[0, 0] = math.inf


@pytest.mark.parametrize("setting", ["fp32", "bf16 fused", "DDP"])
def test_too_many_skips_in_a_row_stop_with_the_layers(lab, setting):
    chosen, callback = SETTINGS[setting], GradientClipping(on_nonfinite="skip", max_consecutive_skips=3)
    words = r"more than max_consecutive_skips=3 .*1 of 6 gradients are not finite at global step .*: net.4.weight\."
    with pytest.raises(Exception, match=words):
        lab.fit([callback], chosen, module=_Bad(lambda batch: batch >= 2, **chosen.net), probe=False)


def test_skips_with_good_steps_between_do_not_stop(lab):
    callback = GradientClipping(on_nonfinite="skip", max_consecutive_skips=1)
    lab.fit([callback], module=_Bad(lambda batch: batch % 2), probe=False)
    assert callback.report_parts(None)[0].skipped == 10


def test_layers_are_those_of_the_skips_also_where_the_host_learns_of_them_later(lab):
    """The counts are read every third step; the step at which they are is a good one."""
    chosen, callback = SETTINGS["bf16 fused"], GradientClipping(on_nonfinite="skip", max_consecutive_skips=3)
    with pytest.raises(Exception, match=r"1 of 6 gradients are not finite at global step 5 .*: net.4.weight\."):
        lab.fit([callback], chosen, module=_Bad(lambda batch: batch < 5, **chosen.net), probe=False)


def test_a_loss_that_is_nan_is_named(lab):
    with pytest.raises(RuntimeError, match=r'on_nonfinite="raise".*6 of 6 gradients are not finite at global step 3'):
        lab.fit([GradientClipping(on_nonfinite="raise")], module=_Poisons(), probe=False)


def test_the_search_of_a_scaler_does_not_raise(lab):
    """A scale of 2**40 overflows fp16 until it has been halved some thirty times."""
    plugin = real_fp16()
    plugin.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24)
    callback = GradientClipping(on_nonfinite="raise")
    lab.fit([callback], plugins=[plugin], probe=False)
    assert 0 < callback.state_dict()["counts"][0]["counts"][1] < 20


def test_raises_once_the_scaler_is_at_its_end(lab):
    plugin = real_fp16()
    plugin.scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    module = _Poisons()
    module.bad = range(3, 10)
    with pytest.raises(RuntimeError, match="6 of 6 gradients are not finite at global step"):
        lab.fit([GradientClipping(on_nonfinite="raise")], plugins=[plugin], module=module, probe=False)


def test_refuses_to_skip_lbfgs(lab):
    with pytest.raises(MisconfigurationException, match="cannot skip a step of LBFGS"):
        lab.fit([GradientClipping(on_nonfinite="skip")], SETTINGS["LBFGS"])


_SCHEDULERS = {
    "cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 20),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 30),
    "sequential": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o,
        [torch.optim.lr_scheduler.LinearLR(o, 0.1, 1, 4), torch.optim.lr_scheduler.CosineAnnealingLR(o, 9)],
        milestones=[4],
    ),
    "lambda": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
}


class _Scheduled(_Poisons):
    def __init__(self, make, bad, optimization="adamw"):
        super().__init__(optimization)
        self.make, self.bad = make, bad

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": self.make(optimizer), "interval": "step"}]


class _Rates(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        group = trainer.optimizers[0].param_groups[0]
        self.seen.append((group["lr"], group.get("betas")))


@pytest.mark.trap("gradient_clipping: global_step and LR schedulers advance on a skipped step")
@pytest.mark.parametrize("optimization", ["adamw", "fused"])
@pytest.mark.parametrize("name", _SCHEDULERS)
def test_holds_the_schedulers(lab, name, optimization):
    rates = []
    for bad, hold in (((), False), ((3, 4), True), ((3, 4), False)):
        watch = _Rates()
        clipping = GradientClipping(on_nonfinite="skip", hold_lr_on_skip=hold)
        module = _Scheduled(_SCHEDULERS[name], bad, optimization)
        lab.fit([clipping, watch], module=module, max_epochs=1, probe=False)
        rates.append(watch.seen)
    clean, held, advanced = rates
    assert held == [*clean[:4], clean[3], clean[3], *clean[4:8]]
    assert advanced == clean


def test_holds_a_scheduler_that_the_module_steps_itself(lab):
    class Manual(_Scheduled):
        def training_step(self, batch, batch_idx):
            optimizer, scheduler = self.optimizers(), self.lr_schedulers()
            for part in (batch_idx, batch_idx + 100):  # two steps a batch: the bad one first
                optimizer.zero_grad()
                poisoned = self.poisoned(batch, part)
                self.manual_backward(torch.nn.functional.cross_entropy(self.net(poisoned[0]), poisoned[1]))
                optimizer.step()
                scheduler.step()

    module = Manual(_SCHEDULERS["lambda"], (1,))
    module.automatic_optimization = False
    watch = _Rates()
    lab.fit(
        [GradientClipping(on_nonfinite="skip", hold_lr_on_skip=True), watch], module=module, max_epochs=1, probe=False
    )
    assert [lr for lr, _ in watch.seen[:4]] == pytest.approx([0.01 / n for n in (1, 3, 4, 6)])


@pytest.mark.parametrize("optimization", ["adamw", "fused"])
def test_a_scheduler_that_counts_epochs_is_not_held(lab, optimization):
    class ByEpoch(_Scheduled):
        def configure_optimizers(self):
            (optimizer,), (scheduled,) = super().configure_optimizers()
            return [optimizer], [scheduled | {"interval": "epoch"}]

    watch = _Rates()
    module = ByEpoch(lambda o: torch.optim.lr_scheduler.StepLR(o, 1, 0.5), (3, 9), optimization)  # 9 is the last batch
    lab.fit([GradientClipping(on_nonfinite="skip", hold_lr_on_skip=True), watch], module=module, probe=False)
    assert [lr for lr, _ in watch.seen] == [0.01] * 10 + [0.005] * 10


def test_a_second_fit_sees_no_trace(lab):
    callback = GradientClipping(on_nonfinite="skip", hold_lr_on_skip=True, max_consecutive_skips=5)
    for _ in range(2):
        module = _Scheduled(_SCHEDULERS["cosine"], (3, 9))
        lab.fit([callback], module=module, probe=False)
    assert callback.report_parts(None)[0].skipped == 4
    scheduler = module.trainer.lr_scheduler_configs[0].scheduler
    scheduler.last_epoch += 7
    stepped = copy.deepcopy(scheduler.state_dict())
    callback.on_train_batch_end(module.trainer, module, None, None, 0)
    assert scheduler.state_dict() == stepped, "no scheduler is held any more"
    assert not module.trainer.optimizers[0]._optimizer_step_post_hooks


def test_counts_are_restored_by_a_resume(lab):
    whole, first, second = (GradientClipping(on_nonfinite="skip", max_consecutive_skips=9) for _ in range(3))
    lab.fit([whole], module=_Poisons())
    lab.fit([first], module=_Poisons(), max_epochs=1, save_to=lab.folder / "one.ckpt")
    lab.fit([second], module=_Poisons(), ckpt_path=lab.folder / "one.ckpt")
    assert whole.report_parts(None)[0].skipped == 4
    assert same(second.state_dict(), whole.state_dict())


@pytest.mark.parametrize("policy", ["skip", "raise"])
def test_a_scaler_that_is_off_is_none(lab, policy):
    plugin = real_fp16()
    plugin.scaler = torch.amp.GradScaler("cpu", enabled=False)
    callback = GradientClipping(on_nonfinite=policy)
    if policy == "raise":
        with pytest.raises(RuntimeError, match="are not finite at global step 3"):
            lab.fit([callback], plugins=[plugin], module=_Poisons(), probe=False)
        return
    module = _Poisons()
    lab.fit([callback], plugins=[plugin], module=module, probe=False)
    assert callback.report_parts(None)[0].skipped == 4
    assert all(parameter.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize("fused", [True, False])
def test_a_skipped_step_that_never_comes_is_taken_back(fused):
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    state = ClipState()
    weight.grad = torch.tensor([1.0, torch.nan])
    state.skip_step_(optimizer, torch.tensor(True), by_scaler=False, schedulers=None)
    state.close()
    assert not hasattr(optimizer, "found_inf")
    assert not optimizer._optimizer_step_post_hooks
    weight.grad = torch.ones(2)
    optimizer.step()
    assert (weight < 1).all()


@pytest.mark.parametrize("fused", [True, False])
def test_a_step_that_is_skipped_twice_is_skipped_once(fused):
    weight = torch.ones(2, requires_grad=True)
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=fused)
    steps = []
    for _ in range(2):
        weight.grad = torch.tensor([1.0, torch.nan])
        _ = skip_step_on_device_(optimizer, torch.tensor(True)) if fused else skip_step_(optimizer)
    optimizer.register_step_post_hook(lambda *_: steps.append(weight.tolist()))  # of others, and later
    optimizer.step()
    assert steps == [[1.0, 1.0]]
    assert not optimizer._optimizer_step_pre_hooks
    weight.grad = torch.ones(2)
    optimizer.step()
    assert steps[1] < [1.0, 1.0]


@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), max_size=300), st.integers(1, 60))
@settings(max_examples=30)
def test_counts_are_those_of_counting_each_step_alone(steps, every):
    counts = StepCounts()
    clipped = skipped = consecutive = most = 0
    for number, flags in enumerate(steps, 1):
        was_clipped, is_nonfinite, is_truly_nonfinite = map(torch.tensor, flags)
        counts.add(torch.tensor(1.0), [ClipResult(was_clipped, 0)], is_nonfinite, is_truly_nonfinite)
        clipped, skipped = clipped + (flags[0] and not flags[1]), skipped + flags[1]
        consecutive = (consecutive + 1) * flags[2]
        most = max(most, consecutive)
        if number % every == 0:
            assert counts.consecutive == consecutive
            restored = StepCounts()
            restored.load_state_dict(counts.state_dict())
            counts = restored
    assert counts.state_dict()["counts"].tolist() == [clipped, skipped, consecutive, most]
    assert counts.steps == len(steps)


@given(st.lists(st.lists(st.sampled_from([0.5, 1.0, 2.0, math.inf, math.nan]), min_size=1, max_size=2), max_size=300))
@settings(max_examples=30)
def test_norms_are_counted_later_as_in_their_step(norms_by_step):
    counts, clipped, skipped = StepCounts(), 0, 0
    for norms in norms_by_step:  # of one group or two
        each = torch.tensor(norms)
        bounds = [1.0, torch.tensor(1.5)]
        counts.add(each.norm(), [ClipResult(*pair) for pair in zip(each, bounds, strict=False)])
        is_finite = all(map(math.isfinite, norms))
        skipped += not is_finite
        clipped += is_finite and any(norm > bound for norm, bound in zip(norms, bounds, strict=False))
    assert (counts.clipped, counts.skipped) == (clipped, skipped)


@pytest.mark.parametrize("fused", [True, False])
def test_what_the_host_knows_of_a_step(fused):
    """Whether it is skipped, where the host has to know it: without a fused optimizer, or for schedulers."""
    for nonfinite in (torch.tensor(True), torch.tensor(False)):
        for schedulers in (None, []):
            optimizer = torch.optim.AdamW([torch.ones(2, requires_grad=True)], fused=fused)
            state = ClipState()
            known = state.skip_step_(optimizer, nonfinite, by_scaler=False, schedulers=schedulers)
            assert known == (bool(nonfinite) and not (fused and schedulers is None))
            state.close()
