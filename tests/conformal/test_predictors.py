"""The predictors as LightningModules around real modules: what they leave as it was, save, accept and refuse."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset

import lightning_tricks
from lightning_tricks.calibration import CalibratedClassifier
from lightning_tricks.conformal import ConformalClassifier, ConformalRegressor
from lightning_tricks.ensembles import VotingClassifier, VotingRegressor
from tests.emulated_cuda.device import EmulatedCuda
from tests.ensembles.nets import MLP, diabetes, digits
from tests.small import QUIET, HostReads, cases

SETTINGS = [
    {},
    {"score": "aps"},
    {"score": "raps"},
    {"score": "raps", "lambda_reg": 0.1, "k_reg": 2},
    {"groups": "class-conditional", "alpha": 0.3},
]


class Net(nn.Module):
    """Dropout, statistics of batches, and a buffer that each call changes."""

    def __init__(self, outputs=10, inputs=64):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(inputs, 32), nn.BatchNorm1d(32), nn.Dropout(0.5), nn.Linear(32, outputs))
        self.register_buffer("calls", torch.zeros(()))
        self.register_buffer("last", torch.zeros(()))
        self.steps = 0

    def forward(self, x):
        self.calls += 1
        self.steps += 1
        self.last = x.mean()  # another tensor
        return self.layers(x)


class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *inputs):
        return self.function(*inputs)


class LitNet(LightningModule):
    """A module that gets its batches from the hooks of Lightning."""

    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 10)

    def forward(self, x):
        return self.net(x)

    def on_after_batch_transfer(self, batch, dataloader_idx):
        return (batch[0] * 3, *batch[1:])


def _seeded(make, seed=0):
    with lightning_tricks.seeding.isolated_rng(seed):
        return make()


def _loader(count=400, batch_size=50, **arguments):
    return DataLoader(TensorDataset(*(part[:count] for part in digits()[0].tensors)), batch_size, **arguments)


def _test_pixels():
    return digits()[1].tensors[0]


# --- nothing changes


def test_calibration_leaves_no_trace():
    """What `calibrate` does not change either, whose test looks at more."""
    module, data, generator = _seeded(Net).train(), _loader().dataset, torch.Generator().manual_seed(5)
    before, states = copy.deepcopy(module.state_dict()), (generator.get_state(), torch.get_rng_state())
    ConformalClassifier(module, DataLoader(data, 50, sampler=RandomSampler(data, generator=generator)))
    torch.testing.assert_close(module.state_dict(), before, rtol=0, atol=0)
    assert (module.steps, module.training) == (0, True)
    assert torch.equal(generator.get_state(), states[0])
    assert torch.equal(torch.get_rng_state(), states[1])


@pytest.mark.parametrize("settings", SETTINGS)
def test_batches_workers_and_modes_make_no_difference(settings):
    module = _seeded(Net)
    made = [
        ConformalClassifier(module.train(), _loader(), **settings),
        ConformalClassifier(module.eval(), _loader(batch_size=7), **settings),
        ConformalClassifier(module, _loader(num_workers=2), **settings),
    ]
    with torch.inference_mode():
        made.append(ConformalClassifier(module, iter(_loader()), **settings))
    for other in made[1:]:
        torch.testing.assert_close(other.quantiles, made[0].quantiles)
        assert torch.equal(other.penalty, made[0].penalty)
    module.train()
    assert torch.equal(made[0].predict(_test_pixels()), made[0].eval()(_test_pixels()))
    assert made[3].load_state_dict(made[0].state_dict()), "nothing of it belongs to inference mode"


def test_an_error_keeps_the_calibration_that_there_was():
    conformal = ConformalClassifier(_seeded(Net), _loader(), score="raps")
    before = copy.deepcopy(conformal.state_dict())
    with pytest.raises(ValueError, match=r"alpha=0\.1 needs at least 9"):
        conformal.calibrate(_loader(30))
    with pytest.raises(AttributeError, match=r"alpha=0\.5 needs other quantiles: make a new ConformalClassifier"):
        conformal.alpha = 0.5
    assert all(torch.equal(value, before[name]) for name, value in conformal.state_dict().items())


def test_a_row_takes_the_memory_of_its_scores():
    logits, labels = torch.randn(64, 1000), torch.arange(64)
    for settings in ({}, {"score": "aps"}, {"score": "raps", "lambda_reg": 0.1, "k_reg": 5}):
        conformal = ConformalClassifier(nn.Identity(), **settings)
        kept = conformal.calibration_rows([logits], labels, torch.Generator())
        assert sum(part.numel() for part in kept) <= 6 * 64
        assert all(part.untyped_storage().nbytes() <= 8 * 64 for part in kept), "no view of a larger tensor"


# --- prediction


@pytest.mark.parametrize("settings", SETTINGS)
def test_sets_are_those_of_the_scores(settings):
    module = _seeded(Net).eval()
    with torch.no_grad():
        p = module(_test_pixels()).softmax(1).double().numpy()
    conformal = ConformalClassifier(module, _loader(), **settings)
    sets, limits, (weight, k_reg) = (
        conformal.predict(_test_pixels()),
        conformal.quantiles.double().numpy(),
        conformal.penalty,
    )
    more = np.where(p[:, None, :] > p[:, :, None], p[:, None, :], 0).sum(2)
    ranks = (p[:, None, :] > p[:, :, None]).sum(2) + 1
    scores = (
        1 - p if settings.get("score", "lac") == "lac" else more + float(weight) * np.maximum(0, ranks - float(k_reg))
    )
    near = np.abs(scores - limits) < 1e-6
    assert np.array_equal(sets.numpy()[~near], (scores <= limits)[~near])
    assert near.mean() < 0.01
    assert (limits.shape == (10,)) == ("groups" in settings)
    assert sets.dtype == torch.bool
    assert sets.device.type == "cpu"
    if conformal.score != "lac":
        assert sets.any(1).all(), "deterministic sets have a class"


def test_one_batch_form_is_as_good_as_another():
    conformal = ConformalClassifier(_seeded(Net), _loader())
    x, y = (part[:40] for part in digits()[1].tensors)
    expected = conformal.predict(x)
    assert torch.equal(conformal.predict(x.double().numpy()), expected)
    trainer = Trainer(**QUIET)
    for data in (TensorDataset(x), TensorDataset(x, y), x, x.double()):
        assert torch.equal(torch.cat(trainer.predict(conformal, DataLoader(data, 16))), expected)
    limit = conformal.quantiles.clone()
    for precision in ("bf16-mixed", "bf16-true"):
        low = Trainer(**QUIET, precision=precision).predict(conformal, DataLoader(x, 16))
        assert (torch.cat(low) == expected).float().mean() > 0.95
        assert torch.equal(conformal.quantiles, limit)


def test_several_inputs_and_dicts():
    def total(x, more=None):
        return {"logits": x["a"] + x["b"]} if isinstance(x, dict) else x + more

    x, y = torch.randn(60, 4), torch.arange(60) % 4
    expected = ConformalClassifier(nn.Identity(), [(x, y)]).predict(x)
    two, loaded = ConformalClassifier(Of(total), [(x / 2, x / 2, y)]), ConformalClassifier(Of(total))
    assert torch.equal(two.predict(x / 2, x / 2), expected)
    loaded.load_state_dict(two.state_dict())
    for parts in ((x / 2, x / 2), (x / 2, x / 2, y)):
        assert torch.equal(torch.cat(Trainer(**QUIET).predict(loaded, DataLoader(TensorDataset(*parts), 25))), expected)
    with pytest.raises(ValueError, match="must hold 2 inputs as in calibration, and perhaps a target, got 1 elements"):
        loaded.predict_step(x, 0)
    conformal = ConformalClassifier(Of(total), [({"a": x / 2, "b": x / 2}, y)])
    assert torch.equal(conformal.predict({"a": x / 2, "b": x / 2}), expected)
    rows = [({"a": row / 2, "b": row / 2}, label) for row, label in zip(x, y, strict=True)]
    assert torch.equal(torch.cat(Trainer(**QUIET).predict(conformal, DataLoader(rows, 25))), expected)


def test_a_lightning_module_prepares_its_batches():
    module = _seeded(LitNet)
    plain = ConformalClassifier(module.net, [(x * 3, y) for x, y in _loader()])
    conformal = ConformalClassifier(module, _loader())
    for made in (conformal, ConformalClassifier(torch.compile(module, backend="eager"), _loader())):
        assert torch.equal(made.quantiles, plain.quantiles)
    sets = Trainer(**QUIET).predict(conformal, DataLoader(digits()[1], 100))
    assert torch.equal(torch.cat(sets), plain.predict(_test_pixels() * 3))


class Writer(BasePredictionWriter):
    """Keeps the predictions of each rank, with the rows that they are of."""

    def __init__(self, folder):
        super().__init__("epoch")
        self.folder = folder

    def write_on_epoch_end(self, trainer, pl_module, predictions, batch_indices):
        rows = [row for batch in batch_indices[0] for row in batch]
        torch.save((rows, torch.cat(predictions)), self.folder / f"{trainer.global_rank}.pt")


@pytest.mark.oldest
def test_two_ranks_predict_what_one_does(tmp_path):
    conformal = ConformalClassifier(_seeded(Net), _loader(), score="aps")
    expected = conformal.predict(_test_pixels()[:33])
    trainer = Trainer(**QUIET, strategy="ddp_fork", devices=2, callbacks=[Writer(tmp_path)])
    trainer.predict(conformal, DataLoader(_test_pixels()[:33], 4), return_predictions=False)
    found = torch.zeros_like(expected)
    for rank in range(2):
        rows, sets = torch.load(tmp_path / f"{rank}.pt")
        assert len(rows) in (16, 17)
        found[rows] = sets
    assert torch.equal(found, expected)


def test_randomized_sets_follow_their_generator():
    def make(seed):
        return ConformalClassifier(_seeded(Net), _loader(), score="aps", generator=torch.Generator().manual_seed(seed))

    first, again, other = make(0), make(0), make(1)
    sets = first.predict(_test_pixels())
    assert torch.equal(sets, again.predict(_test_pixels()))
    assert not torch.equal(sets, first.predict(_test_pixels())), "each prediction draws anew"
    assert not torch.equal(first.quantiles, other.quantiles)
    for twin in (copy.deepcopy(other), pickle.loads(pickle.dumps(other))):
        assert torch.equal(twin.predict(_test_pixels()), copy.deepcopy(other).predict(_test_pixels()))


def test_empty_sets_are_kept_or_get_the_top_class():
    logits, labels = torch.eye(3).repeat(10, 1) * 2, torch.arange(3).repeat(10)
    unsure = torch.tensor([[1.0, 1.1, 1.0], [3.0, 0.0, 0.0]])
    assert ConformalClassifier(nn.Identity(), [(logits, labels)]).predict(unsure).sum(1).tolist() == [0, 1]
    filled = ConformalClassifier(nn.Identity(), [(logits, labels)], allow_empty=False).predict(unsure)
    assert filled.tolist() == [[False, True, False], [True, False, False]]


@pytest.mark.parametrize("score", ["lac", "raps"])
def test_rows_that_are_equal_are_covered_one_by_one_as_well(score):
    logits, labels = torch.tensor([[2.0, 0.5, 0.0]]).repeat(100, 1), (torch.arange(100) % 4 == 0).long()
    # last bits that depend on the size of the batch, as those of a product of matrices do
    unsteady = Of(lambda x: x * (1 + 5e-7 * (len(x) == 1)))
    conformal = ConformalClassifier(unsteady, [(logits, labels)], score=score)
    assert torch.equal(conformal.predict(logits[:1]), conformal.predict(logits[:2])[:1])


@pytest.mark.parametrize("score", ["lac", "aps"])
def test_sets_of_a_net_that_is_far_too_sure_are_no_larger_than_they_need_to_be(score):
    logits = torch.tensor([[60.0, 30.0, 0.0, 0.0]]).repeat(100, 1)
    labels = (torch.arange(100) < 20).long()  # of which the net is sure that they are 0, to 1 - 1e-13
    sets = ConformalClassifier(nn.Identity(), [(logits, labels)], score=score).predict(logits[:1])
    assert sets.tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("score", ["lac", "aps", "raps"])
def test_a_row_of_nan_has_all_classes(score):
    logits, labels = torch.randn(200, 3), torch.arange(200) % 3
    sets = ConformalClassifier(nn.Identity(), [(logits, labels)], score=score).predict(torch.full((1, 3), torch.nan))
    assert sets.tolist() == [[True, True, True]]


def test_a_group_without_calibration_rows_has_all_classes_and_values():
    def groups(x):
        return x[:, 0] > 0

    x, y = torch.rand(40, 3) + 0.1, torch.arange(40) % 3
    conformal = ConformalClassifier(nn.Identity(), [(x, y)], groups=groups)
    sets = conformal.predict(torch.tensor([[-1.0, 9, 0], [9.0, 0, 0]]))
    assert sets.sum(1).tolist()[0] == 3
    assert sets.sum(1).tolist()[1] < 3
    mixed = torch.cat([x, x[:30] * torch.tensor([-1.0, 1, 1])])
    covered = conformal.predict(mixed)[torch.arange(70), y.repeat(2)[:70]].float()
    found = conformal.coverage([(mixed[:50], y.repeat(2)[:50]), (mixed[50:], y.repeat(2)[50:70])])
    assert found == pytest.approx({0: float(covered[40:].mean()), 1: float(covered[:40].mean())})
    x = x[:, :1]
    made = ConformalRegressor(nn.Identity(), [(x, x + 1)], groups=groups).predict(torch.tensor([[-1.0], [1.0]]))
    assert made[0].tolist() == [-torch.inf, torch.inf]
    assert made[1].isfinite().all()


def test_the_coverage_of_intervals_is_that_of_their_ends():
    def groups(x):
        return (x > 0).long()

    x, noise = torch.linspace(-1, 1, 200), torch.randn(400, generator=torch.Generator().manual_seed(0))
    conformal = ConformalRegressor(nn.Identity(), [(x, x + noise[:200])], alpha=0.2, groups=groups)
    truth = (x + noise[200:]).view(-1, 1)
    lower, upper = conformal.predict(x).unbind(1)
    held = (lower <= truth[:, 0]) & (truth[:, 0] <= upper)
    found = conformal.coverage([(x[:50], truth[:50]), (x[50:], truth[50:])])
    assert found == pytest.approx({int(side): float(held[groups(x) == side].float().mean()) for side in (0, 1)})
    assert 0.6 < min(found.values()) < 1


@pytest.mark.parametrize("settings", SETTINGS)
def test_prediction_waits_for_nothing(settings):
    conformal = ConformalClassifier(_seeded(Net), _loader(), **settings)
    with HostReads() as reads:
        conformal(_test_pixels())
    assert reads.count == 0


def test_a_compiled_module_predicts_the_same():
    net = _seeded(Net)
    expected = ConformalClassifier(net, _loader(), score="aps").predict(_test_pixels())
    compiled = torch.compile(ConformalClassifier(net, _loader(), score="aps"), backend="eager")
    assert torch.equal(compiled(_test_pixels()), expected)


def test_on_a_device():
    x = _test_pixels()
    for make, module in ((ConformalClassifier, _seeded(Net)), (ConformalRegressor, _seeded(lambda: Net(1)))):
        expected = make(module, _loader())
        with EmulatedCuda():
            conformal = make(copy.deepcopy(module).to("cuda"), _loader())
            assert conformal.quantiles.device.type == "cuda"
            made = conformal.predict(x)
            assert made.device.type == "cpu"
            sets = Trainer(**{**QUIET, "accelerator": "cuda"}, devices=1).predict(conformal, DataLoader(x, 100))
            torch.testing.assert_close(torch.cat([part.cpu() for part in sets]), made)
        torch.testing.assert_close(made, expected.predict(x))


# --- the state


@pytest.mark.oldest
@pytest.mark.parametrize("settings", SETTINGS)
def test_the_state_dict_is_plain_and_is_all(settings, tmp_path):
    conformal = ConformalClassifier(_seeded(Net), _loader(), **settings)
    assert all(type(value) is torch.Tensor for value in conformal.state_dict().values())
    torch.save(conformal.state_dict(), tmp_path / "state.pt")
    other = ConformalClassifier(_seeded(Net, 1), **settings)
    with pytest.raises(RuntimeError, match="ConformalClassifier is not calibrated: give loader="):
        other.predict(_test_pixels())
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    assert torch.equal(other.predict(_test_pixels()), conformal.predict(_test_pixels()))
    trainer = Trainer(**QUIET)
    sets = trainer.predict(conformal, DataLoader(_test_pixels(), 100))
    trainer.save_checkpoint(tmp_path / "conformal.ckpt")
    found = ConformalClassifier.load_from_checkpoint(tmp_path / "conformal.ckpt", module=_seeded(Net, 1))
    assert (found.alpha, found.score, found.groups) == (conformal.alpha, conformal.score, conformal.groups)
    assert torch.equal(found.predict(_test_pixels()), torch.cat(sets))
    empty = ConformalClassifier(_seeded(Net), **settings)
    other.load_state_dict(empty.state_dict())
    with pytest.raises(RuntimeError, match="is not calibrated"):
        other.predict(_test_pixels())


@cases(
    "settings, others",
    ({}, {"alpha": 0.2}),
    ({}, {"score": "aps"}),
    ({"score": "aps"}, {"score": "aps", "generator": torch.Generator()}),
    ({"groups": "class-conditional", "alpha": 0.3}, {"alpha": 0.3}),
    ({"groups": lambda x: x[:, 0] > 2}, {}),
    ({"score": "raps"}, {"score": "raps", "k_reg": 3}),
)
def test_a_state_of_other_arguments_is_refused(settings, others):
    state = ConformalClassifier(_seeded(Net), _loader(), **settings).state_dict()
    other = ConformalClassifier(_seeded(Net, 1), _loader(), **others)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=r'The state dict was calibrated with \{"alpha": .*give the same arguments'):
        other.load_state_dict(state)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


def test_a_checkpoint_of_groups_needs_the_function(tmp_path):
    def groups(x):
        return x.mean(1) > 0.3

    conformal = ConformalClassifier(_seeded(Net), _loader(), groups=groups)
    trainer = Trainer(**QUIET)
    trainer.predict(conformal, DataLoader(_test_pixels(), 100))
    path = tmp_path / "conformal.ckpt"
    trainer.save_checkpoint(path)
    with pytest.raises(ValueError, match='"groups": "a function"'):
        ConformalClassifier.load_from_checkpoint(path, module=_seeded(Net))
    found = ConformalClassifier.load_from_checkpoint(path, module=_seeded(Net), groups=groups)
    assert torch.equal(found.predict(_test_pixels()), conformal.predict(_test_pixels()))


class Touches:
    """A stranger's object, which writes a file when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.mark.oldest
