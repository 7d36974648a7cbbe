"""Functions of the collection where tensors are made on the GPU by default, as in `configure_model`."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from lightning_tricks import (
    count_flops,
    ensembles,
    load_weights,
    read_checkpoint,
    replace_head,
    save_weights,
    seed_everything,
)
from lightning_tricks.checkpoint_remapping import align
from lightning_tricks.devices import memory_report
from lightning_tricks.gradient_clipping import adaptive_clip_grad_, clip_grad_norm_
from lightning_tricks.images import to_pil, to_tensor
from lightning_tricks.model_report import summarize_model
from lightning_tricks.seeding import capture_rng_state, isolated_rng, restore_rng_state
from tests.emulated_cuda.device import EmulatedCuda
from tests.ensembles.nets import MLP
from tests.ensembles.test_families import ADAM, FAMILIES, made
from tests.small import cases


def small():
    return nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))


@pytest.fixture
def weights(tmp_path):
    """Files of weights that were written on a CPU."""
    weights = small().state_dict()
    torch.save({f"module.{name}": value for name, value in weights.items()}, tmp_path / "a.pt")
    save_file(weights, tmp_path / "a.safetensors")
    return tmp_path


@pytest.fixture(autouse=True)
def device(weights):
    with EmulatedCuda():
        torch.set_default_device("cuda")
        try:
            yield
        finally:
            torch.set_default_device(None)


def _clip(function, *arguments):
    parameter = nn.Parameter(torch.ones(3, 4))
    parameter.sum().backward()
    function([parameter], *arguments)
    assert parameter.grad.is_cuda


@pytest.mark.parametrize("name", ["a.pt", "a.safetensors"])
@pytest.mark.parametrize("assign", [False, True])
def test_weights_come_to_the_model(weights, name, assign):
    model = small()
    load_weights(model, weights / name, assign=assign)
    assert {str(value.device) for value in model.state_dict().values()} == {"cuda:0"}
    read = read_checkpoint(weights / name)
    expected = {key.removeprefix("module."): value for key, value in read.state_dict.items()}
    assert all(torch.equal(value.cpu(), expected[key]) for key, value in model.state_dict().items())
    align(model, read)


@cases(
    "use",
    lambda: save_weights(small(), "b.pt"),
    lambda: seed_everything(3, verbose=False),
    lambda: restore_rng_state(capture_rng_state()),
    lambda: isolated_rng(seed=1)(small)(),
    lambda: replace_head(small(), 5),
    lambda: summarize_model(small()),
    lambda: count_flops(small(), torch.zeros(1, 8)),
    lambda: memory_report(model=small()),
    lambda: to_tensor(np.zeros((4, 4, 3), np.uint8)),
    lambda: to_pil(torch.zeros(3, 4, 4)),
    lambda: _clip(clip_grad_norm_, 1.0),
    lambda: _clip(adaptive_clip_grad_, 0.1),
)
def test_functions_work(use):
    use()


@pytest.mark.parametrize("name", [*FAMILIES, "Voting", "Bagging", "Fusion", "SnapshotEnsemble"])
def test_ensembles_are_made_on_the_device(name):
    if name in FAMILIES:
        ensemble = made(name, **({"n_inputs": 64} if name == "NeuralForest" else {}))
    else:
        ensemble = getattr(ensembles, f"{name}Classifier")(MLP, n_estimators=2, n_outputs=10, optimizer=ADAM, seed=0)
    assert {str(value.device) for value in ensemble.parameters()} == {"cuda:0"}
    assert ensemble.predict(torch.zeros(2, 64)).shape == (2, 10)


def test_random_states_stay_on_the_cpu():
    state = capture_rng_state()
    assert not state["python"][1].is_cuda
