"""Microbatching against the same fit with whole batches."""

from __future__ import annotations

import gc
import re
import weakref
from copy import deepcopy
from dataclasses import dataclass
from itertools import count
from types import MappingProxyType

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import AutoResume, Microbatching
from tests.microbatching.models import Memory, Net, difference, fit, rows_of
from tests.small import Hooks, cases, real_fp16

WAYS = {
    "fixed": lambda: (Microbatching(3), None),
    "out of memory": lambda: (Microbatching(), Memory(3)),
    "out of memory in backward": lambda: (Microbatching(), Memory(3, "backward")),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@cases(
    "trainer",
    {},
    {"accumulate_grad_batches": 3},
    {"gradient_clip_val": 0.1},
    {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    ids=["plain", "accumulation", "norm", "value"],
)
def test_weights_and_logged_values_are_those_of_whole_batches(way, optimizer, trainer):
    whole = Net(optimizer=optimizer)
    expected = fit(whole, **trainer)
    microbatching, memory = WAYS[way]()
    cut = Net(memory, optimizer)
    got = fit(cut, microbatching, **trainer)
    assert difference(whole, cut) < 1e-12
    assert got.global_step == expected.global_step
    assert got.callback_metrics.keys() == expected.callback_metrics.keys()
    for name, value in expected.callback_metrics.items():
        assert torch.allclose(got.callback_metrics[name], value, rtol=1e-12), name
    assert cut.unused.grad is None
    assert microbatching.current_size == 3
    if memory is not None:
        assert memory.errors
        assert int(cut.seen) == 37 * 4  # what the attempts counted is undone


def test_lbfgs_evaluates_whole_batches():
    whole, cut = Net(optimizer="lbfgs"), Net(optimizer="lbfgs")
    fit(whole, max_steps=4)
    fit(cut, Microbatching(4), max_steps=4)
    assert difference(whole, cut) < 1e-6


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_loss_is_a_mean_or_a_sum(reduction):
    whole, cut = Net(reduction=reduction, optimizer="sgd"), Net(reduction=reduction, optimizer="sgd")
    fit(whole, gradient_clip_val=1.0)
    microbatching = Microbatching(4)
    fit(cut, microbatching, gradient_clip_val=1.0)
    assert difference(whole, cut) < 1e-12
    assert microbatching.state_dict()["reduction"] == reduction


def test_real_fp16_with_a_scaler_that_skips():
    def trained(*callbacks):
        module = Net(optimizer="sgd").float()
        data = [(x.float() * (1e30 if number == 12 else 1), y) for number, (x, y) in enumerate(rows_of())]
        plugin = real_fp16()
        trainer = fit(module, *callbacks, data=DataLoader(data, batch_size=10), plugins=[plugin])
        return module, plugin.scaler.get_scale(), trainer.global_step

    (whole, scale, steps), (cut, cut_scale, cut_steps) = trained(), trained(Microbatching(4))
    assert (cut_scale, cut_steps) == (scale, steps) == (1024 / 2**4, 16)
    assert 0 < difference(whole, cut) < 1e-3


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_another_try_draws_what_the_first_would_have_drawn(where):
    fit(found := Net(Memory(5, where), dropout=0.5), Microbatching())
    fit(given := Net(dropout=0.5), Microbatching(5))
    assert all(torch.equal(p, q) for p, q in zip(found.parameters(), given.parameters(), strict=True))


@pytest.mark.parametrize("microbatching", [Microbatching, lambda: Microbatching(10)])
def test_batches_that_fit_are_trained_bit_for_bit_as_without(microbatching):
    fit(whole := Net(dropout=0.5), accumulate_grad_batches=3)
    state = torch.get_rng_state()
    fit(other := Net(dropout=0.5), microbatching(), accumulate_grad_batches=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), other.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:Microbatching could not compare")
def test_a_single_row_that_does_not_fit():
    words = r"a single row runs out of memory \(OutOfMemoryError: CUDA out of memory. Tried"
    with pytest.raises(torch.OutOfMemoryError, match=words):
        fit(Net(Memory(0)), Microbatching())


def test_other_errors_are_raised_at_once_and_the_trainer_runs_on_without():
    class Broken(Net):
        def training_step(self, batch, batch_idx):
            if batch_idx == 2 and self.broken:
                raise ValueError("no memory was left out")
            return super().training_step(batch, batch_idx)

    module = Broken()
    module.broken = True
    with pytest.raises(ValueError, match="left out"):
        fit(module, Microbatching())
    module.broken = False
    fit(module, max_epochs=1)


class Trace(Callback):
    """Writes down each hook of a fit with the values that it gets."""

    def __init__(self):
        self.hooks = []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.hooks.append(("start", batch_idx, len(batch[0]), trainer.global_step))

    def on_before_zero_grad(self, trainer, pl_module, optimizer):
        self.hooks.append(("zero_grad", trainer.global_step))

    def on_before_backward(self, trainer, pl_module, loss):
        self.hooks.append(("before_backward", round(loss.item(), 10)))

    def on_after_backward(self, trainer, pl_module):
        self.hooks.append(("after_backward", round(pl_module.net[0].weight.grad.norm().item(), 10)))

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.hooks.append(("step", round(pl_module.net[0].weight.grad.norm().item(), 10)))

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        scores = outputs["scores"]
        assert not scores.requires_grad or scores.shape == (len(batch[0]), 3)
        self.hooks.append(
            ("end", round(outputs["loss"].item(), 10), tuple(scores.shape), round(scores.sum().item(), 8))
        )
        self.hooks.append({name: round(value.item(), 10) for name, value in trainer.callback_metrics.items()})


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("batches", [1, 3])
def test_hooks_see_the_whole_batch_once(way, batches):
    expected, got = Trace(), Trace()
    fit(Net(), expected, accumulate_grad_batches=batches)
    microbatching, memory = WAYS[way]()
    fit(Net(memory), got, microbatching, accumulate_grad_batches=batches)
    # an attempt that ran out of memory in its backward pass has called the hook before it
    once = [hook for hook, before in zip(got.hooks, [None, *got.hooks], strict=False) if hook != before]
    assert len(got.hooks) - len(once) == (memory is not None and memory.where == "backward")
    assert once == expected.hooks


class Logging(Net):
    """Logs in all the ways in which values are logged."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3)
        self.f1 = torchmetrics.F1Score("multiclass", num_classes=3, average="macro")
        self.errors = torchmetrics.MetricCollection([torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()])
        self.outputs = torchmetrics.CatMetric()

    def training_step(self, batch, batch_idx):
        loss, scores = self.loss(batch)
        right = (scores.argmax(1) == batch[1]).float()
        both = {"on_step": True, "on_epoch": True}
        self.log("mean", right.mean(), **both)
        self.log("given", right.mean(), batch_size=len(right), **both)
        self.log("constant", right.mean(), batch_size=10, **both)
        self.log("tokens", (right * batch[1]).sum() / (batch[1].sum() + 1e-9), batch_size=int(batch[1].sum()), **both)
        self.log("correct", right.sum(), reduce_fx="sum", **both)
        self.log("most", scores.max(), reduce_fx=max, **both)
        self.log("least", scores.min(), reduce_fx="min", **both)
        self.log("number", 0.1, **both)
        self.log("half", right.mean().half(), **both)
        self.log_dict({"a": loss * 2, "b": right.mean()}, on_epoch=True)
        self.accuracy(scores, batch[1])
        self.log("accuracy", self.accuracy, **both)
        self.log("accuracy_value", self.accuracy(scores, batch[1]), on_step=True)
        self.f1.update(scores, batch[1])
        self.log("f1", self.f1, on_step=False, on_epoch=True)
        self.errors(scores[:, 0].contiguous(), batch[1].double())
        self.log_dict(self.errors, **both)
        self.outputs.update(scores[:, 0].detach())
        return loss

    def on_train_epoch_end(self):
        self.log("outputs", self.outputs.compute().sum())
        self.log("rows", float(len(self.outputs.compute())))
        self.outputs.reset()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:You called .*self.log")
def test_every_kind_of_logged_value(way, tmp_path):
    def logged(module, *callbacks, name):
        logger = CSVLogger(tmp_path, name=name)
        fit(module, *callbacks, logger=logger, log_every_n_steps=1, max_epochs=2, data=rows_of(40))
        return tmp_path / name / "version_0" / "metrics.csv"

    microbatching, memory = WAYS[way]()
    expected = logged(Logging(), name="whole").read_text(encoding="utf-8").splitlines()
    got = logged(Logging(memory), microbatching, name="cut").read_text(encoding="utf-8").splitlines()
    assert got[0] == expected[0]
    assert len(got) == len(expected)
    for line, whole_line in zip(got[1:], expected[1:], strict=True):
        for key, value, other in zip(expected[0].split(","), line.split(","), whole_line.split(","), strict=True):
            assert (value == "") == (other == "")
            tolerance = 1e-3 if key.startswith("half") else 2e-6
            assert value == "" or float(value) == pytest.approx(float(other), rel=tolerance, abs=1e-7), key


class Plain(Net):
    """Returns its loss alone, and logs nothing."""

    def training_step(self, batch, batch_idx):
        return self.loss(batch)[0]


@dataclass
class Sample:
    x: torch.Tensor
    y: torch.Tensor


STRUCTURES = {
    "dict": lambda x, y: {"x": x, "y": y, "name": ["row"] * len(x), "scale": torch.tensor(1.0), "size": (8, 8)},
    "dataclass": Sample,
    "columns of samples": lambda x, y: (list(x), [{"y": b, "name": "row"} for b in y]),
}


def unpack(kind, batch):
    if kind == "dict":
        return batch["x"] * batch["scale"], batch["y"]
    if kind == "dataclass":
        return batch.x, batch.y
    return torch.stack(list(batch[0])), torch.stack([target["y"] for target in batch[1]])


@pytest.mark.parametrize("kind", STRUCTURES)
def test_structures_of_batches(kind):
    class Unpacking(Plain):
        def loss(self, batch):
            return super().loss(unpack(kind, batch))

    def collate(samples):
        return STRUCTURES[kind](torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]))

    whole, cut = Unpacking(), Unpacking()
    for module, callbacks in ((whole, []), (cut, [Microbatching(3)])):
        fit(module, *callbacks, data=DataLoader(rows_of(), batch_size=10, collate_fn=collate))
    assert difference(whole, cut) < 1e-12


class Consuming(Net):
    """Takes what it needs out of the batch, and scales it, in place or not."""

    in_place = False

    def training_step(self, batch, batch_idx):
        rows = batch["rows"].pop()
        return self.loss((rows.mul_(2) if self.in_place else rows * 2, batch.pop("labels")))[0]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("in_place", [False, True])
def test_batches_that_a_step_changes(way, in_place):
    def collate(samples):
        rows, labels = (torch.stack(column) for column in zip(*samples, strict=True))
        return {"rows": [rows], "labels": labels}

    data = DataLoader(rows_of(), batch_size=10, collate_fn=collate)
    microbatching, memory = WAYS[way]()
    whole, cut = Consuming(), Consuming(memory)
    whole.in_place = cut.in_place = in_place
    fit(whole, data=data)
    fit(cut, microbatching, data=data)
    assert difference(whole, cut) < 1e-12


@pytest.mark.filterwarnings("ignore:Trying to infer")
def test_batches_that_cannot_be_copied_are_trained_whole():
    class Unpacked(Net):
        def transfer_batch_to_device(self, batch, *_):
            return batch

        def training_step(self, batch, batch_idx):
            return self.loss((batch["rows"], batch["labels"]))[0]

    def collate(samples):
        rows, labels = (torch.stack(column) for column in zip(*samples, strict=True))
        return MappingProxyType({"rows": rows, "labels": labels, "tokens": [1] * 9})

    data = DataLoader(rows_of(), batch_size=10, collate_fn=collate)
    fit(whole := Unpacked(), data=data)
    fit(other := Unpacked(), Microbatching(), data=data)
    assert difference(whole, other) == 0


class Weighted(Plain):
    def loss(self, batch):
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1], torch.tensor([1.0, 2.0, 9.0]).double())
        return loss, None


class Contrastive(Plain):
    def loss(self, batch):
        features = nn.functional.normalize(self.net(batch[0]), dim=1)
        return nn.functional.cross_entropy(features @ features.T, torch.arange(len(features))), None


class SameLoss(Plain):
    """Equal losses whose gradients are not: the whole's value with the gradient of the largest row."""

    def loss(self, batch):
        losses = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none")
        return losses.mean().detach() + losses.max() - losses.max().detach(), None


class Teaching(Plain):
    def __init__(self):
        super().__init__()
        self.teacher = deepcopy(self.net).requires_grad_(False)

    def loss(self, batch):
        with torch.no_grad():
            for weight, own in zip(self.teacher.parameters(), self.net.parameters(), strict=True):
                weight.lerp_(own, 0.1)
        return nn.functional.mse_loss(self.net(batch[0]), self.teacher(batch[0] + 0.1)), None


class OwnWeights(Plain):
    """A weighted mean that calls no function of torch by which it is known."""

    def loss(self, batch):
        losses, weights = nn.functional.cross_entropy(self.net(batch[0]), batch[1], reduction="none"), batch[1] + 0.2
        return (losses * weights).sum() / weights.sum(), None


REFUSED = {
    "class weights": (Weighted, r"`cross_entropy` is a mean over the class weights of its targets, not over the rows"),
    "weights by hand": (OwnWeights, "the gradient of 3 rows, a mean, and that of 1 and 2 rows differ by"),
    "contrastive": (Contrastive, "the gradient of 3 rows, a .*, and that of 1 and 2 rows differ by"),
    "changed weights": (Teaching, r"`training_step` changes teacher\.0\.weight, .* \(let `on_train_batch_end`"),
    "another gradient": (SameLoss, r"the gradient of 3 rows, a mean, and that of 1 and 2 rows differ by"),
    "BatchNorm": (
        lambda: Plain(norm=nn.BatchNorm1d(16)),
        r"BatchNorm uses the statistics of each microbatch in net\.1\.",
    ),
}


@pytest.mark.parametrize("on_mismatch", ["raise", "warn"])
@pytest.mark.parametrize("kind", REFUSED)
def test_other_losses_are_refused_or_told(kind, on_mismatch):
    make, words = REFUSED[kind]
    module, warns = make(), on_mismatch == "warn"
    with pytest.warns(UserWarning, match=words) if warns else pytest.raises(MisconfigurationException, match=words):
        fit(module, Microbatching(3, on_mismatch=on_mismatch))
    if kind == "BatchNorm" and not warns:  # it is refused before any step
        assert int(module.net[1].num_batches_tracked) == 0


def test_one_row_at_a_time_is_compared():
    with pytest.raises(MisconfigurationException, match="the gradient of 2 rows"):
        fit(Contrastive(), Microbatching(1))


def trained_with(loss, *callbacks, data=None, compiled=False, **options):
    """A fit of a net with a loss of scores and labels, and the Trainer, also after the error of a refusal."""

    class Own(Net):
        def training_step(self, batch, batch_idx):
            return loss(self.net(batch[0]), batch[1])

    module = Own(optimizer="sgd")
    trained = torch.compile(module, backend="eager") if compiled else module
    try:
        fit(trained, *callbacks, data=data, **options)
    except MisconfigurationException as error:
        return module, str(error)
    return module, ""


@pytest.mark.parametrize("size", [1, 3])
def test_class_weights_are_refused_before_the_first_step_where_rows_are_alike(size):
    rows, labels = rows_of(370).tensors
    labels[:320] = 0
    loss = nn.CrossEntropyLoss(torch.tensor([1.0, 2.0, 9.0]).double())
    module, error = trained_with(loss, Microbatching(size), data=TensorDataset(rows, labels))
    assert "`cross_entropy` is a mean over the class weights" in error
    assert module.trainer.global_step == 0


@pytest.mark.parametrize(("compiled", "ignored"), [(False, -100), (True, -100), (False, 2)])
@pytest.mark.parametrize("function", ["cross_entropy", "nll_loss"])
def test_ignored_targets_are_refused_at_the_batch_in_which_they_make_a_difference(function, compiled, ignored):
    rows, labels = rows_of(100).tensors
    labels %= 2 if ignored == 2 else 3
    labels[::10] = ignored  # at first one in each batch of ten and each of its microbatches of five
    labels[5::10] = ignored
    labels[41] = ignored

    given = {} if ignored < 0 else {"ignore_index": ignored}

    def loss(scores, labels):
        scores = scores if function == "cross_entropy" else scores.log_softmax(1)
        return getattr(nn.functional, function)(scores, labels, **given)

    data = TensorDataset(rows, labels)
    module, error = trained_with(loss, Microbatching(5), data=data, compiled=compiled)
    figures = r"\(0\.6 for each row of one microbatch, 0\.8 of another\)"
    assert re.search(
        f"`{function}` is a mean over its targets that are not ignored, not over the rows {figures}", error
    )
    assert module.trainer.global_step == 4
    whole, _ = trained_with(loss, data=data, max_steps=4)
    assert difference(whole, module) < 1e-12  # nothing of the fifth batch was stepped


def of_each_row(scores, labels):
    losses = [
        nn.functional.cross_entropy(s[None], y[None], torch.tensor([1.0, 2, 9]).double())
        for s, y in zip(scores, labels, strict=True)
    ]
    return torch.stack(losses).mean()


def made_one_of_rows(scores, labels):
    weights = torch.tensor([1.0, 2, 9]).double()
    return nn.functional.cross_entropy(scores, labels, weights) * weights[labels].mean()


MEANS = {
    "BCE with weights": lambda s, y: nn.functional.binary_cross_entropy_with_logits(
        s, nn.functional.one_hot(y, 3).double(), torch.tensor([1.0, 2, 9]), pos_weight=torch.tensor(3.0)
    ),
    "triplets": lambda s, y: nn.functional.triplet_margin_loss(s, s.detach().roll(1, 1), s.detach().roll(2, 1)),
    "CTC": lambda s, y: nn.functional.ctc_loss(
        s[None].expand(6, -1, -1).log_softmax(2), (y % 2 + 1)[:, None], [6] * len(y), [1] * len(y)
    ),
    "probabilities with weights": lambda s, y: nn.functional.cross_entropy(
        s, nn.functional.one_hot(y, 3) * 0.9 + 1 / 30, torch.tensor([1.0, 2, 9]).double()
    ),
    "equal weights": lambda s, y: nn.functional.cross_entropy(s, y, torch.full((3,), 7.0).double()),
    "the last token of each row": lambda s, y: nn.functional.cross_entropy(
        s[:, :, None].expand(-1, -1, 4), torch.cat([y[:, None].expand(-1, 3), torch.full_like(y, -100)[:, None]], 1)
    ),
    "each row by itself": of_each_row,
    "made a mean over rows": made_one_of_rows,
    "weights in what is logged": lambda s, y: (
        nn.functional.cross_entropy(s, y) + 0 * nn.functional.cross_entropy(s, y, torch.tensor([1.0, 2, 9]).double())
    ),
}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("kind", MEANS)
def test_means_over_rows_are_never_refused(kind, size):
    whole, cut = trained_with(MEANS[kind]), trained_with(MEANS[kind], Microbatching(size))
    assert cut[1] == ""
    assert difference(whole[0], cut[0]) < 1e-10


def test_comparisons_become_rarer():
    calls = count()  # whose state no comparison restores

    def loss(scores, labels):
        return nn.functional.cross_entropy(scores, labels) + 0 * next(calls)

    trained_with(loss, Microbatching(5), data=rows_of(40), max_epochs=33)
    assert next(calls) == 132 * 2 + 4 * 2 * 3  # of the first batch, and after 32, 64 and 128, in two chunks


@pytest.mark.parametrize("scale", [1.0, 1e5])
@pytest.mark.parametrize("power", [1, 2])
def test_a_loss_that_has_converged_consists_of_rounding(scale, power):
    def loss(scores, targets):
        return (scores - targets).abs().pow(power).mean()

    torch.manual_seed(0)
    teacher = Net().float()
    inputs = torch.randn(400, 8)
    with torch.no_grad():
        teacher.net[-1].weight.mul_(scale)
        targets = torch.cat([teacher.net(row[None]) for row in inputs])  # rounded as a row alone is
    for microbatching in (Microbatching(4), Microbatching(1)):
        module = Converged(loss)
        module.net.load_state_dict(teacher.net.state_dict())
        fit(module, microbatching, data=TensorDataset(inputs, targets), batch_size=8, max_epochs=1)
    with pytest.raises(MisconfigurationException, match="differ by"):  # another loss is one from the start
        fit(
            Converged(lambda scores, targets: loss(scores, targets * 1.5) ** 2),
            microbatching,
            data=TensorDataset(inputs, targets),
        )


class Converged(Net):
    def __init__(self, own_loss):
        super().__init__(optimizer="sgd")
        self.own_loss = own_loss
        self.float()

    def training_step(self, batch, batch_idx):
        return self.own_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 1e-9)


@pytest.mark.parametrize("accumulated", [1, 2])
def test_memory_that_runs_out_later(accumulated):
    class Later(Net):
        def on_train_batch_start(self, batch, batch_idx):
            self.memory.rows = 3 if self.trainer.fit_loop.total_batch_idx >= 4 else 100

    whole, cut = Net(optimizer="sgd"), Later(Memory(100, "backward"), optimizer="sgd")
    fit(whole, accumulate_grad_batches=accumulated)
    fit(cut, Microbatching(), accumulate_grad_batches=accumulated)
    assert cut.memory.errors
    assert difference(whole, cut) < 1e-12


@pytest.mark.parametrize("size", [3, 4])  # of which one is the number of classes
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_what_a_step_returns_and_logs_is_that_of_the_whole_batch(size, reduction):
    class Returning(Net):
        def training_step(self, batch, batch_idx):
            loss, scores = self.loss(batch)
            self.log_dict({"loss": loss, "half": loss / 2, "mean": scores.mean()}, on_epoch=True)
            counts = torch.zeros(3, 3, dtype=torch.long)
            counts.index_put_((batch[1], scores.argmax(1)), torch.ones(len(scores), dtype=torch.long), accumulate=True)
            mean = scores.detach().mean()
            return {
                "loss": loss, "rows": batch[1], "counts": counts, "as list": counts.tolist(), "array": counts.numpy(),
                "number": len(scores), "complex": torch.complex(mean, -mean), "plain": complex(mean), "on": True,
            }  # fmt: skip

    class Look(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            self.last = {name: torch.as_tensor(value) for name, value in outputs.items()}
            self.logged = {name: value for name, value in trainer.callback_metrics.items() if "half" not in name}

    whole, cut = Look(), Look()
    for look, callbacks in ((whole, []), (cut, [Microbatching(size)])):
        module = Returning(reduction=reduction, optimizer="sgd")
        fit(module, look, *callbacks, data=rows_of(12), batch_size=12, max_epochs=2)
    for made, expected in ((cut.last, whole.last), (cut.logged, whole.logged)):
        for name, value in expected.items():
            torch.testing.assert_close(made[name], value, msg=name)


def test_a_first_batch_without_gradients_does_not_tell_a_sum_from_a_mean():
    class LateSum(Net):
        def loss(self, batch):
            loss, scores = super().loss(batch)
            return loss * (self.trainer.global_step > 0), scores

    whole, cut = (LateSum(reduction="sum", optimizer="sgd") for _ in range(2))
    fit(whole)
    fit(cut, Microbatching(4))
    assert difference(whole, cut) < 1e-12


def test_a_module_that_computes_no_loss_in_evaluation_mode():
    class Detector(Net):
        def loss(self, batch):
            loss, scores = super().loss(batch)
            return {"loss": loss}["loss" if self.net.training else "boxes"], scores

    with pytest.warns(UserWarning, match=r"and fails with its modules in evaluation mode \(KeyError: 'boxes'\)"):
        fit(Detector(dropout=0.5), Microbatching(3))


def test_a_module_that_takes_more_memory_in_evaluation_mode():
    class Checkpointing(Net):
        def loss(self, batch):
            self.memory.rows = 3 if self.net.training else 2
            return super().loss(batch)

    with pytest.warns(UserWarning, match="could not compare .*, as 3 rows at once run out of memory"):
        fit(Checkpointing(Memory(3), dropout=0.5), Microbatching(3))


def test_frozen_batch_norm_is_no_obstacle():
    class Frozen(Net):
        def on_train_epoch_start(self):
            self.net[1].eval()

    whole, cut = Frozen(norm=nn.BatchNorm1d(16)), Frozen(norm=nn.BatchNorm1d(16))
    fit(whole)
    fit(cut, Microbatching(3))
    assert difference(whole, cut) < 1e-12


def test_random_losses_are_told():
    class Noisy(Net):
        def loss(self, batch):
            return super().loss((batch[0] + torch.randn_like(batch[0]), batch[1]))

    with pytest.warns(UserWarning, match="could not compare .* as `training_step` draws random numbers"):
        fit(Noisy(), Microbatching(3))


def test_comparison_leaves_no_trace():
    class Counting(Net):
        def __init__(self):
            super().__init__(dropout=0.5)
            self.calls, self.losses = 0, []
            self.metric = torchmetrics.MeanMetric()

        def training_step(self, batch, batch_idx):
            self.calls += 1
            loss, _ = self.loss(batch)
            self.losses.append(loss.detach())
            self.metric.update(loss.detach())
            return loss

    def look(trainer, module, optimizer):
        found = module.calls, len(module.losses), int(module.seen), module.metric._update_count
        assert found == (1, 1, 2, 1)  # the first microbatch of two rows alone
        assert all(part.training for part in module.modules())
        looked.append(True)

    looked = []
    fit(Counting(), Hooks(on_before_zero_grad=look), Microbatching(3), max_steps=1)
    assert looked == [True]


@pytest.mark.filterwarnings("ignore:`training_step` returned")
@pytest.mark.parametrize("returned", ["all", "some"])
def test_steps_without_a_loss(returned):
    class Skipping(Net):
        def training_step(self, batch, batch_idx):
            skips = batch_idx == 1 and (returned == "all" or len(batch[0]) < 4)
            return None if skips else super().training_step(batch, batch_idx)

    fit(whole := Skipping())
    if returned == "all":
        fit(cut := Skipping(), Microbatching(5))
        assert difference(whole, cut) < 1e-12
    else:
        with pytest.raises(MisconfigurationException, match="returned None for some of 3 microbatches"):
            fit(Skipping(), Microbatching(4))


@pytest.mark.parametrize("microbatching", [Microbatching, lambda: Microbatching(3), lambda: Microbatching(10)])
def test_a_batch_is_free_when_it_is_done(microbatching):
    class Watching(Net):
        def training_step(self, batch, batch_idx):
            self.alive = [reference for reference in (*self.alive, weakref.ref(batch[0])) if reference() is not None]
            self.most = max(self.most, len(self.alive))
            return super().training_step(batch, batch_idx)

    module = Watching()
    module.alive, module.most = [], 0
    gc.disable()
    try:
        fit(module, microbatching(), max_epochs=2)
    finally:
        gc.enable()
    assert module.most <= 4  # the parts of one batch


@pytest.mark.filterwarnings("ignore:Trying to infer")
def test_batches_that_cannot_be_cut_are_refused_only_where_they_have_to_be():
    def collate(samples):
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples]), torch.ones(3)

    data = DataLoader(rows_of(), batch_size=10, collate_fn=collate)

    class Three(Net):
        def loss(self, batch):
            return super().loss(batch[:2])

    fit(Three(), Microbatching(), data=data)
    with pytest.raises(MisconfigurationException, match=r"lengths differ \(batch\[0\] has 10, .* batch\[2\] has 3\)"):
        fit(Three(), Microbatching(4), data=data)
    with pytest.raises(MisconfigurationException, match=r"memory ran out\. A batch cannot be cut"):
        fit(Three(Memory(3)), Microbatching(), data=data)


