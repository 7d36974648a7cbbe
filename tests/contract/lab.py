"""The contract's laboratory: a small net on real digits, the settings people train in, and a fit that records facts."""

from __future__ import annotations

import gc
import random
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from packaging.version import Version
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState

from lightning_tricks.seeding import isolated_rng
from tests.small import QUIET, EvaluatedNet, Net, fork, loader, real_fp16, unseen


@dataclass(frozen=True)
class Setting:
    """One way in which people train: a row of the support table."""

    name: str
    meaning: str
    net: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    fp16: bool = False
    ranks: int = 1
    sharded: bool = False
    accelerator: str = ""
    closures_vary: bool = False
    tolerance: float = 1e-4


_SGD, _FUSED = {"optimization": "sgd"}, {"optimization": "fused"}
_BF16 = {"precision": "bf16-mixed"}
SETTINGS = {
    setting.name: setting
    for setting in (
        Setting("fp32", "`precision='32-true'`"),
        Setting("bf16", "`precision='bf16-mixed'`", trainer=_BF16),
        Setting("fp16", "fp16 with a GradScaler", fp16=True),
        Setting("64-true", "`precision='64-true'`", trainer={"precision": "64-true"}),
        Setting("bf16-true", "`precision='bf16-true'`", trainer={"precision": "bf16-true"}, tolerance=1e-2),
        Setting("16-true", "`precision='16-true'` (with SGD)", _SGD, {"precision": "16-true"}, tolerance=1e-2),
        Setting("fp16 fused", "fp16 with a GradScaler and a fused optimizer", _FUSED, fp16=True),
        Setting("bf16 fused", "`bf16-mixed` and a fused optimizer", _FUSED, _BF16),
        Setting(
            "combined",
            "fp16 with a GradScaler and a `CombinedOptimizer`, of which one is fused",
            net={"optimization": "combined"},
            fp16=True,
        ),
        Setting(
            "accumulation",
            "`accumulate_grad_batches=4` over 10 batches (a partial tail)",
            trainer={"accumulate_grad_batches": 4},
        ),
        Setting("manual", "manual optimization with two optimizers", net={"optimization": "manual"}),
        Setting(
            "LBFGS",
            "an optimizer that calls its closure several times",
            net={"optimization": "lbfgs"},
            closures_vary=True,
        ),
        Setting("compile", "`torch.compile`d net", net={"compiled": True}),
        Setting("DDP", "two ranks on the CPU (gloo)", trainer={"strategy": "ddp_fork", "devices": 2}, ranks=2),
        Setting(
            "FSDP2",
            "`ModelParallelStrategy`, two ranks on the CPU (gloo)",
            net={"built_late": True},
            trainer={"devices": 2},
            ranks=2,
            sharded=True,
        ),
        Setting(
            "emulated",
            "fp16 on an emulated CUDA device: finds wrong devices and host reads, and is no evidence of CUDA",
            fp16=True,
            accelerator="emulated",
        ),
        Setting("CUDA", "fp16 on a GPU", fp16=True, accelerator="cuda"),
    )
}
FP32 = SETTINGS["fp32"]
_BARE_FITS: dict[tuple[Any, ...], list[Facts]] = {}


@dataclass
class Step:
    """What one call of `on_before_optimizer_step` saw."""

    optimizer: int
    before: float
    after: float = float("nan")


@dataclass
class Facts:
    """What one rank knows at the end of training."""

    steps: list[Step]
    weights: dict[str, Tensor]
    optimizers: list[Any]
    metrics: dict[str, float]
    rng: tuple[Any, ...] = ()
    traces: dict[str, Any] = field(default_factory=dict)


class _Before(Callback):
    """First in the list: sees the gradients before the callback under test."""

    def __init__(self) -> None:
        steps: list[Step] = []
        self.steps = unseen(steps)  # which AutoResume does not see

    def on_train_start(self, trainer, pl_module):
        if trainer.world_size > 1:
            random.seed(0)  # Lightning's fork launcher draws from it, now more, now less

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.steps().append(Step(trainer.optimizers.index(optimizer), gradient_norm(trainer, optimizer)))


