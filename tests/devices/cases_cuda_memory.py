"""What CudaMemory promises."""

import pytest
import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from lightning_tricks.devices import CudaMemory
from tests.contract.case import Case
from tests.contract.lab import Lab, Setting
from tests.small import Net


class Exhausted(Net):
    """Asks for more memory than there is, in the backward pass of a later batch, on the last rank."""

    def on_after_backward(self):
        if self.trainer.fit_loop.batch_idx == 3 and self.global_rank == self.trainer.world_size - 1:
            torch.empty(1 << 50, device=self.device)


def verify(lab: Lab, setting: Setting, callback: type = CudaMemory) -> None:
    """Where memory runs out, the rank says in which step, and what its tensors are."""
    folder = lab.folder / f"reports {setting.name}"
    with pytest.raises((RuntimeError, ProcessRaisedException), match=r"can't allocate memory|CUDA out of memory"):
        lab.fit([callback(dirpath=folder)], setting, module=Exhausted(**{**lab.net, **setting.net}))
    (path,) = folder.iterdir()
    assert path.name == f"out_of_memory-rank{setting.ranks - 1}.txt"
    text = path.read_text()
    assert "stage train, epoch 0, batch 3" in text
    assert f"4x64 on {'cuda:0' if setting.accelerator else 'cpu'}" in text
    assert "- parameters: " in text
    assert "- gradients: " in text


CASE = Case(
    callback=CudaMemory,
    arguments={
        "empty_cache_every_n_epochs": 1,
        "snapshot_on_oom": True,
        "record_history": True,
        "limit": 0.5,
        "dirpath": "reports",
    },
    kind="observer",
    neutral={},
    of_one_fit=("report",),
    instances=1,
    verify=verify,
)
