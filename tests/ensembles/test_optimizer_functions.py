"""Whatever looks at a member's parameters: members that run at once end as each one that is trained alone."""

import copy
from functools import partial

import pytest
import torch
from lightning.pytorch.callbacks import ModelPruning
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn, optim
from torch.optim import lr_scheduler

from lightning_tricks import GradientClipping, OptimizerSpec
from lightning_tricks.ensembles import FusionClassifier, VotingClassifier
from lightning_tricks.ensembles.core.members import SequentialMembers
from lightning_tricks.gradient_clipping import AGC, ClipValue
from lightning_tricks.lr_schedules import build_optimizer
from tests.ensembles.nets import CNN, MLP, digits, few, fit, trained_alone
from tests.small import cases

pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step`")


class Normed(nn.Module):
    """A net with a norm, of which each parameter has a shape of its own but two."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(64, 12), nn.LayerNorm(12), nn.Linear(12, 10)

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))))


def no_decay_of_vectors(parameters):
    vectors = [p for p in parameters if p.ndim < 2]
    matrices = [p for p in parameters if p.ndim >= 2]
    return optim.AdamW([{"params": vectors, "weight_decay": 0.0}, {"params": matrices, "weight_decay": 3.0}], lr=1e-2)


def by_shape(parameters):
    wide = [p for p in parameters if p.shape[-1] == 64]
    others = [p for p in parameters if p.shape[-1] != 64]
    return optim.SGD([{"params": wide, "lr": 0.3}, {"params": others}], lr=0.01, momentum=0.9)


def by_layer(parameters):
    return optim.Adam([{"params": [p], "lr": 1e-2 * 0.5**place} for place, p in enumerate(reversed(parameters))])


def part_of_them(parameters):
    return optim.Adagrad(parameters[-2:], lr=0.05, initial_accumulator_value=0.1)


def of_values(parameters):
    large = [p for p in parameters if p.abs().mean() > 0.1]
    small = [p for p in parameters if p.abs().mean() <= 0.1]
    return optim.RMSprop([{"params": large, "lr": 1e-3}, {"params": small, "lr": 1e-4}])


def a_tensor_as_rate(parameters):
    return optim.Adam(parameters, lr=torch.tensor(1e-2))


FUNCTIONS = [no_decay_of_vectors, by_shape, by_layer, part_of_them, a_tensor_as_rate]


def alone_by(member, function, schedule=None):
    optimizer = function([p for p in member.parameters() if p.requires_grad])
    return trained_alone(member, optimizer, batches(), 2, schedule=schedule and schedule(optimizer))


same = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-4)
SCHEDULES = {
    "constant": None,
    "by group": lambda made: lr_scheduler.LambdaLR(made, [lambda epoch: 0.5**epoch] * len(made.param_groups)),
}


def batches():
    return few(digits()[0], 96, 32, shuffle=False)


def trained(ensemble, **arguments):
    fit(ensemble, batches(), max_epochs=2, **arguments)
    return [member.state_dict() for member in ensemble.estimators_]


@pytest.mark.parametrize("vectorize", [True, False])
@cases(
    "function, schedule",
    *((one, "constant") for one in FUNCTIONS),
    (by_layer, "by group"),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_function_sees_one_member(function, schedule, vectorize):
    ensemble = VotingClassifier(
        Normed, 3, optimizer=function, lr_scheduler=SCHEDULES[schedule], vectorize=vectorize, seed=0
    )
    assert isinstance(ensemble.estimators_, SequentialMembers) != vectorize
    alone = [copy.deepcopy(member) for member in ensemble.estimators_]
    trainer = fit(ensemble, batches(), max_epochs=2)
    expected = [alone_by(member, function, SCHEDULES[schedule]) for member in alone]
    same([member.state_dict() for member in ensemble.estimators_], expected)
    assert len(trainer.optimizers[0].param_groups) == len(function(list(alone[0].parameters())).param_groups)


def test_the_description_of_an_optimizer_sees_one_member():
    spec = OptimizerSpec("AdamW", lr=1e-2, weight_decay=3.0, layer_decay=0.5, groups={"last.*": {"weight_decay": 1.0}})
    ensemble = VotingClassifier(Normed, 2, optimizer=spec, vectorize=True, seed=0)
    alone = [copy.deepcopy(member) for member in ensemble.estimators_]
    given = trained(ensemble)
    same(given, [alone_by(member, lambda _, member=member: build_optimizer(member, spec)) for member in alone])


def test_a_function_of_values_keeps_the_members_apart(lightning_log):
    ensemble = VotingClassifier(Normed, 3, optimizer=of_values, seed=0)
    with torch.no_grad():
        ensemble.estimators_[1].first.weight.mul_(9)
    ensemble.set_members(copy.deepcopy(list(ensemble.estimators_)))
    assert ensemble.estimators_.reason.startswith("the function optimizer= makes other parameter groups for member 1")
    alone = [copy.deepcopy(member) for member in ensemble.estimators_]
    same(trained(ensemble), [alone_by(member, of_values) for member in alone])


def test_members_that_share_a_part_and_members_that_differ():
    trunk = nn.Linear(64, 8)
    sharing = [nn.Sequential(trunk, nn.Linear(8, 10)) for _ in range(2)]
    trainer = fit(VotingClassifier(sharing, optimizer=no_decay_of_vectors, seed=0), batches())
    groups = [group["params"] for group in trainer.optimizers[0].param_groups]
    assert [len(group) for group in groups] == [3, 3]
    assert trunk.weight in set(groups[1])
    different = [Normed(), MLP(), CNN()]
    ensemble = VotingClassifier(different, optimizer=by_layer, seed=0)
    alone = [copy.deepcopy(member) for member in ensemble.estimators_]
    expected = [alone_by(member.train(), by_layer) for member in alone]
    same(trained(ensemble), expected)


def test_an_optimizer_of_all_members():
    trainer = fit(FusionClassifier(MLP, 2, optimizer=lambda own: optim.LBFGS(own, lr=0.1), seed=0), batches())
    (group,) = trainer.optimizers[0].param_groups
    assert len(group["params"]) == 8


@cases(
    "function, error, words",
    (lambda own: ([optim.SGD(own)], []), TypeError, r"optimizer must be a function that returns a torch.optim"),
    (lambda own: optim.SGD(MLP().parameters()), ValueError, "has 4 parameters besides the 4 of the member. Use"),
    ids=["a tuple", "other parameters"],
)
def test_functions_that_make_something_else(function, error, words):
    with pytest.raises(error, match=words):
        VotingClassifier(MLP, 2, optimizer=function)


class OwnClipping(ClipValue):
    """Might look at whole tensors."""


@pytest.mark.parametrize("how", [AGC(0.01), OwnClipping(0.1)], ids=["AGC", "own"])
def test_clipping_of_a_group_sees_the_layers_of_members(how):
    one_by_one, at_once = (VotingClassifier(MLP, 2, vectorize=vectorize, seed=0) for vectorize in (False, True))
    for ensemble in (one_by_one, at_once):
        fit(ensemble, batches(), callbacks=[GradientClipping(groups={"*weight": how})])
    assert "clips the units of each layer by itself" in at_once.estimators_.reason
    same([m.state_dict() for m in at_once.estimators_], [m.state_dict() for m in one_by_one.estimators_])
    numbers = VotingClassifier(MLP, 2, vectorize=True, seed=0)
    fit(numbers, batches(), callbacks=[GradientClipping(groups={"*weight": 0.1})])
    assert not isinstance(numbers.estimators_, SequentialMembers)


def test_pruning_of_whole_tensors_is_refused():
    with pytest.raises(MisconfigurationException, match=r"ModelPruning prunes whole tensors.*vectorize=False"):
        fit(
            VotingClassifier(MLP, 2, vectorize=True), batches(), callbacks=[ModelPruning("l1_unstructured", amount=0.5)]
        )


@pytest.mark.parametrize("vectorize", [True, False])
def test_a_member_that_is_changed_is_the_ensembles(vectorize):
    ensemble, x = VotingClassifier(MLP, 3, vectorize=vectorize, seed=0), torch.rand(5, 64)
    for member in ensemble.estimators_:
        nn.init.constant_(member.last.bias, 2.0)
    other = MLP()
    ensemble.estimators_[1].load_state_dict(other.state_dict())
    torch.testing.assert_close(ensemble.member_outputs(x)[1], other(x))
    assert (ensemble.state_dict()["estimators_.2.last.bias"] == 2.0).all()


class Words(nn.Module):
    """A member whose embeddings have sparse gradients."""

    def __init__(self):
        super().__init__()
        self.words, self.last = nn.EmbeddingBag(17, 8, sparse=True), nn.Linear(8, 10)

    def forward(self, x):
        return self.last(self.words((16 * x).long()))


def test_sparse_gradients_are_stepped_by_no_fused_kernel():
    ensemble = VotingClassifier(Words, 2, optimizer=("SGD", {"lr": 0.1}), seed=0)
    before = ensemble.estimators_[0].words.weight.clone()
    fit(ensemble, few(digits()[0], 64))
    assert not torch.equal(ensemble.estimators_[0].words.weight, before)