class _After(Callback):
    """Last in the list: sees the gradients after the callback under test, and writes down the facts at the end."""

    def __init__(self, before: _Before, folder: Path) -> None:
        self.before, self.folder = before, folder

    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        self.before.steps()[-1].after = gradient_norm(trainer, optimizer)

    def on_train_end(self, trainer, pl_module):
        self.facts = Facts(
            steps=self.before.steps(),
            weights={name: full(value) for name, value in pl_module.state_dict().items()},
            optimizers=[] if trainer.world_size > 1 else [o.state_dict() for o in trainer.optimizers],
            metrics={name: value.item() for name, value in trainer.callback_metrics.items()},
        )

    def on_fit_end(self, trainer, pl_module):
        self.facts.rng = (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state())
        self.facts.traces = traces(pl_module)
        torch.save(self.facts, self.folder / f"rank{trainer.global_rank}.pt")


def gradient_norm(trainer: Trainer, optimizer: torch.optim.Optimizer) -> float:
    """The reference implementation: the gradient's L2 norm in float64, unscaled whoever is to unscale it."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    squares = [full(p.grad).double().square().sum() for p in parameters if p.grad is not None]
    if not squares:
        return 0.0
    return unscaled(torch.stack(squares).sum().sqrt().item(), trainer, optimizer)


def unscaled(norm: float, trainer: Trainer, optimizer: torch.optim.Optimizer) -> float:
    """A norm of gradients, without the factor that a GradScaler has not yet taken out of them."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    still_scaled = scaler is not None and scaler._per_optimizer_states[id(optimizer)]["stage"] is OptState.READY
    return norm / scaler.get_scale() if still_scaled else norm


def identical_copies(net: type[Net], **arguments: Any) -> tuple[Net, Net]:
    nets = []
    for _ in range(2):
        with isolated_rng(seed=0):
            nets.append(net(**arguments))
    return nets[0], nets[1]


def traces(module: nn.Module) -> dict[str, Any]:
    """What a guest could leave behind: modes, attributes, buffers and hooks of each submodule and parameter."""
    found: dict[str, Any] = {}
    for name, part in module.named_modules():
        hooks = {key: len(value) for key, value in vars(part).items() if key.endswith("_hooks")}
        found[name] = (part.training, sorted(vars(part)), sorted(part._buffers), hooks)
    for name, parameter in module.named_parameters():
        hooks = [getattr(parameter, kind, None) for kind in ("_backward_hooks", "_post_accumulate_grad_hooks")]
        found[f"parameter {name}"] = (parameter.requires_grad, [len(hook or ()) for hook in hooks])
    return found


def traces_on_trainer(trainer: Trainer) -> dict[str, Any]:
    """What a guest could leave behind on a Trainer and its parts, and in the process: types, attributes, handlers."""
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        gc.collect()  # a discarded AutoResume in a cycle notes signals as long as it lives
    handlers = [signal.getsignal(number) for number in sorted(signal.valid_signals())]
    found: dict[str, Any] = {"process": [*handlers, sys.excepthook, sys.stdout, sys.stderr]}
    seen: set[int] = set()
    waiting: list[tuple[str, Any]] = [("trainer", trainer)]
    while waiting:
        name, part = waiting.pop()
        ours = type(part).__module__.startswith(("lightning.", "lightning_tricks."))
        if id(part) in seen or not ours or isinstance(part, LightningModule | Callback):
            continue
        seen.add(id(part))
        attributes = dict(vars(part)) if hasattr(part, "__dict__") else {}
        found[name] = (type(part).__qualname__, sorted(attributes))
        waiting += [(f"{name}.{key}", value) for key, value in attributes.items()]
    return found


