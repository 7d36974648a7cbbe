"""Memory that really runs out: of the process, and of a GPU."""

import gc
import re
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks import Microbatching
from lightning_tricks.devices import limit_memory
from tests.microbatching.models import difference, fit
from tests.small import cases

_MIB = 2**20


class Wide(LightningModule):
    """A net of float32 whose activations take a MiB for each row and layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(8, _MIB // 4), nn.Tanh(), nn.Linear(_MIB // 4, 3))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.01)


@contextmanager
def _limited_process(more: int):
    """Let the process take so many bytes more than it has."""
    taken = int(re.search(r"^VmData:\s*(\d+) kB", Path("/proc/self/status").read_text(), re.MULTILINE)[1]) * 1024
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (taken + more, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


@contextmanager
def _limited_gpu(more: int):
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    limit_memory((torch.cuda.memory_reserved(0) + more) / total, 0)
    try:
        yield
    finally:
        limit_memory(1.0, 0)


@cases(
    "accelerator, limited",
    ("cpu", _limited_process),
    pytest.param("cuda", _limited_gpu, marks=pytest.mark.gpu("only a real allocator runs out of memory")),
)
def test_a_batch_is_cut_until_it_fits(accelerator, limited):
    generator = torch.Generator().manual_seed(1)
    rows = TensorDataset(torch.randn(320, 8, generator=generator), torch.randint(0, 3, (320,), generator=generator))
    given = {"data": DataLoader(rows, 256), "max_epochs": 1, "accelerator": accelerator, "devices": 1}
    whole, cut, microbatching = Wide(), Wide(), Microbatching()
    fit(whole, **given)
    # far from the GiB of a whole batch and from what a process that ran other tests takes without being asked
    with limited(350 * _MIB):
        with pytest.raises(RuntimeError, match="memory"):
            fit(Wide(), **given)
        gc.collect()
        fit(cut, microbatching, **given)
    assert microbatching.current_size < 256
    assert difference(whole, cut) < 1e-5