def test_a_checkpoint_runs_no_code(tmp_path):
    torch.save({"state_dict": {}, "hyper_parameters": {"alpha": Touches(tmp_path / "victim")}}, tmp_path / "a.ckpt")
    with pytest.raises(lightning_tricks.checkpoint_remapping.CheckpointError):
        ConformalClassifier.load_from_checkpoint(tmp_path / "a.ckpt", module=_seeded(Net))
    assert not (tmp_path / "victim").exists()


@pytest.mark.oldest
@pytest.mark.parametrize("change", [nn.Module.half, nn.Module.bfloat16, nn.Module.double])
def test_the_quantile_keeps_its_precision(change):
    conformal = ConformalClassifier(_seeded(Net), _loader(), score="raps")
    before = {name: value.clone() for name, value in conformal.state_dict().items() if "module" not in name}
    change(conformal)
    for name, value in before.items():
        assert torch.equal(conformal.state_dict()[name], value)
        assert conformal.state_dict()[name].dtype == value.dtype
    assert conformal.predict(_test_pixels()).any(1).all()
    plain, other = ConformalClassifier(_seeded(Net), _loader()), ConformalClassifier(change(_seeded(Net)), _loader())
    assert other.quantiles.dtype == torch.float64
    torch.testing.assert_close(other.quantiles, plain.quantiles, rtol=0, atol=0.02)
    assert (other.predict(_test_pixels()) == plain.predict(_test_pixels())).float().mean() > 0.97
    regressor = ConformalRegressor(change(_seeded(lambda: Net(1))), _loader())
    assert regressor.predict(_test_pixels()).isfinite().all()