def full(tensor: Tensor) -> Tensor:
    """A tensor as one rank alone would hold it."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).cpu().clone()


def attributes(callback: Callback) -> dict[str, Any]:
    """A callback's own attributes, without what Lightning binds to it."""
    return {name: value for name, value in vars(callback).items() if name not in ("log", "log_dict")}


@dataclass
class Lab:
    """Fits nets with callbacks in a folder of its own."""

    folder: Path
    net: Mapping[str, Any] = field(default_factory=dict)  # for all nets
    accelerator: str = "cpu"  # in settings that name none
    _fits: int = 0

    @property
    def quiet(self) -> dict[str, Any]:
        return {**QUIET, "accelerator": self.accelerator, "devices": 1}

    def fit(
        self,
        callbacks: Sequence[Callback],
        setting: Setting = FP32,
        *,
        net: Mapping[str, Any] = MappingProxyType({}),
        start: int = 0,
        probe: bool = True,
        ckpt_path: Path | None = None,
        save_to: Path | None = None,
        module: LightningModule | None = None,
        **trainer: Any,
    ) -> list[Facts]:
        """Train two epochs and return the facts of each rank.

        `start` is where the global random state stands when the net is built, `probe=False` leaves out the
        recording (and returns nothing), `save_to` writes a checkpoint at the end.
        """
        if setting.sharded and Version(torch.__version__) < Version("2.7"):
            pytest.skip("FSDP2 of torch 2.6 needs an accelerator: its CPU streams lack `record_event`")
        self._fits += 1
        folder = self.folder / f"fit{self._fits}"
        folder.mkdir(parents=True)

        def run(rank: int = 0) -> None:
            random.seed(start)
            np.random.seed(start)
            torch.manual_seed(start)
            before = _Before()
            probes = [before, _After(before, folder)] if probe else []
            arguments = {"max_epochs": 2, **self.quiet, **setting.trainer, **trainer}
            if setting.accelerator:
                arguments["accelerator"] = setting.accelerator.replace("emulated", "cuda")
            if setting.fp16:
                arguments["plugins"] = [real_fp16("cuda" if arguments["accelerator"] == "cuda" else "cpu")]
            if setting.sharded:
                arguments["strategy"] = ModelParallelStrategy(setting.ranks, tensor_parallel_size=1)
            fitter = Trainer(callbacks=[*probes[:1], *callbacks, *probes[1:]], **arguments)
            target = module or Net(**{**self.net, **setting.net, **net})
            loaders = [loader()] * (1 + hasattr(type(target), "evaluate"))
            fitter.fit(target, *loaders, ckpt_path=ckpt_path)
            if save_to is not None:
                fitter.save_checkpoint(save_to)

        if setting.sharded:
            fork(run, setting.ranks)
        else:
            run()
        files = sorted(folder.glob("rank*.pt"))
        return [torch.load(file, weights_only=False, map_location="cpu") for file in files]

    def fit_bare(self, setting: Setting = FP32, **net: Any) -> list[Facts]:
        """Return the facts of the bare Trainer, which trains once in each setting for all checks."""
        key = (setting.name, self.accelerator, *self.net.items(), *net.items())
        if key not in _BARE_FITS:
            _BARE_FITS[key] = self.fit([], setting, net=net)
        return _BARE_FITS[key]

    def run(self, stage: str, callbacks: Sequence[Callback], **trainer: Any) -> tuple[Any, dict[str, Any]]:
        """Validate, test or predict alone: return what the Trainer returns, and the traces on module and Trainer."""
        with isolated_rng(seed=0):
            module = EvaluatedNet(**self.net)
        runner = Trainer(callbacks=list(callbacks), **{**self.quiet, **trainer})
        result = getattr(runner, stage)(module, loader(), **({} if stage == "predict" else {"verbose": False}))
        return result, {**traces(module), **traces_on_trainer(runner)}