def test_manual_optimization_is_refused():
    module = Net()
    module.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match="needs automatic optimization"):
        fit(module, Microbatching())


@pytest.mark.parametrize("arguments", [{"size": 0}, {"size": 2.5}, {"size": True}, {"on_mismatch": "ignore"}])
def test_arguments(arguments):
    with pytest.raises((ValueError, TypeError), match=next(iter(arguments))):
        Microbatching(**arguments)


@pytest.mark.parametrize("stopped", [1, 5])
def test_resume_bit_for_bit(stopped, tmp_path):
    def stop(trainer, *_):
        if trainer.global_step == stopped:
            raise KeyboardInterrupt

    whole = Net(Memory(3), dropout=0.5)
    fit(whole, Microbatching(), AutoResume(tmp_path / "whole", every_n_train_steps=1))
    resumes, stops = AutoResume(tmp_path / "run", every_n_train_steps=1), Hooks(on_train_batch_end=stop)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        fit(Net(Memory(3), dropout=0.5), Microbatching(), resumes, stops)
    resumed, microbatching = Net(Memory(3), dropout=0.5), Microbatching()
    fit(resumed, microbatching, AutoResume(tmp_path / "run", every_n_train_steps=1))
    assert resumed.memory.errors == whole.memory.errors  # which were saved
    assert microbatching.current_size == 3
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), resumed.parameters(), strict=True))


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`", "ignore:Found `dataloader_iter`")
def test_a_batch_that_training_step_fetches_by_itself_is_refused_with_the_remedy():
    class Fetches(Net):
        def training_step(self, dataloader_iter):
            return super().training_step(next(dataloader_iter)[0], 0)

    words = r"take the batch as an argument, `training_step\(self, batch\)`"
    with pytest.raises(MisconfigurationException, match=words):
        fit(Fetches(), Microbatching(3))