# --- ensembles


def test_ensembles_of_classifiers():
    members = [_seeded(MLP, seed) for seed in range(3)]
    ensemble = VotingClassifier(members)
    with pytest.raises(ValueError, match="outputs='logits', but VotingClassifier returns probabilities: leave outputs"):
        ConformalClassifier(ensemble, _loader(), outputs="logits")
    with pytest.raises(ValueError, match='outputs="probabilities", but 400 of the 400 rows'):
        ConformalClassifier(members[0], _loader(), outputs="probabilities")
    for made in (nn.Sequential(members[0], nn.Softmax(1)), nn.Sequential(members[0], nn.Sigmoid())):
        with pytest.raises(ValueError, match=r"400 rows that the module returns .* may be logits or probabilities"):
            ConformalClassifier(made, _loader())
    expected = ConformalClassifier(members[0], _loader()).predict(_test_pixels())
    given = ConformalClassifier(nn.Sequential(members[0], nn.Softmax(1)), _loader(), outputs="probabilities")
    assert torch.equal(given.predict(_test_pixels()), expected)
    calibrated = CalibratedClassifier(members[0])
    calibrated.calibration.set_values(temperature=torch.tensor(1.0))
    assert torch.equal(ConformalClassifier(calibrated, _loader()).predict(_test_pixels()), expected)
    conformal = ConformalClassifier(ensemble, _loader())
    assert torch.equal(conformal.predict(_test_pixels()), ensemble.predict(_test_pixels()) >= 1 - conformal.quantiles)
    other = ConformalClassifier(members[0])
    with pytest.raises(ValueError, match=r"calibrated with .*probabilities"):
        other.load_state_dict(conformal.state_dict(), strict=False)
    hard = ConformalClassifier(VotingClassifier(members, voting_strategy="hard"), _loader())
    assert hard.predict(_test_pixels()).all(), "untrained members miss more than a tenth, so that 1 is the quantile"


