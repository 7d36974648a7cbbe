"""The limit to a GPU's memory."""

import pytest
import torch

from lightning_tricks.devices import limit_memory
from tests.small import cases


@pytest.fixture
def limits(monkeypatch):
    """Two GPUs, and the limits that torch is told."""
    told = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda *given: told.append(given))
    return told


@cases(
    "device, told",
    (None, None),
    (1, torch.device("cuda:1")),
    ("cuda:1", torch.device("cuda:1")),
    ("cuda", torch.device("cuda")),
    (torch.device("cuda:0"), torch.device("cuda:0")),
)
def test_torch_is_told(limits, device, told):
    limit_memory(0.25, device)
    limit_memory(1, device)
    assert limits == [(0.25, told), (1.0, told)]
    assert all(type(share) is float for share, _ in limits), "torch takes no int"


@pytest.mark.parametrize("fraction", [0, -0.1, 1.5, float("nan"), "0.5", None, True])
def test_another_share_is_named(limits, fraction):
    error = ValueError if isinstance(fraction, int | float) and fraction is not True else TypeError
    with pytest.raises(error, match=r"fraction must be a number > 0 and <= 1 \(the share .*got"):
        limit_memory(fraction)
    assert not limits


@pytest.mark.parametrize(("device", "words"), [("cpu", 'such as "cuda:0", got .cpu'), ("cuda:2", "cuda:0 to cuda:1")])
def test_another_device_is_named(limits, device, words):
    with pytest.raises(ValueError, match=f"device must be .*{words}"):
        limit_memory(0.5, device)
    assert not limits


def test_without_cuda_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match=r"limit_memory needs a CUDA device.*nvidia-smi"):
        limit_memory(0.5)


@pytest.mark.gpu
def test_a_gpu_refuses_what_is_beyond():
    total = torch.cuda.get_device_properties(0).total_memory
    share = (torch.cuda.memory_reserved(0) + 2**30) / total
    try:
        limit_memory(share, 0)
        torch.empty(2**28, dtype=torch.uint8, device="cuda:0")
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2**31, dtype=torch.uint8, device="cuda:0")
    finally:
        limit_memory(1.0, 0)
    torch.empty(2**31, dtype=torch.uint8, device="cuda:0")
