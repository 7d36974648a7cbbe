import weakref

import numpy as np
import pytest
import sklearn.metrics as sk
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SequentialSampler

from lightning_tricks._lightning_compat.own_samples import SamplerShard, get_sampler_shard
from lightning_tricks.metrics import MeanLoss, MetricSuite
from lightning_tricks.metrics.core.counts import (
    binary_cells,
    cells_to_matrix,
    count_cells_,
    count_invalid,
    count_scores_,
    multiclass_cells,
    pr_curve,
    reliability_curve,
    roc_curve,
    zero_counts,
)
from lightning_tricks.metrics.core.own_metrics import MulticlassAUROC

SEEDS = st.integers(0, 2**20)
FEW = settings(max_examples=30, derandomize=True)


def test_what_fits_no_cell_is_counted_beside_them():
    scores = torch.tensor([[0.9, 0.1], [float("nan"), 0.1], [0.2, 0.8], [0.2, 0.8], [0.3, 0.7]])
    target = torch.tensor([0, 0, 2, -1, -100])
    counts = count_cells_(zero_counts(4), multiclass_cells(2, scores, target, ignore_index=-100))
    assert cells_to_matrix(counts, 2, 2).tolist() == [[1, 0], [0, 0]]
    assert count_invalid(counts) == 3
    assert counts[-1] == 1

    preds = torch.tensor([0.9, float("nan"), 1.5, -0.5, 0.4, 0.6])
    counts = count_cells_(zero_counts(4), binary_cells(preds, torch.tensor([1, 1, 1, 0, 2, 0])))
    assert cells_to_matrix(counts, 2, 2).tolist() == [[0, 1], [0, 1]]
    assert count_invalid(counts) == 4


@FEW
@given(SEEDS)
def test_cells_of_labels_are_those_of_each_label(seed):
    generator = torch.Generator().manual_seed(seed)
    preds, target = torch.rand(7, 3, 2, generator=generator), torch.randint(2, (7, 3, 2), generator=generator)
    together = cells_to_matrix(count_cells_(zero_counts(12), binary_cells(preds, target, 0.4, labels=3)), 3, 2, 2)
    for label in range(3):
        alone = count_cells_(zero_counts(4), binary_cells(preds[:, label], target[:, label], 0.4))
        assert torch.equal(together[label], cells_to_matrix(alone, 2, 2))


def test_areas_of_classes_are_weighed_by_their_samples():
    generator = np.random.default_rng(0)
    target, scores = generator.choice(4, 60, p=[0.5, 0.3, 0.2, 0]), generator.dirichlet(np.ones(4), 60)
    suite = MetricSuite({"auroc": MulticlassAUROC(num_classes=4, average="weighted")})
    suite.update(preds=torch.tensor(scores), target=torch.tensor(target))
    areas = [sk.roc_auc_score(target == label, scores[:, label]) for label in range(3)]
    expected = np.average(areas, weights=np.bincount(target)[:3])  # the class without samples has no area
    assert suite.compute()["auroc"].item() == pytest.approx(expected, abs=1e-6)


@FEW
@given(SEEDS)
def test_curves_of_the_histogram_are_scikit_learns(seed):
    generator = np.random.default_rng(seed)
    bins = 50
    scores = (generator.integers(0, bins, 80) + 0.5) / bins  # one value for each bin, so that nothing is lost
    target = np.r_[generator.integers(0, 2, 78), 0, 1]
    histogram = torch.zeros(1, 2, bins, dtype=torch.int64)
    column, labels = torch.tensor(scores)[:, None], torch.tensor(target)[:, None]
    count_scores_(histogram, column, labels, torch.ones(80, dtype=torch.bool))
    false, true = roc_curve(histogram[0])
    assert sk.auc(false, true) == pytest.approx(sk.roc_auc_score(target, scores))
    recall, precision = pr_curve(histogram[0])
    steps = recall.diff(prepend=torch.zeros(1, dtype=torch.float64))
    assert (steps * precision).sum().item() == pytest.approx(sk.average_precision_score(target, scores))
    confidence, positives, share = reliability_curve(histogram[0], bins=10)
    for place, rate, part in zip(confidence, positives, share, strict=True):
        inside = (scores * 10).astype(int) == int(place * 10)
        assert rate.item() == pytest.approx(target[inside].mean())
        assert place.item() == pytest.approx(scores[inside].mean())
        assert part.item() == pytest.approx(inside.mean())


