"""What a test needs that wants any module that trains: a small net on real digits, a quiet fit, ranks, host reads."""

from __future__ import annotations

import os
import time
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import cache
from importlib import import_module
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.model_helpers import is_overridden
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.multiprocessing import ProcessExitedException
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, TensorDataset

from lightning_tricks._lazy import public_packages
from lightning_tricks.lr_schedules import CombinedOptimizer
from tests.contract.processes import free_port

BATCHES = 10
PUBLIC = {name: getattr(home, name) for home in map(import_module, public_packages()) for name in dir(home)}
QUIET = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


def unseen(value: Any) -> Callable[[], Any]:
    """Return a function that returns a value which AutoResume neither saves nor compares: it lies in a module."""
    place: Any = types.ModuleType("unseen")
    place.value = value
    return lambda: place.value


def cases(names: str, *rows: Any, ids: Any = None) -> pytest.MarkDecorator:
    """Run a test with each row of a table: `@cases("size, fits", (1, True), (2, False))`."""
    return pytest.mark.parametrize(names, rows, ids=ids)


@contextmanager
def without_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def recorded_warnings() -> Iterator[list[warnings.WarningMessage]]:
    """Collect all warnings, repeated ones too."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield caught


@cache
def digits(count: int = 4 * BATCHES) -> TensorDataset:
    """The first digits of scikit-learn: rows of 64 pixels in [0, 1], with labels."""
    data = load_digits()
    return TensorDataset(torch.tensor(data.data[:count], dtype=torch.float32) / 16, torch.tensor(data.target[:count]))


def loader(shuffle: bool = False) -> DataLoader:
    """Ten batches of four digits."""
    return DataLoader(digits(), batch_size=4, shuffle=shuffle)


class Attending(nn.Module):
    """An attention of the rows to each other, beside them."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(10, 2)

    def forward(self, x):
        return x + self.attention(x[None], x[None], x[None], need_weights=False)[0][0]