def test_ensembles_of_regressors():
    loader, (x, _) = DataLoader(diabetes()[0], 32), diabetes()[1].tensors
    ensemble = VotingRegressor([_seeded(lambda: MLP(10, 1), seed) for seed in range(4)])
    uncertainty = ensemble.predict_uncertainty(x)
    made = ConformalRegressor(ensemble, loader).predict(x)
    torch.testing.assert_close(made.mean(1, keepdim=True), uncertainty.mean)
    assert (made[:, 1] - made[:, 0]).std() < 1e-5
    scaled = ConformalRegressor(ensemble, loader, score="normalised")
    made = scaled.predict(x)
    torch.testing.assert_close(made.mean(1, keepdim=True), uncertainty.mean)
    widths = (made[:, 1] - made[:, 0]) / 2 / uncertainty.total.sqrt()[:, 0]
    torch.testing.assert_close(widths, scaled.quantiles.expand(len(x)))
    torch.testing.assert_close(torch.cat(Trainer(**QUIET).predict(scaled, DataLoader(diabetes()[1], 32))), made)


# --- intervals


def test_intervals_of_several_forms_are_equal():
    forms = (lambda x: torch.stack([x, x + 2], 1), lambda x: (x, x + 2), lambda x: [x.unsqueeze(1), x.unsqueeze(1) + 2])
    x = torch.linspace(0.5, 3, 40)
    y = x + torch.linspace(-1, 4, 40)
    for score in ("normalised", "quantile"):
        made = [
            ConformalRegressor(Of(form), [(x, target)], score=score).predict(x)
            for form in forms
            for target in (y, y.unsqueeze(1))
        ]
        assert all(torch.equal(other, made[0]) for other in made)
        assert made[0].shape == (40, 2)


