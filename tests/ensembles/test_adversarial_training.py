"""Adversarial training: where samples are moved to, what that leaves alone, and what members learn of it."""

import copy

import pytest
import torch
from lightning.pytorch import Callback
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks.ensembles import AdversarialTrainingClassifier, AdversarialTrainingRegressor
from lightning_tricks.ensembles.adversarial_training import extended_extremes
from tests.ensembles.nets import CNN, MLP, few, fit, same, some, values
from tests.small import cases, real_fp16

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")
SGD = ("SGD", {"lr": 0.1})


def _by_hand(member, train, epsilon, epochs=2):
    """One member, trained in plain torch on samples and on what the ranges of features so far make of them."""
    optimizer = torch.optim.SGD(member.parameters(), lr=0.1)
    lowest, highest = float("inf"), float("-inf")
    for _ in range(epochs):
        for x, y in train:
            lowest = torch.minimum(x.amin(0), torch.as_tensor(lowest))
            highest = torch.maximum(x.amax(0), torch.as_tensor(highest))
            leaf = x.clone().requires_grad_()
            (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(copy.deepcopy(member)(leaf), y), leaf)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(member(x), y)
            moved = x + epsilon * (highest - lowest) * gradient.sign()
            statistics = {name: buffer.clone() for name, buffer in member.named_buffers()}
            loss = loss + nn.functional.cross_entropy(member(moved), y)
            loss.backward()
            for name, buffer in member.named_buffers():
                buffer.copy_(statistics[name])
            optimizer.step()


@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("make", [MLP, CNN])
def test_members_are_those_of_a_loop_in_plain_torch(make, shared, vectorize):
    train = some(shuffle=False)
    ensemble = AdversarialTrainingClassifier(
        make, 2, epsilon=0.05, optimizer=SGD, shared_order=shared, vectorize=vectorize, seed=0
    )
    alone = copy.deepcopy(ensemble.estimators_.member(1)).train()
    fit(ensemble, train, max_epochs=2)
    _by_hand(alone, train, 0.05)
    same(values(ensemble.estimators_.member(1)), values(alone), atol=1e-4, rtol=1e-3)


@pytest.mark.trap("ensembles: AdversarialTraining of torchensemble raises at a constant batch")
@pytest.mark.trap("ensembles: AdversarialTraining has one epsilon for all features, not a share of each range")
@pytest.mark.parametrize("feature_range", [None, 2.0])
def test_each_feature_is_moved_by_a_share_of_its_range(feature_range):
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([1.0, 100.0, 0.01, 0.0])
    x = torch.rand(64, 4, generator=generator) * scale - 3
    seen = []

    class Watches(nn.Linear):
        def forward(self, x):
            seen.append(x.detach().clone())
            return super().forward(x)

    options = {"epsilon": 0.01, "feature_range": feature_range, "optimizer": SGD, "seed": 0}
    ensemble = AdversarialTrainingClassifier([Watches(4, 3)], **options)
    fit(ensemble, DataLoader(TensorDataset(x, torch.arange(64) % 3), 64))
    clean, moved = seen
    width = torch.full((4,), feature_range) if feature_range else x.amax(0) - x.amin(0)
    torch.testing.assert_close((moved - clean).abs(), (0.01 * width).expand(64, 4), atol=2e-6, rtol=1e-3)
    assert feature_range or width[3] == 0, "a constant feature stays"


@pytest.mark.trap("ensembles: the user's tensor gets requires_grad=True")
def test_batches_stay_as_they_are():
    class Watch(Callback):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
            self.before = [tensor.clone() for tensor in batch]

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            assert all(map(torch.equal, self.before, batch))
            assert not batch[0].requires_grad
            assert batch[0].grad is None

    fit(AdversarialTrainingClassifier(MLP, 2, seed=0), some(), callbacks=[Watch()])


def _ranges(ensemble):
    """The ranges of the features of each input, as a checkpoint tells them."""
    checkpoint = {}
    ensemble.on_save_checkpoint(checkpoint)
    return [None if both is None else both.sum(0) for both in checkpoint["ensemble"]["feature_extremes"]]


