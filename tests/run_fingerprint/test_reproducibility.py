"""`assert_reproducible` passes what is seeded, and names what is not."""

import random

import numpy as np
import pytest
import torch
from lightning.pytorch import LightningDataModule, Trainer, seed_everything
from torch.utils.data import DataLoader

from lightning_tricks import RunFingerprint, SeedEverything
from lightning_tricks.run_fingerprint import assert_reproducible
from tests.small import QUIET, Net, digits


def trainer(seed=1, **arguments):
    if seed is not None:
        seed_everything(seed, verbose=False)
    return Trainer(**{"max_epochs": 1, **QUIET, **arguments})


def net():
    return Net(dropout=0.2)


def data():
    return DataLoader(digits(), batch_size=4, shuffle=True)


@pytest.mark.parametrize("detail", ["step", "layer"])
def test_a_seeded_run_is_reproducible(detail):
    comparison = assert_reproducible(trainer, net, data, detail=detail)
    assert (comparison.divergence, comparison.equal_batches) == (None, 10)
    assert str(comparison) == "No difference: 10 batches are equal, bit for bit."


def test_data_may_be_a_datamodule_or_the_modules_own():
    class Data(LightningDataModule):
        train_dataloader = staticmethod(data)

    class WithData(Net):
        def train_dataloader(self):
            return data()

    assert assert_reproducible(trainer, net, Data).equal_batches == 10
    assert assert_reproducible(trainer, WithData).equal_batches == 10


def test_an_unseeded_run_is_named():
    with pytest.raises(AssertionError, match=r"not reproducible. The runs diverge at step 0, .*: start. net.0.weight"):
        assert_reproducible(lambda: trainer(seed=None), net, data)

    def seeded_net():
        torch.manual_seed(1)
        return net()

    def random_order():
        torch.manual_seed(random.getrandbits(30))
        return data()

    with pytest.raises(AssertionError, match=r"step 0, in epoch 0, batch 0: data. Part 0 of the batch differs"):
        assert_reproducible(lambda: trainer(seed=None), seeded_net, random_order)


def test_a_random_number_in_the_step_is_named():
    class Noisy(Net):
        def training_step(self, batch, batch_idx):
            scale = np.random.default_rng().uniform(0.9, 1.1) if batch_idx == 4 else 1.0
            return super().training_step([batch[0] * scale, batch[1]], batch_idx)

    with pytest.raises(AssertionError, match=r"in epoch 0, batch 4: forward. The output of net.0 differs"):
        assert_reproducible(trainer, Noisy, data)


def test_the_random_state_of_the_process_is_unchanged():
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    assert_reproducible(trainer, net, data)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_the_users_own_fingerprint_is_not_written(tmp_path):
    def recorded():
        return trainer(callbacks=[SeedEverything(1, workers=False), RunFingerprint(tmp_path / "own.jsonl")])

    assert assert_reproducible(recorded, net, data).equal_batches == 10
    assert not (tmp_path / "own.jsonl").exists()


def test_two_ranks():
    comparison = assert_reproducible(lambda: trainer(strategy="ddp_fork", devices=2), net, data)
    assert comparison.equal_batches == 10