OUTPUTS = {
    "absolute": lambda x: x,
    "normalised": lambda x: (x, 0.3 + x.abs() / 7),
    "quantile": lambda x: (x - 1.1, x + 0.7),
}


@pytest.mark.parametrize("score", OUTPUTS)
def test_values_that_are_just_as_far_away_as_the_quantile_are_in_the_interval(score):
    conformal = ConformalRegressor(Of(OUTPUTS[score]), score=score)
    for mean in torch.linspace(-3, 3, 40):
        x, y = mean.repeat(9), torch.full((9,), 7)
        conformal.calibrate([(x, y)])
        lower, upper = conformal.predict(x).T
        assert ((lower <= 7) & (upper >= 7)).all()


def test_whole_numbers_keep_their_precision():
    y = 10**12 + torch.arange(100)
    limit = ConformalRegressor(nn.Identity(), [(torch.full((100,), 1e12, dtype=torch.float64), y)]).quantiles
    assert limit.tolist() == [90]


def test_a_scale_that_is_none_gives_no_interval():
    x = torch.rand(40, 2) + 0.1
    conformal = ConformalRegressor(Of(lambda x: (x[:, 0], x[:, 1])), [(x, x[:, 0] + 1)], score="normalised")
    made = conformal.predict(torch.tensor([[1.0, 0.0], [1.0, -2.0], [1.0, 1.0]]))
    assert made.isnan().tolist() == [[True, True], [True, True], [False, False]]
    with pytest.raises(ValueError, match=r"1 of 41 calibration rows are NaN or infinite: .* a scale a number > 0"):
        conformal.calibrate([(x, x[:, 0]), (torch.tensor([[0.0, -1.0]]), torch.zeros(1))])


