"""The two thresholds against reference implementations, and against what is not finite."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_tricks.gradient_clipping import PercentileThreshold, ZScoreThreshold
from tests.small import HostReads, same

_norms = st.lists(st.floats(2**-10, 2**10, width=32), min_size=1, max_size=60)


def _updates(threshold, norms):
    return [threshold.update(torch.tensor(norm)).item() for norm in norms]


@settings(derandomize=True)
@given(norms=_norms, percentile=st.floats(1, 100), history=st.integers(1, 20))
def test_percentile_equals_numpy(norms, percentile, history):
    seen = _updates(PercentileThreshold(percentile, history), norms)
    expected = [np.percentile(norms[max(0, i + 1 - history) : i + 1], percentile) for i in range(len(norms))]
    np.testing.assert_allclose(seen, expected, rtol=1e-5)


class _SlowZClip:
    """ZClip's formulas in float64, with lists."""

    def __init__(self, z, decay, warmup_steps):
        self.z, self.decay, self.warmup_steps, self.norms, self.mean = z, decay, warmup_steps, [], None

    def update(self, norm):
        if self.mean is None:
            self.norms.append(norm)
            if len(self.norms) == self.warmup_steps:
                self.mean, self.variance = np.mean(self.norms), np.var(self.norms)
            return math.inf
        std = self.variance**0.5
        score = (norm - self.mean) / (std + 1e-6)
        threshold = self.mean + self.z * std / (score / self.z) if score > self.z else math.inf
        kept = min(norm, threshold)
        self.mean = self.decay * self.mean + (1 - self.decay) * kept
        self.variance = self.decay * self.variance + (1 - self.decay) * (kept - self.mean) ** 2
        return threshold


@pytest.mark.parametrize(("z", "decay", "warmup_steps"), [(2.5, 0.97, 25), (1.0, 0.5, 1), (0.5, 0.9, 3)])
def test_z_score_equals_the_reference_implementation(z, decay, warmup_steps):
    generator = torch.Generator().manual_seed(0)
    ours, slow = ZScoreThreshold(z, decay, warmup_steps), _SlowZClip(z, decay, warmup_steps)
    clipped = 0
    for step in range(200):
        norm = torch.rand((), generator=generator, dtype=torch.float64) * (10 if step % 17 == 0 else 1)
        expected = slow.update(norm.item())
        assert ours.update(norm).item() == pytest.approx(expected, rel=1e-4)
        clipped += expected < math.inf
    assert clipped >= 5


@pytest.mark.trap("gradient_clipping: one NaN poisons ZClip's averages for ever")
@settings(derandomize=True)
@given(norms=st.lists(st.one_of(st.floats(2**-10, 2**10, width=32), st.just(math.nan), st.just(math.inf)), max_size=60))
@pytest.mark.parametrize("make", [lambda: PercentileThreshold(30, 4), lambda: ZScoreThreshold(1.0, 0.9, 3)])
def test_nonfinite_norms_take_no_place_in_the_history(make, norms):
    clean, spoilt = make(), make()
    for norm in norms:
        threshold = spoilt.update(torch.tensor(norm))
        assert not threshold.isnan()
        if math.isfinite(norm):
            assert torch.equal(threshold, clean.update(torch.tensor(norm)))
    assert torch.equal(spoilt.update(torch.tensor(3.0)), clean.update(torch.tensor(3.0)))


@pytest.mark.trap("gradient_clipping: ZClip's callback has no state_dict")
@pytest.mark.parametrize("make", [lambda: PercentileThreshold(30, 5), lambda: ZScoreThreshold(1.0, 0.9, 3)])
@pytest.mark.parametrize("stop", [0, 2, 9])
def test_resumes_from_its_state(make, stop):
    norms = [1.0, 2.0, 1.5, 0.5, 9.0, 1.0, 2.0, 3.0, 1.0, 20.0, 2.0, 7.0]
    whole, first, second = make(), make(), make()
    expected = _updates(whole, norms)
    _updates(first, norms[:stop])
    state = first.state_dict()
    kept = {name: tensor.clone() for name, tensor in state.items()}
    second.load_state_dict(state)
    assert _updates(second, norms[stop:]) == expected[stop:]
    _updates(first, norms)
    assert same(state, kept) or all(torch.equal(state[k].nan_to_num(-1), kept[k].nan_to_num(-1)) for k in kept)


def test_another_history_is_refused():
    threshold = PercentileThreshold(10, history=5)
    threshold.update(torch.tensor(1.0))
    with pytest.raises(ValueError, match="holds 5 gradient norms, but history is 6: set history=5"):
        PercentileThreshold(10, history=6).load_state_dict(threshold.state_dict())


def test_reads_nothing_back():
    thresholds = PercentileThreshold(), ZScoreThreshold(warmup_steps=1)
    with HostReads() as reads:
        for norm in torch.rand(5).unbind():
            for threshold in thresholds:
                threshold.update(norm)
    assert reads.count == 0