class Net(LightningModule):
    """Two layers on 64 pixels, optimized in any of the ways that Lightning knows."""

    def __init__(
        self,
        optimization: str = "adamw",
        dropout: float = 0.0,
        hidden: int = 16,
        built_late: bool = False,
        compiled: bool = False,
        attention: bool = False,
    ):
        super().__init__()
        self.optimization = optimization
        self.automatic_optimization = optimization != "manual"
        self.shape = hidden, dropout
        self.compiled = compiled
        self.attention = attention
        self.net = None
        if not built_late:
            self.build()

    def build(self):
        hidden, dropout = self.shape
        self.net = nn.Sequential(
            nn.Linear(64, hidden), nn.LayerNorm(hidden), nn.ReLU(), nn.Dropout(dropout), nn.Linear(hidden, 10)
        )
        if self.attention:
            self.net.append(Attending())
        if self.compiled:
            self.net = torch.compile(self.net, backend="aot_eager")

    def configure_model(self):
        if self.net is None:
            self.build()
        if self.device_mesh is not None:
            from torch.distributed.fsdp import fully_shard

            fully_shard(self.net[0], mesh=self.device_mesh["data_parallel"])
            fully_shard(self.net, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        scores = self.net(batch[0])
        loss = nn.functional.cross_entropy(scores, batch[1])
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()
        return {"loss": loss, "preds": scores, "target": batch[1]}

    def configure_optimizers(self):
        parameters = list(self.parameters())
        if self.optimization == "manual":
            return torch.optim.SGD(parameters[:2], lr=0.1), torch.optim.AdamW(parameters[2:], lr=0.01)
        if self.optimization == "sgd":
            return torch.optim.SGD(parameters, lr=0.01)
        if self.optimization == "combined":
            fused = torch.optim.AdamW(parameters[2:], lr=0.01, fused=True)
            return CombinedOptimizer([torch.optim.SGD(parameters[:2], lr=0.01, momentum=0.9), fused])
        if self.optimization == "lbfgs":
            return torch.optim.LBFGS(parameters, lr=0.1, max_iter=3)
        return torch.optim.AdamW(parameters, lr=0.01, fused=self.optimization == "fused")


class EvaluatedNet(Net):
    """A net that is validated and tested as well."""

    def evaluate(self, batch, batch_idx):
        scores = self.net(batch[0])
        self.log("loss", nn.functional.cross_entropy(scores, batch[1]))
        return {"preds": scores, "target": batch[1]}

    validation_step = test_step = evaluate

    def predict_step(self, batch, batch_idx):
        return self.net(batch[0])


def fit(
    module: LightningModule | None = None, *callbacks: Callback, data: Iterable[Any] | None = None, **trainer: Any
) -> Trainer:
    """Train an epoch of `data`, or of ten batches, validate with them where the module does, and return the Trainer."""
    fitter = Trainer(**{**QUIET, "max_epochs": 1, "callbacks": list(callbacks), **trainer})
    module = Net() if module is None else module
    loaders = [loader() if data is None else data] * (1 + is_overridden("validation_step", module))
    fitter.fit(module, *loaders)
    return fitter


class Hooks(Callback):
    """Calls functions in its hooks: `Hooks(on_train_start=lambda trainer, module: ...)`."""

    training_arguments = ()  # for AutoResume it changes nothing

    def __init__(self, **hooks: Callable[..., Any]) -> None:
        vars(self).update(hooks)


def real_fp16(device: str = "cpu") -> MixedPrecision:
    """Real fp16 with a GradScaler, whose first steps do not overflow.

    On the CPU `precision="16-mixed"` would silently become bf16.
    """
    return MixedPrecision("16-mixed", device, torch.amp.GradScaler(device, init_scale=1024.0))


def fork(function: Callable[[int], None], ranks: int) -> None:
    """Run `function(rank)` in forked processes that Lightning takes for externally launched ranks.

    Raises:
        SystemExit: If a rank exits, or is killed.
    """
    try:
        torch.multiprocessing.start_processes(_rank, args=(function, free_port()), nprocs=ranks, start_method="fork")
    except ProcessExitedException as error:
        raise SystemExit(error.exit_code) from error


def _rank(rank: int, function: Callable[[int], None], port: int) -> None:
    os.environ.update(LOCAL_RANK=str(rank), NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    function(rank)
    if torch.distributed.is_initialized():
        # In torch 2.6 a thread of the group may wait for the interpreter's lock, to free a tensor that was sent, and
        # the end of the group for this thread, with that lock
        time.sleep(0.02)
        torch.distributed.destroy_process_group()


def ranks_agree_at_once() -> Any:
    """Let ranks ask each other after each step whether one is to stop; a short run may be over before else."""
    return patch("lightning_tricks.auto_resume.core.signals._SECONDS_BETWEEN_EXCHANGES", 0.0)


def local_sgd() -> DDPStrategy:
    """A strategy for forked ranks that average their weights every other step."""
    state = PostLocalSGDState(process_group=None, subgroup=None, start_localSGD_iter=2)
    return DDPStrategy(
        start_method="fork", ddp_comm_state=state, ddp_comm_hook=post_localSGD_hook, model_averaging_period=2
    )


class HostReads(TorchDispatchMode):
    """Counts the reads of a tensor's values: `.item()`, `bool()`, `torch.equal`, `.tolist()`, `.numpy()`, `.cpu()`."""

    _OPERATORS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default)
    _METHODS = ("tolist", "numpy", "cpu")  # no operator shows these on a CPU

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._patches = ExitStack()

    def __enter__(self):
        for name in self._METHODS:
            self._patches.enter_context(patch.object(Tensor, name, self._counted(getattr(Tensor, name))))
        return super().__enter__()

    def __exit__(self, *exception):
        self._patches.close()
        return super().__exit__(*exception)

    def _counted(self, method):
        def counted(*args, **kwargs):
            self.count += 1
            return method(*args, **kwargs)

        return counted

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in self._OPERATORS
        return func(*args, **(kwargs or {}))


def same(left: Any, right: Any) -> bool:
    """Bit-for-bit equality of nested plain values and tensors."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, Mapping):
        return isinstance(right, Mapping) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    if type(left) is type(right) and type(left).__eq__ is object.__eq__ and hasattr(left, "__dict__"):
        return same(vars(left), vars(right))
    return type(left) is type(right) and bool(left == right)
