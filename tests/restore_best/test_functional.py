"""The weights and buffers of a module, copied and put back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lightning_tricks.restore_best.functional import put_back_, weights_and_buffers


def net() -> nn.Sequential:
    """Layers with parameters, and with buffers of which one is in no state dict."""
    made = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    made.register_buffer("seen", torch.zeros(2), persistent=False)
    return made


def kept_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in weights_and_buffers(module).items()}


def test_all_that_training_changes_is_put_back():
    module = net()
    kept = kept_of(module)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.add_(1)
    parameters = list(module.parameters())
    assert put_back_(module, kept) == []
    assert set(kept) == {
        "0.weight",
        "0.bias",
        "1.weight",
        "1.bias",
        *(f"1.{name}" for name in module[1]._buffers),
        "seen",
    }
    for name, tensor in weights_and_buffers(module).items():
        assert torch.equal(tensor, kept[name]), name
    assert all(now is before for now, before in zip(module.parameters(), parameters, strict=True))


@pytest.mark.parametrize("change", ["shape", "added", "removed"])
def test_another_module_is_left_as_it_is(change):
    module = net()
    kept = kept_of(module)
    if change == "shape":
        module[0] = nn.Linear(5, 4)
    elif change == "added":
        module.append(nn.Linear(4, 1))
    else:
        del module[1]
    before = kept_of(module)
    assert put_back_(module, kept)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights_and_buffers(module).items())


def test_a_buffer_may_be_expanded_and_a_parameter_not_initialized():
    module = net().append(nn.LazyLinear(2))
    module.register_buffer("places", torch.arange(2)[:, None].expand(2, 3))
    kept = kept_of(module)
    module.places = torch.zeros(1, dtype=torch.int64).expand(2, 3)
    assert put_back_(module, kept) == []
    assert module.places.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert not any(name.startswith("2.") for name in kept)
