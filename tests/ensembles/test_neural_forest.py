"""Neural forests: trees against torchensemble's and against loops, the penalty, and sizes that follow from the data."""

import copy
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from lightning.pytorch import LightningDataModule, Trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset
from torchensemble._base import BaseTree

from lightning_tricks.ensembles import NeuralForestClassifier
from lightning_tricks.ensembles.neural_forest import SoftDecisionTree, balance_penalty
from tests.ensembles.nets import digits, fit, some, values
from tests.small import QUIET, cases

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_a_tree_is_torchensembles(depth):
    tree, theirs = SoftDecisionTree(12, 3, depth), BaseTree(12, 3, depth)
    theirs.load_state_dict(tree.state_dict())
    x = torch.randn(7, 3, 4)
    torch.testing.assert_close(tree(x), theirs(x))


def _penalty_of_loops(gates, lamda):
    """The penalty of one tree, node by node and sample by sample."""
    total, nodes = 0.0, gates.shape[1]
    for node in range(nodes):
        arrive, left = 0.0, 0.0
        for sample in gates.double().tolist():
            probability, at = 1.0, node
            while at:  # from the node to the root
                parent, is_right = (at - 1) // 2, at % 2 == 0
                probability *= 1 - sample[parent] if is_right else sample[parent]
                at = parent
            arrive += probability
            left += probability * sample[node]
        share, level = torch.tensor(left / arrive), (node + 1).bit_length() - 1
        total -= lamda * 2.0**-level * 0.5 * (share.log() + (1 - share).log()).item()
    return total


@given(st.integers(1, 4), st.integers(1, 6), st.floats(0, 10), st.integers(0, 2**31))
@settings(max_examples=25)
def test_the_penalty_is_that_of_loops(depth, batch, lamda, seed):
    gates = torch.rand(2, batch, 2**depth - 1, generator=torch.Generator().manual_seed(seed)) * 0.98 + 0.01
    found = balance_penalty(gates, lamda)
    assert found.tolist() == pytest.approx([_penalty_of_loops(tree, lamda) for tree in gates], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_penalty_of_gates_that_are_shut_is_finite(dtype):
    for value in (0.0, 1.0):
        gates = torch.full((1, 4, 7), value, dtype=dtype, requires_grad=True)
        penalty = balance_penalty(gates, 1.0)
        penalty.sum().backward()
        assert penalty.isfinite().all()
        assert gates.grad.isfinite().all()


@pytest.mark.trap("ensembles: NeuralForest drops the penalty, lamda=1e3 and 1e-9 train bit-identical weights")
@pytest.mark.parametrize("vectorize", [True, False])
@pytest.mark.parametrize("shared", [True, False])
def test_the_penalty_is_in_the_loss(vectorize, shared):
    def trained(lamda):
        forest = NeuralForestClassifier(
            2, 3, lamda, 10, vectorize=vectorize, shared_order=shared, optimizer=("Adam", {"lr": 1e-2}), seed=0
        )
        trainer = fit(forest, some(), max_epochs=3)
        gates = forest.estimators_.member(0).inner_nodes(torch.cat([torch.ones(64, 1), some().dataset.tensors[0]], 1))
        return balance_penalty(gates.unsqueeze(0), 1.0).item(), trainer.callback_metrics["train/loss"].item()

    (free, loss), (bound, loss_with_penalty) = trained(0.0), trained(10.0)
    assert bound < free - 0.05
    assert loss_with_penalty > loss + 10


def test_trees_that_are_shared_out_have_the_penalty_of_their_own_rows():
    forests = [
        NeuralForestClassifier(3, 2, 1.0, 10, n_inputs=64, vectorize=vectorize, seed=0) for vectorize in (True, False)
    ]
    x, y = (tensor[:20] for tensor in digits()[0].tensors)
    losses = [forest.training_loss([x], y.expand(3, 20))[0] for forest in forests]
    torch.testing.assert_close(*losses)
    for index in range(3):
        tree = copy.deepcopy(forests[0].estimators_.member(index)).train()
        tree(x)
        assert balance_penalty(tree.gates.unsqueeze(0), 1.0) > 0


class _Images(Dataset):
    classes = tuple("0123456789ab")

    def __len__(self):
        return 64

    def __getitem__(self, index):
        x, y = digits()[0].tensors
        return x[index].view(1, 8, 8) + 0 * torch.rand(()), y[index]


def test_sizes_follow_from_the_data():
    torch.manual_seed(0)
    forest = NeuralForestClassifier(2, 3, seed=0)
    with pytest.raises(ValueError, match="does not know n_inputs and n_outputs before a fit: give both"):
        forest.predict(torch.rand(2, 64))
    assert "estimators_.0.leaf_nodes.weight" in forest.state_dict()

    class Data(LightningDataModule):
        def train_dataloader(self):
            return DataLoader(_Images(), 16, shuffle=True)

    Trainer(**QUIET, max_epochs=1).fit(forest, Data())
    assert (forest.n_inputs, forest.n_outputs) == (64, 12)
    assert forest.predict(torch.rand(2, 1, 8, 8)).shape == (2, 12)
    assert forest.estimators_.member(1).inner_nodes[0].weight.shape == (7, 65)
    other = NeuralForestClassifier(2, 3, seed=1)
    other.load_state_dict(forest.state_dict())
    x = torch.rand(2, 64)
    assert torch.equal(other.predict(x), forest.predict(x))
    assert torch.equal(pickle.loads(pickle.dumps(forest.train())).predict(x), forest.predict(x))


class _Stream(IterableDataset):
    def __iter__(self):
        raise AssertionError("it is read for its size")


@cases(
    "data, words",
    (lambda: some(), "needs n_outputs, the number of classes: TensorDataset has no attribute classes"),
    (lambda: DataLoader(_Stream(), 16), "cannot see the size of a sample without reading the data: give n_inputs"),
)
def test_sizes_that_the_data_does_not_tell(data, words):
    with pytest.raises(Exception, match=words):
        fit(NeuralForestClassifier(2, 3), data())
    stream = DataLoader(TensorDataset(*some().dataset.tensors), 16)
    fit(NeuralForestClassifier(2, 3, n_outputs=10, n_inputs=64), stream)


def test_seeing_the_first_sample_draws_no_random_numbers():
    class Noisy(_Images):
        def __getitem__(self, index):
            x, y = super().__getitem__(index)
            return x + torch.rand(x.shape), y

    def trained(**sizes):
        torch.manual_seed(3)
        forest = NeuralForestClassifier(2, 3, seed=0, **sizes)
        fit(forest, DataLoader(Noisy(), 16, shuffle=True))
        return values(forest)

    one, other = trained(), trained(n_inputs=64, n_outputs=12)
    assert all(torch.equal(one[name], other[name]) for name in one)


@cases(
    "arguments, error, words",
    ({"depth": 0}, ValueError, "depth must be a whole number >= 1, got 0"),
    ({"lamda": -1}, ValueError, "lamda must be .*>= 0.*got -1"),
    ({"n_inputs": 0}, ValueError, "n_inputs must be a whole number >= 1, got 0"),
    ({"n_outputs": 2.0}, TypeError, "n_outputs must be a whole number >= 1, got 2.0"),
)
def test_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        NeuralForestClassifier(2, **arguments)
