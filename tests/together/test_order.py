"""The order of the callbacks in the list does not matter."""

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_tricks import LoRA, SeedEverything
from tests.contract.cases import CASES
from tests.small import QUIET, Net, loader, same
from tests.together.order import assert_same_left, fit_in_order


@pytest.mark.newest
@pytest.mark.filterwarnings("ignore:The `srun` command", "ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*checkpoint directory.*exists", "ignore:Checkpoint directory")
def test_all_orders_give_the_same_bits_with_a_resume_in_the_middle(tmp_path):
    given = fit_in_order(CASES, None, tmp_path / "given")
    assert given["rows"]
    for seed in (-1, 1):
        assert_same_left(given, fit_in_order(CASES, seed, tmp_path / str(seed)), f"order {seed}")


def test_the_seed_reaches_what_is_added_to_the_model_wherever_it_stands():
    left = []
    for state, callbacks in ((1, [LoRA(2), SeedEverything(7)]), (2, [SeedEverything(7), LoRA(2)])):
        torch.manual_seed(0)
        module = Net()
        torch.manual_seed(state)
        Trainer(callbacks=callbacks, max_epochs=1, limit_train_batches=0, **QUIET).fit(module, loader())
        left.append((dict(module.state_dict()), torch.get_rng_state()))
    assert same(left[0], left[1])
    assert left[0][0]["net.0.lora_weight.A"].abs().sum() > 0