def test_ranges_widen_batch_by_batch_and_survive_a_checkpoint(tmp_path):
    ensemble = AdversarialTrainingClassifier(MLP, 2, seed=0)
    trainer = fit(ensemble, some())
    x = some().dataset.tensors[0]
    (width,) = _ranges(ensemble)
    torch.testing.assert_close(width, x.amax(0) - x.amin(0))
    trainer.save_checkpoint(tmp_path / "a.ckpt")
    loaded = AdversarialTrainingClassifier.load_from_checkpoint(tmp_path / "a.ckpt", weights_only=True)
    assert torch.equal(_ranges(loaded)[0], width)
    fit(ensemble, few(TensorDataset(x / 2, some().dataset.tensors[1]), 64))
    torch.testing.assert_close(_ranges(ensemble)[0], width / 2)


def test_ranges_of_samples_of_several_shapes_need_a_number():
    extremes = extended_extremes([], [torch.rand(4, 3, 8)])
    with pytest.raises(ValueError, match=r"\(3, 9\) and \(3, 8\), so that a feature has no range: give feature_range"):
        extended_extremes(extremes, [torch.rand(4, 3, 9)])


class _TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.net = nn.Embedding(5, 6), nn.Linear(6 + 3, 4)

    def forward(self, words, x):
        return self.net(torch.cat([self.words(words), x], 1))


def test_inputs_of_whole_numbers_stay():
    words, x = torch.arange(16) % 5, torch.rand(16, 3)
    data = TensorDataset(words, x, torch.arange(16) % 4)
    trained = []
    for vectorize in (True, False):
        ensemble = AdversarialTrainingClassifier(_TwoInputs, 2, optimizer=SGD, vectorize=vectorize, seed=0)
        fit(ensemble, DataLoader(data, 8, shuffle=True), max_epochs=2)
        assert _ranges(ensemble)[0] is None
        trained.append(values(ensemble))
    same(*trained, atol=1e-4, rtol=1e-3)
    with pytest.raises(TypeError, match=r"whole numbers have none, got torch.int64: give floating-point inputs"):
        fit(
            AdversarialTrainingClassifier(nn.Embedding, 2, {"num_embeddings": 5, "embedding_dim": 4}, seed=0),
            DataLoader(TensorDataset(words, torch.arange(16) % 4), 8),
        )


def test_an_input_that_a_model_does_not_use_stays():
    class Ignores(MLP):
        def forward(self, x, other):
            return super().forward(x)

    x, y = some().dataset.tensors
    fit(AdversarialTrainingClassifier(Ignores, 2, seed=0), DataLoader(TensorDataset(x, torch.rand(64, 2), y), 16))


def test_gradients_of_samples_do_not_vanish_in_half_precision():
    moved = []

    class Faint(nn.Linear):
        """Gradients of its inputs are smaller than fp16 holds."""

        def forward(self, x):
            moved.append(x.detach().float())
            return super().forward(x * 1e-6)

    x = torch.rand(16, 8)
    ensemble = AdversarialTrainingClassifier([Faint(8, 3)], feature_range=1.0, optimizer=SGD, seed=0)
    fit(ensemble, DataLoader(TensorDataset(x, torch.arange(16) % 3), 16), plugins=real_fp16())
    assert ((moved[1] - moved[0]).abs() > 0.005).float().mean() > 0.9


@pytest.mark.trap("ensembles: AdversarialTraining's epsilon is 0.5 in the signature and 0.01 in the docs")
@cases(
    "arguments, words",
    ({"epsilon": 0}, r"epsilon must be a number > 0 and <= 1 \(a share of each feature's range\), got 0"),
    ({"epsilon": 2}, "got 2"),
    ({"feature_range": 0}, "feature_range must be a number > 0, got 0"),
)
def test_arguments(arguments, words):
    with pytest.raises(ValueError, match=words):
        AdversarialTrainingRegressor(MLP, 2, **arguments)
    assert AdversarialTrainingRegressor(MLP, 2).epsilon == 0.01