@FEW
@given(st.integers(1, 40), st.integers(1, 5), st.integers(1, 9), st.booleans())
def test_own_samples_of_all_ranks_are_all_samples_once(length, world, batch_size, shuffle):
    seen = []
    for rank in range(world):
        data = list(range(length))
        sampler = DistributedSampler(data, world, rank, shuffle=shuffle)
        loader = DataLoader(data, batch_size, sampler=sampler)
        share = get_sampler_shard(loader)
        for batch_idx, batch in enumerate(loader):
            size, own = share.batch_sizes(batch_idx)
            assert size == len(batch)
            seen += batch[:own].tolist()
    assert sorted(seen) == list(range(length))


class _Stream(IterableDataset):
    def __iter__(self):
        return iter(range(3))


class _Pairs(BatchSampler):
    pass


def test_an_unknown_share_has_a_reason():
    data = list(range(5))
    sampler = DistributedSampler(data, 2, 0)
    assert get_sampler_shard(DataLoader(data, None, sampler=sampler)) == SamplerShard(3, 3, 1)
    assert "IterableDataset" in get_sampler_shard(DataLoader(_Stream()))
    assert "_Pairs" in get_sampler_shard(DataLoader(data, batch_sampler=_Pairs(SequentialSampler(data), 2, False)))
    assert "no DistributedSampler" in get_sampler_shard(DataLoader(data, 2))
    assert "drop_last" in get_sampler_shard(DataLoader(data, 2, sampler=sampler, drop_last=True))
    assert "drop_last" in get_sampler_shard(DataLoader(data, 2, sampler=DistributedSampler(data, 2, 0, drop_last=True)))


@FEW
@given(SEEDS, st.integers(1, 600))
def test_the_mean_loss_is_the_weighted_mean(seed, batches):
    generator = np.random.default_rng(seed)
    losses, rows = generator.normal(size=batches), generator.integers(0, 5, batches)
    whole, first, second = MeanLoss(), MeanLoss(), MeanLoss()
    for number, (loss, samples) in enumerate(zip(losses, rows, strict=True)):
        for mean in (whole, first if number % 2 else second):
            mean.update(torch.tensor(loss / 4), int(samples), factor=4)
    merged = MeanLoss()
    merged.load([first.state_dict(), second.state_dict()])
    if rows.sum():
        expected = np.average(losses, weights=rows)
        assert whole.compute().item() == pytest.approx(expected)
        assert merged.compute().item() == pytest.approx(expected)
    else:
        assert whole.compute() is None


def test_a_loss_for_each_sample_counts_as_they_do():
    mean = MeanLoss()
    mean.update(torch.tensor([1.0, 3.0], requires_grad=True), 2)
    mean.update(torch.tensor(5.0), 2)
    assert mean.compute().item() == 3.5


@pytest.mark.parametrize("own", [False, True])
def test_a_loss_that_is_written_to_later_counts_as_it_was(own):
    mean = MeanLoss()
    loss, each = torch.tensor(5.0), torch.tensor([1.0, 3.0])
    mean.update(loss.clone() if own else loss, 1, own=own)
    mean.update(each, 1, own=own)
    loss.zero_(), each.zero_()
    assert mean.compute().item() == 3.5


def test_losses_are_added_up_many_at_once_and_never_too_many_wait():
    mean, waiting, most = MeanLoss(), [], 0
    for number in range(600):
        loss = torch.tensor(float(number))
        mean.update(loss, 1, own=True)
        waiting = [one for one in (*waiting, weakref.ref(loss)) if one() is not None]
        del loss
        most = max(most, len([one for one in waiting if one() is not None]))
    assert 100 <= most <= 256
    assert mean.compute().item() == 299.5
