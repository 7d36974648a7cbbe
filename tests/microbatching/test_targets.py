"""Means over targets: accumulated, cut and reduced over ranks, against one batch of all rows."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader

from lightning_tricks import AutoResume, GradientClipping, Microbatching, SpikeGuard
from lightning_tricks.microbatching.core.batches import TargetMean, count_targets
from tests.microbatching.models import Memory, difference
from tests.small import QUIET, Hooks, HostReads, cases, local_sgd, real_fp16

LENGTH, CLASSES = 9, 5


def sentences(number: int = 30, empty: tuple[int, ...] = (), full: bool = False) -> list[dict[str, torch.Tensor]]:
    """Rows of tokens with labels: one to all of them, none in those that are `empty`, the first all in `full` ones."""
    generator, rows = torch.Generator().manual_seed(0), []
    for row in range(number):
        labels = torch.randint(0, CLASSES, (LENGTH,), generator=generator)
        length = 1 + int(torch.randint(0, LENGTH, (), generator=generator))
        labels[0 if row in empty else LENGTH if full else length :] = -100
        rows.append({"x": torch.randn(LENGTH, 6, generator=generator, dtype=torch.float64), "labels": labels})
    return rows


def count(batch):
    return (batch["labels"] != -100).sum()


class Tokens(LightningModule):
    """Scores tokens; the loss is a mean over those with a label."""

    def __init__(self, memory=None, adam=False, lr=0.3):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()
        self.memory, self.adam, self.lr, self.norms = memory, adam, lr, []

    def loss(self, batch):
        return nn.functional.cross_entropy(self.net(batch["x"]).flatten(0, 1), batch["labels"].flatten())

    def training_step(self, batch, batch_idx):
        loss = self.loss(batch)
        if self.memory is not None:
            self.memory.allocate(len(batch["x"]), "forward")
        self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
        self.log("rows", batch["x"].mean(), on_step=False, on_epoch=True, sync_dist=True)
        return loss

    def on_after_backward(self):
        self.norms.append(float(sum(p.grad.square().sum() for p in self.parameters()) ** 0.5))

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 1e-2) if self.adam else torch.optim.SGD(self.parameters(), self.lr)


class Whole(Tokens):
    """The oracle, whose loss is the sum by the number, and zero without targets."""

    def loss(self, batch):
        scores = self.net(batch["x"]).flatten(0, 1)
        return nn.functional.cross_entropy(scores, batch["labels"].flatten(), reduction="sum") / count(batch).clamp(1)


def fit(module, rows, batch_size, *callbacks, **trainer):
    runner = Trainer(**{**QUIET, "max_epochs": 2, "callbacks": list(callbacks), **trainer})
    runner.fit(module, DataLoader(rows, batch_size))
    return runner


CLIPPED = {
    "plain": dict,
    "Lightning clips": lambda: {"gradient_clip_val": 0.1},
    "ours clips": lambda: {"callbacks": [GradientClipping(0.1)]},
}


@pytest.mark.parametrize(("clipped", "adam"), [("plain", True), ("Lightning clips", False), ("ours clips", False)])
@cases(
    "size, memory, batch_size, accumulated",
    ("whole", None, 3, 4),
    (2, None, 3, 4),
    (5, None, 12, 1),
    (None, None, 3, 4),
    (None, 2, 6, 2),
    ids=["accumulated", "cut and accumulated", "cut", "accumulated, any size", "out of memory"],
)
def test_a_window_trains_as_one_batch(size, memory, batch_size, accumulated, adam, clipped):
    rows = sentences(empty=(3, 4, 5))  # the third window has 6 rows; a batch of 3 has no targets
    options = CLIPPED[clipped]()
    expected = fit(whole := Whole(adam=adam), rows, 12, *options.pop("callbacks", ()), **options)
    options = CLIPPED[clipped]()
    callbacks = [*options.pop("callbacks", ()), Microbatching(size, count="labels")]
    parts = Tokens(memory and Memory(memory), adam)
    got = fit(parts, rows, batch_size, *callbacks, accumulate_grad_batches=accumulated, **options)
    assert got.global_step == expected.global_step == 6
    assert difference(whole, parts) < 1e-12
    if memory is None:  # after the last backward pass of a window the gradients are right already
        assert parts.norms[accumulated - 1] == pytest.approx(whole.norms[0], rel=1e-12)


def test_whole_batches_are_not_said_to_be_cut(lightning_log):
    fit(Tokens(), sentences(), 3, microbatching := Microbatching("whole", count="labels"), accumulate_grad_batches=4)
    said = " ".join(message for _, message in lightning_log if "Microbatching" in message)
    assert "leaves batches whole, weights losses by targets" in said
    assert "count compared with the loss in" in said
    assert "cut" not in said
    assert microbatching.current_size is None
    with pytest.raises(TypeError, match="size must be a whole number"):
        Microbatching("hole")


def test_without_count_accumulated_means_are_others():
    fit(whole := Whole(), sentences(), 12)
    fit(parts := Tokens(), sentences(), 3, accumulate_grad_batches=4)
    assert difference(whole, parts) > 1e-3


def test_windows_that_grow_with_the_epochs():
    whole = Whole()
    for batch_size in (6, 12):
        fit(whole, sentences(), batch_size, max_epochs=1)
    scheduler = GradientAccumulationScheduler({0: 2, 1: 4})
    fit(parts := Tokens(), sentences(), 3, scheduler, Microbatching(count="labels"))
    assert difference(whole, parts) < 1e-12


@pytest.mark.parametrize("size", [99, 2, None])
def test_real_fp16(size):
    rows = [{"x": row["x"].float(), "labels": row["labels"]} for row in sentences(empty=(0, 1, 2))]
    fit(whole := Whole().float(), rows, 12, plugins=[real_fp16()])
    plugin = real_fp16()
    fit(
        parts := Tokens().float(),
        rows,
        3,
        Microbatching(size, count=count),
        accumulate_grad_batches=4,
        plugins=[plugin],
    )
    assert difference(whole, parts) < 2e-3
    assert plugin.scaler.get_scale() == 1024  # no step was skipped


@given(counts=st.lists(st.integers(0, 5000), min_size=1, max_size=6))
@settings(max_examples=60)
def test_weights_that_never_exceed_one_make_the_mean(counts):
    mean, gradient = TargetMean(lambda batch: batch, torch.device("cpu")), torch.zeros(1, dtype=torch.float64)
    for place, number in enumerate(counts):
        mean.begin(number, 1, begins_window=place == 0)
        mean.rescale_([gradient])
        assert 0 <= mean.scale <= 1
        gradient += mean.scale * (place + 1.0)
    total = sum(number * (place + 1.0) for place, number in enumerate(counts))
    assert float(gradient) == pytest.approx(total / max(1, sum(counts)), rel=1e-12)


def test_sparse_gradients_are_rescaled():
    class Embedded(Tokens):
        def __init__(self):
            super().__init__()
            self.net = nn.Sequential(nn.Embedding(7, CLASSES, sparse=True).double())

        def on_after_backward(self):
            pass

        def loss(self, batch):
            words = batch["x"].abs().sum(2).long() % 7
            return nn.functional.cross_entropy(self.net(words).flatten(0, 1), batch["labels"].flatten())

    fit(whole := Embedded(), sentences(), 12)
    fit(parts := Embedded(), sentences(), 3, Microbatching(99, count="labels"), accumulate_grad_batches=4)
    assert difference(whole, parts) < 1e-12


# -- two ranks


class EveryOther(LightningDataModule):
    """Gives each of two ranks every other row, in order."""

    def __init__(self, rows, batch_size):
        super().__init__()
        self.rows, self.size = rows, batch_size

    def train_dataloader(self):
        return DataLoader(self.rows[self.trainer.global_rank :: 2], self.size)


def fit_ranks(folder, module, rows, batch_size, microbatching, **trainer):
    def save(trainer, module):
        facts = {
            "weights": module.state_dict(),
            "metrics": dict(trainer.callback_metrics),
            "steps": trainer.global_step,
        }
        torch.save(facts, folder / f"{trainer.global_rank}.pt")

    options = {**QUIET, "max_epochs": 2, "strategy": "ddp_fork", "devices": 2, **trainer}
    callbacks = [Hooks(on_train_end=save), microbatching]
    Trainer(**options, callbacks=callbacks, use_distributed_sampler=False).fit(module, EveryOther(rows, batch_size))
    return [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def assert_ranks(got, whole, steps, tolerance=1e-12):
    for rank in got:
        assert rank["steps"] == steps
        for name, value in whole.state_dict().items():
            assert torch.allclose(rank["weights"][name], value, rtol=tolerance, atol=tolerance), name


EMPTY = {"unequal": (), "a rank without": tuple(range(1, 12, 2)), "all ranks without": tuple(range(12, 24))}


@pytest.mark.parametrize("empty", EMPTY)
@pytest.mark.parametrize("size", [99, 2, None])
def test_two_ranks(size, empty, tmp_path):
    rows = sentences(empty=EMPTY[empty])  # 15 for each rank: windows of 6, 6 and 3
    fit(whole := Whole(adam=True), rows, 12, gradient_clip_val=0.5)
    options = {"accumulate_grad_batches": 2, "gradient_clip_val": 0.5}
    got = fit_ranks(tmp_path, Tokens(adam=True), rows, 3, Microbatching(size, count="labels"), **options)
    assert_ranks(got, whole, 6)


def test_two_ranks_whose_gradients_are_views_of_buckets_in_real_fp16(tmp_path):
    rows = [{"x": row["x"].float(), "labels": row["labels"]} for row in sentences(empty=EMPTY["a rank without"])]
    fit(whole := Whole().float(), rows, 12, plugins=[real_fp16()])
    options = {"strategy": DDPStrategy(start_method="fork", gradient_as_bucket_view=True), "plugins": [real_fp16()]}
    microbatching = Microbatching(2, count="labels")
    got = fit_ranks(tmp_path, Tokens().float(), rows, 3, microbatching, accumulate_grad_batches=2, **options)
    assert_ranks(got, whole, 6, tolerance=2e-3)


def test_memory_runs_out_on_one_rank_alone(tmp_path):
    class OnOne(Tokens):
        def setup(self, stage):
            if self.global_rank == 0:
                self.memory.rows = 1000

    fit(whole := Whole(), sentences(), 12)
    module, microbatching = OnOne(Memory(1)), Microbatching(count="labels")
    assert_ranks(fit_ranks(tmp_path, module, sentences(), 3, microbatching, accumulate_grad_batches=2), whole, 6)


def test_local_sgd_is_refused(tmp_path):
    with pytest.raises(Exception, match="leave out the `model_averaging_period`"):
        fit_ranks(tmp_path, Tokens(), sentences(), 3, Microbatching(count="labels"), strategy=local_sgd())


# -- what is logged


def mean_over_targets(rows):
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    with torch.no_grad():
        return float(Whole().loss(batch))


@pytest.mark.parametrize("size", [99, 2, None])
def test_the_loss_is_logged_as_the_mean_over_targets(size):
    rows, steps = sentences(empty=(3, 4, 5)), []
    see = Hooks(on_train_batch_end=lambda trainer, *_: steps.append(float(trainer.callback_metrics["loss_step"])))
    got = fit(Tokens(lr=0.0), rows, 3, see, Microbatching(size, count="labels"), accumulate_grad_batches=4)
    assert float(got.callback_metrics["loss_epoch"]) == pytest.approx(mean_over_targets(rows), rel=1e-9)
    for place, step in enumerate(steps[:10]):  # zero without targets
        assert step == pytest.approx(mean_over_targets(rows[3 * place : 3 * place + 3]), rel=1e-9)
    means = torch.stack([row["x"].mean() for row in rows])
    assert float(got.callback_metrics["rows"]) == pytest.approx(float(means.mean()), rel=1e-9)


def test_the_loss_is_logged_as_that_of_both_ranks(tmp_path):
    rows = sentences(empty=EMPTY["a rank without"])
    got = fit_ranks(tmp_path, Tokens(lr=0.0), rows, 3, Microbatching(2, count="labels"))
    for rank in got:
        assert float(rank["metrics"]["loss_epoch"]) == pytest.approx(mean_over_targets(rows), rel=1e-9)
        assert float(rank["metrics"]["rows"]) == pytest.approx(
            float(torch.stack([r["x"] for r in rows]).mean()), rel=1e-9
        )


def test_a_batch_size_that_is_given_stays():
    class Given(Tokens):
        def training_step(self, batch, batch_idx):
            loss = self.loss(batch)
            self.log("loss", loss, on_epoch=True, on_step=False, batch_size=len(batch["x"]))
            return {"loss": loss}

    rows = sentences()
    got = fit(Given(lr=0.0), rows, 3, Microbatching(2, count="labels"))
    means = [mean_over_targets(rows[start : start + 3]) for start in range(0, 30, 3)]
    assert float(got.callback_metrics["loss"]) == pytest.approx(sum(means) / 10, rel=1e-9)


def test_outputs_have_the_loss_of_the_batch_and_hooks_no_nan():
    rows, seen = sentences(empty=(3, 4, 5)), []
    see = Hooks(
        on_before_backward=lambda trainer, module, loss: seen.append(float(loss.detach())),
        on_train_batch_end=lambda trainer, module, outputs, *_: seen.append(float(outputs["loss"])),
    )
    fit(Tokens(lr=0.0), rows, 3, see, Microbatching(2, count="labels"), max_epochs=1)
    expected = [mean_over_targets(rows[start : start + 3]) for start in range(0, 30, 3)]
    assert seen[::2] == pytest.approx(expected)
    assert seen[1::2] == pytest.approx(expected)


@pytest.mark.parametrize("is_first", [False, True])
def test_a_batch_without_targets_is_no_spike(is_first):
    guard = SpikeGuard(mode="skip", warmup_steps=2)
    callbacks = [Microbatching(99, count="labels"), guard]
    fit(parts := Tokens(), sentences(empty=(9, 10, 11)), 3, *callbacks[:: 1 if is_first else -1])
    fit(whole := Whole(), sentences(empty=(9, 10, 11)), 3)
    assert difference(whole, parts) < 1e-12


# -- what the number is compared with


class Shifted(Tokens):
    """A causal model, which predicts the next label."""

    def loss(self, batch):
        scores, labels = self.net(batch["x"])[:, :-1], batch["labels"][:, 1:]
        return nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


@pytest.mark.parametrize("size", [99, 2])
def test_shifted_labels_are_refused_with_both_numbers(size):
    module = Shifted()
    words = r"`cross_entropy` is a mean over (8|16|24) targets, and `count` gives (9|18|27).*\[:, 1:\] != -100"
    with pytest.raises(MisconfigurationException, match=words):
        fit(module, sentences(full=True), 3, Microbatching(size, count="labels"), accumulate_grad_batches=2)
    assert module.trainer.global_step == 0


def test_shifted_labels_that_are_counted_as_such():
    class Oracle(Shifted):
        def loss(self, batch):
            return super().loss(batch) if (batch["labels"][:, 1:] != -100).any() else self.net(batch["x"]).sum() * 0

    fit(whole := Oracle(), sentences(), 12)
    microbatching = Microbatching(2, count=lambda batch: (batch["labels"][:, 1:] != -100).sum())
    fit(parts := Shifted(), sentences(), 3, microbatching, accumulate_grad_batches=4)
    assert difference(whole, parts) < 1e-12


def test_a_number_that_is_wrong_later_is_found():
    rows = sentences(99)
    module = Tokens()
    wrong = Microbatching(99, count=lambda batch: count(batch) + (module.trainer.fit_loop.total_batch_idx > 30))
    with pytest.raises(MisconfigurationException, match="and `count` gives"):
        fit(module, rows, 3, wrong)
    assert module.trainer.global_step == 32


def test_a_difference_is_a_warning_where_it_is_accepted():
    with pytest.warns(UserWarning, match="is a mean over 24 targets, and `count` gives 27"):
        fit(Shifted(), sentences(full=True), 3, Microbatching(99, count="labels", on_mismatch="warn"))


@pytest.mark.parametrize("size", [99, 2])
def test_class_weights(size):
    weights = torch.tensor([1.0, 2.0, 0.5, 3.0, 0.1], dtype=torch.float64)

    class Weighted(Tokens):
        def loss(self, batch):
            scores = self.net(batch["x"]).flatten(0, 1)
            return nn.functional.cross_entropy(scores, batch["labels"].flatten(), weights)

    def weigh(batch):
        labels = batch["labels"]
        return (weights[labels.clamp(min=0)] * (labels != -100)).sum()

    fit(whole := Weighted(), sentences(), 12)
    fit(parts := Weighted(), sentences(), 3, Microbatching(size, count=weigh), accumulate_grad_batches=4)
    assert difference(whole, parts) < 1e-12


class Masked(Tokens):
    """A mean that calls no function of torch by which it is known."""

    def loss(self, batch):
        losses = nn.functional.cross_entropy(
            self.net(batch["x"]).flatten(0, 1), batch["labels"].flatten(), reduction="none"
        )
        return losses.sum() / count(batch).clamp(min=1)


@pytest.mark.parametrize("size", [99, 2, None])
def test_a_mean_of_ones_own(size, caplog):
    fit(whole := Whole(), sentences(empty=(0, 1, 2)), 12)
    microbatching = Microbatching(size, count=lambda batch: int(count(batch)))
    fit(parts := Masked(), sentences(empty=(0, 1, 2)), 3, microbatching, accumulate_grad_batches=4)
    assert difference(whole, parts) < 1e-12
    assert "count compared with the loss in 0 batches" in caplog.text


def test_a_wrong_number_of_ones_own_mean_is_found_where_batches_are_cut():
    with pytest.raises(MisconfigurationException, match="the gradient of 3 rows, a mean, and that of 1 and 2 rows"):
        fit(Masked(), sentences(), 6, Microbatching(3, count=lambda batch: len(batch["x"])))


def test_a_sum_over_targets_is_found_where_batches_are_cut():
    class Sum(Tokens):
        def loss(self, batch):
            scores = self.net(batch["x"]).flatten(0, 1)
            return nn.functional.cross_entropy(scores, batch["labels"].flatten(), reduction="sum")

    with pytest.raises(MisconfigurationException, match="the gradient of 3 rows, a mean, and that of 1 and 2 rows"):
        fit(Sum(), sentences(), 6, Microbatching(3, count="labels"))


def test_an_error_without_count_names_it():
    with pytest.raises(MisconfigurationException, match=r"mean over its targets .* give count=\.\.\. for a mean over"):
        fit(Tokens(), sentences(), 6, Microbatching(2))


# -- errors, reads and resuming


@pytest.mark.parametrize("wrong", ["label", 3, ("labels",)])
def test_a_wrong_argument(wrong):
    with pytest.raises(TypeError, match='count must be "labels", a callable of the batch or None, got'):
        Microbatching(count=wrong)


@cases(
    "number, words",
    ("labels", r'needs a batch with batch\["labels"\], got a list: give a callable'),
    (lambda batch: batch[0], r"count must return an int or a tensor of shape \(\), got tensor\(\[1\., 1\.\]\)"),
    (lambda batch: "3", r"count must return an int or a tensor of shape \(\), got '3'"),
)
def test_batches_without_a_number(number, words):
    with pytest.raises(TypeError, match=words):
        count_targets(number, [torch.ones(2)], torch.device("cpu"))


def test_manual_optimization_is_refused():
    module = Tokens()
    module.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match="needs automatic optimization"):
        fit(module, sentences(), 3, Microbatching(count="labels"))


@pytest.mark.filterwarnings("ignore:You are using the `dataloader_iter`", "ignore:Found `dataloader_iter`")
def test_a_batch_that_training_step_fetches_by_itself_is_refused():
    class Fetches(Tokens):
        def training_step(self, dataloader_iter):
            return self.loss(next(dataloader_iter)[0])

    with pytest.raises(MisconfigurationException, match="take the batch as an argument"):
        fit(Fetches(), sentences(), 3, Microbatching(count="labels"))


@pytest.mark.parametrize("left_out", [0, 3], ids=["first", "last"])
@pytest.mark.parametrize("size", [99, 2, None])
def test_a_step_without_a_loss_counts_nothing(size, left_out):
    class Leaves(Tokens):
        def training_step(self, batch, batch_idx):
            return None if batch_idx % 4 == left_out else super().training_step(batch, batch_idx)

    rows = sentences(24)
    kept = [row for place, row in enumerate(rows) if place // 3 % 4 != left_out]  # windows of 9 rows
    fit(whole := Whole(), kept, 9)
    fit(parts := Leaves(), rows, 3, Microbatching(size, count="labels"), accumulate_grad_batches=4)
    assert difference(whole, parts) < 1e-12


@pytest.mark.parametrize("size", [99, 2])
def test_nothing_is_read_after_the_first_batch(size):
    def reads(*callbacks):
        counter, found = HostReads(), []
        begin = Hooks(on_train_batch_start=lambda trainer, *_: trainer.global_step == 1 and counter.__enter__())

        def end(trainer, module):
            counter.__exit__(None, None, None)
            found.append(counter.count)

        class Quiet(Tokens):
            def on_after_backward(self):
                pass

        fit(Quiet(), sentences(), 3, begin, Hooks(on_train_epoch_end=end), *callbacks, max_epochs=1)
        return found

    assert reads(Microbatching(size, count=count)) == reads()


def test_a_compiled_step():
    class Silent(Tokens):
        def training_step(self, batch, batch_idx):
            return self.loss(batch)

    fit(whole := Whole(), sentences(), 12)
    parts = Silent()
    compiled = torch.compile(parts, backend="eager")
    fit(compiled, sentences(), 3, Microbatching(99, count="labels"), accumulate_grad_batches=4)
    assert difference(whole, parts) < 1e-12


@pytest.mark.parametrize("size", [99, 2, None])
@pytest.mark.parametrize("stop", [3, 9, 13])
def test_resumed_in_the_middle_of_a_window(size, stop, tmp_path):
    def trained(folder, *callbacks):
        resume = AutoResume(tmp_path / folder, every_n_train_steps=None)
        every = [resume, Microbatching(size, count="labels"), *callbacks]
        module = Tokens(adam=True)
        trainer = fit(module, sentences(), 3, *every, accumulate_grad_batches=4)
        return module, trainer.callback_metrics

    def interrupt(trainer, *_):
        if trainer.fit_loop.total_batch_idx + 1 == stop:
            raise KeyboardInterrupt

    whole, metrics = trained("whole")
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        trained("cut", Hooks(on_train_batch_end=interrupt))
    parts, resumed = trained("cut")
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), parts.parameters(), strict=True))
    assert resumed == metrics
