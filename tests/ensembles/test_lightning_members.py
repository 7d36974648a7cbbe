"""LightningModules as members: their steps, their batches and their optimizers."""

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch.utils.data import DataLoader

from lightning_tricks.ensembles import VotingClassifier
from tests.ensembles.nets import MLP, LitMLP, digits, few, fit, trained_alone, values

pytestmark = [
    pytest.mark.oldest,
    pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`"),
]


class Steps(LitMLP):
    """Trains with any optimizer of torch's."""

    def __init__(self, kind="AdamW", **options):
        super().__init__()
        self.kind, self.options = kind, options

    def configure_optimizers(self):
        return getattr(torch.optim, self.kind)(self.net.parameters(), **{"lr": 1e-2, **self.options})


@pytest.mark.parametrize("kind", ["AdamW", "Adam", "SGD", "RMSprop", "Adagrad", "NAdam", "Adafactor"])
def test_each_member_trains_by_its_own_optimizer(kind):
    train = few(digits()[0], 64, shuffle=False)
    members = [Steps(kind), Steps(kind, lr=3e-2, weight_decay=0.1)]
    alone = [Steps(kind), Steps(kind, lr=3e-2, weight_decay=0.1)]
    for member, one in zip(members, alone, strict=True):
        one.load_state_dict(member.state_dict())
        trained_alone(one, one.configure_optimizers(), train, label_smoothing=0.1)
    fit(VotingClassifier(members), train)
    for member, one in zip(members, alone, strict=True):
        torch.testing.assert_close(values(member), values(one))


def test_an_optimizer_that_steps_all_parameters_as_one_is_refused():
    with pytest.raises(MisconfigurationException, match=r"Steps\.configure_optimizers returns LBFGS, which cannot"):
        fit(VotingClassifier(Steps, 2, {"kind": "LBFGS"}), few(digits()[0], 32))


def test_members_that_step_their_optimizers_themselves_are_refused():
    class Manual(LitMLP):
        automatic_optimization = False

        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)["loss"]
            self.manual_backward(loss)
            self.optimizers().step()
            return loss

    ensemble = VotingClassifier([Manual(), Manual()])
    assert ensemble.predict(torch.rand(2, 64)).shape == (2, 10)
    with pytest.raises(MisconfigurationException, match=r"Manual has automatic_optimization=False: train the models"):
        fit(ensemble, few(digits()[0], 32))


def test_batches_of_any_form_reach_each_member_in_the_form_that_the_loader_gives():
    sizes = []

    class OfSamples(LitMLP):
        def training_step(self, batch, batch_idx):
            images, targets = batch
            sizes.append((len(images), len(targets)))
            labels = torch.stack([target["label"] for target in targets])
            return super().training_step((torch.stack([image.flatten() for image in images]), labels), batch_idx)

    data = [(x.view(1, 8, 8).expand(3, 8, 8)[:1], {"label": y}) for x, y in few(digits()[0], 40).dataset]
    loader = DataLoader(data, 16, shuffle=True, collate_fn=lambda samples: tuple(zip(*samples, strict=True)))
    fit(VotingClassifier(OfSamples, 3), loader)
    assert sizes == [(16, 16)] * 6 + [(8, 8)] * 3


def test_members_of_two_kinds_train_by_the_criterion_and_that_is_logged(lightning_log):
    fit(VotingClassifier([LitMLP(), MLP()]), few(digits()[0], 32))
    assert any("not all members have a training_step, so that criterion= is" in words for _, words in lightning_log)


def test_a_lightning_module_that_leaves_out_a_step():
    class Leaves(LitMLP):
        def training_step(self, batch, batch_idx):
            return None

    with pytest.raises(ValueError, match="training_step of a member returned None"):
        fit(VotingClassifier(Leaves, 2), few(digits()[0], 32))


def test_the_steps_of_lightning_modules_take_what_lightning_gives_them():
    class OfBatch(LitMLP):
        def training_step(self, batch):
            return super().training_step(batch, None)

    class Numbered(LitMLP):
        def training_step(self, batch, number):
            assert isinstance(number, int)
            return super().training_step(batch, number)

    fit(VotingClassifier([OfBatch(), Numbered()]), few(digits()[0], 32))
