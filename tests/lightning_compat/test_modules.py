"""Lightning's private symbols of modules are where the package expects them."""

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.compile import from_compiled

from lightning_tricks._lightning_compat.trainer import is_compiled_by_lightning


def test_a_compiled_module_is_known():
    plain = LightningModule()
    assert not is_compiled_by_lightning(plain)
    assert is_compiled_by_lightning(from_compiled(torch.compile(plain, backend="eager")))