# --- what is refused

X, Y = torch.randn(30, 3), torch.arange(30) % 3


@cases(
    "arguments, error, message",
        ({"module": "net"}, TypeError, "module must be a torch.nn.Module that is trained, got 'net'"),
        ({"alpha": 1}, ValueError, "alpha must be a number > 0 and < 1, .* got 1"),
        ({"score": "lak"}, ValueError, "score must be one of lac, aps, raps, got 'lak'. Did you mean 'lac'"),
        ({"outputs": "logit"}, ValueError, "outputs must be one of logits, probabilities, got 'logit'"),
        ({"groups": "class"}, ValueError, "groups must be one of class-conditional, got 'class'"),
        ({"k_reg": 1}, ValueError, "lambda_reg and k_reg belong to score=\"raps\", got score='lac'"),
        ({"score": "raps", "k_reg": -1}, ValueError, "k_reg must be a whole number >= 0, got -1"),
        ({"score": "raps", "lambda_reg": -1}, ValueError, "lambda_reg must be a finite number >= 0, got -1"),
        ({"generator": torch.Generator()}, ValueError, 'torch.Generator, for score="aps" or "raps"'),
        ({"score": "aps", "generator": 0}, ValueError, "generator must be a torch.Generator, .* got 0"),
        ({"loader": []}, ValueError, "loader has no rows to calibrate with"),
        ({"loader": [(X[:0], Y[:0])]}, ValueError, "loader has no rows to calibrate with"),
        ({"loader": [X]}, TypeError, r"loader must give batches \(x, y\) .* got Tensor"),
        ({"loader": [(X, Y, Y)]}, TypeError, "3 were given; a batch must contain what `forward` takes, and then"),
        ({"loader": [(X, None)]}, TypeError, r"loader must give batches \(x, y\)"),
        ({"loader": LightningDataModule()}, TypeError, r"or datamodule.val_dataloader\(\) does, got .*DataModule"),
        ({"loader": [{"x": X, "y": Y}]}, TypeError, "got dict"),
        ({"alpha": 0.01}, ValueError, "alpha=0.01 needs at least 99 calibration rows, got 30"),
        ({"loader": [(X, Y + 1)]}, ValueError, "class 3 is not one of the module's 3 classes, 0 to 2"),
        ({"loader": [(X, Y - 1)]}, ValueError, "class -1 is not .* 0 to 2: correct it, or leave such rows"),
        ({"loader": [(X, Y.float())]}, ValueError, r"targets must be class indices, .* of torch.float32"),
        ({"loader": [(X, Y.unsqueeze(1))]}, ValueError, r"targets must be class indices, \(30,\), got \(30, 1\)"),
        ({"loader": [(X, Y[:7])]}, ValueError, r"targets must be class indices, \(30,\), got \(7,\)"),
        ({"loader": [(X.where(X > -1, torch.nan), Y)]}, ValueError, "of 30 calibration rows are NaN or infinite"),
        ({"loader": [(X[:, :1], Y)]}, ValueError, r"classes, \(N, C\), got \(30, 1\): for a single logit .*pad"),
        ({"loader": [(X[:, 0], Y)]}, ValueError, r"got \(30,\)"),
        ({"module": nn.LSTM(3, 3)}, ValueError, "got tuple"),
        ({"groups": "class-conditional", "loader": [(X, Y * 0)]}, ValueError, "group 1 has 0, group 2 has 0"),
        ({"groups": lambda x: x[:, 0]}, ValueError, r"whole numbers \(30,\), got \(30,\) of torch.float32"),
        ({"groups": lambda x: torch.tensor(1)}, ValueError, r"groups must return whole numbers \(30,\), got \(\)"),
        ({"groups": lambda x: torch.arange(30) < 3}, ValueError, r"9 calibration rows of each group: group 1 has 3\."),
        ({"score": "raps"}, ValueError, "at least 9 rows to calibrate, and as many .* got 2. and .: give"),
)  # fmt: skip
def test_bad_input_of_classifiers_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ConformalClassifier(**{"module": nn.Identity(), "loader": [(X, Y)], **arguments})


@cases(
    "arguments, error, message",
    ({"score": "normalized"}, ValueError, "score must be one of absolute, normalised, quantile, .*'normalised'"),
    ({"groups": "class-conditional"}, TypeError, "groups must be a function of the inputs of a batch"),
    ({"loader": [(X, X)]}, ValueError, r"module must return one number for each row, .* got \(30, 3\): use a separate"),
    ({"loader": [(X[:, 0], X)]}, ValueError, r"targets must be one number for each row, .* got \(30, 3\)"),
    ({"loader": [(X[:, 0], X[:7, 0])]}, ValueError, "the module returns 30 values for 7 targets"),
    ({"loader": [(X[:1, 0], X[:, 0])]}, ValueError, "the module returns 1 values for 30 targets"),
    ({"score": "quantile"}, ValueError, r'for score="quantile", module must return two numbers for each row'),
    ({"score": "normalised"}, ValueError, r'for score="normalised", module must return two numbers .* got \(30,\)'),
    ({"loader": [(X[:, 0], X[:, 0] * torch.nan)]}, ValueError, "scores of 30 of 30 calibration rows are NaN"),
    ({"loader": [(X[:, 0] / 0, X[:, 0])]}, ValueError, "scores of 30 of 30 calibration rows are NaN or infinite"),
)
def test_bad_input_of_regressors_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        ConformalRegressor(**{"module": nn.Identity(), "loader": [(X[:, 0], X[:, 1])], **arguments})
