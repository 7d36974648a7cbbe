"""Stubs that let the copy of a LightningModule run `training_step` without any effect on its Trainer."""

from __future__ import annotations

import copy
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lightning_tricks._shared.lightning_name import lightning_name
from lightning_tricks._shared.tensors import tensors_in
from lightning_tricks._torch_compat.tensors import tree_map_only


class NoOp:
    """Accepts every call and every attribute and does nothing; stands for loggers and logging methods."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __setattr__(self, name: str, value: Any) -> None: ...

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return itself, so that the result is a no-op as well."""
        return self

    def __getitem__(self, key: Any) -> Any:
        return self

    def __setitem__(self, key: Any, value: Any) -> None: ...

    def __iter__(self) -> Any:
        return iter(())

    def __len__(self) -> int:
        return 0

    def __bool__(self) -> bool:
        return False

    def __float__(self) -> float:
        return 0.0

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *exception: object) -> None: ...


class NoOpOptimizer(NoOp):
    """An optimizer that changes no weight; `step` still calls its closure.

    To `isinstance`, it is what it stands for, wrapped by Lightning as `LightningModule.optimizers` does it. Its
    `param_groups` are copies without parameters.

    Args:
        original: The optimizer that it stands for, if it is known.
        toggled: The parameters that `toggle_optimizer` leaves trainable.
    """

    def __init__(self, original: Any = None, toggled: Sequence[Tensor] = ()) -> None:
        groups = [{**group, "params": []} for group in getattr(original, "param_groups", ())]
        vars(self).update(_type=_wrapped_type(original), _toggled=toggled, param_groups=copy.deepcopy(groups) or NoOp())

    @property  # type: ignore[misc]  # nothing sets it
    def __class__(self) -> Any:
        return self._type

    def step(self, closure: Callable[[], Any] | None = None, **kwargs: Any) -> Any:
        """Call the closure."""
        return closure() if closure is not None else None


_NO_OPS = """
    logger loggers strategy profiler callbacks checkpoint_callback checkpoint_callbacks early_stopping_callback
    early_stopping_callbacks lr_scheduler_configs save_checkpoint print should_stop
"""


class ReadOnlyTrainer:
    """A view of a Trainer: its attributes can be read, but nothing can be changed, logged or saved."""

    def __init__(self, trainer: Any) -> None:
        vars(self).update(_trainer=trainer, _model_copy=None)

    def __getattr__(self, name: str) -> Any:
        if name in _NO_OPS.split():
            return NoOp()
        if name in ("lightning_module", "model") and self._model_copy is not None:
            return self._model_copy
        value = getattr(self._trainer, name)
        return [NoOpOptimizer(optimizer) for optimizer in value] if name == "optimizers" else value

    def __setattr__(self, name: str, value: Any) -> None: ...


def stub_trainer(model_copy: nn.Module, trainer: Any, copies: Mapping[Tensor, Tensor]) -> None:
    """Replace what a `training_step` calls, so that the copy of a module affects neither Trainer nor original.

    Metrics of torchmetrics compute nothing: they are not part of the model's FLOPs, and they check values that tensors
    without data do not have. A backward pass from what they return reaches what they were given: one may be the loss.

    Args:
        model_copy: The copy of a LightningModule; changed in place.
        trainer: The Trainer of the original, or None.
        copies: Parameter of the original -> parameter of the copy.
    """
    no_op = NoOp()
    if trainer is not None:
        vars(model_copy)["_trainer"] = read_only = ReadOnlyTrainer(trainer)
        vars(read_only)["_model_copy"] = model_copy
    optimizers = [
        NoOpOptimizer(
            found, [copies.get(p, p) for group in getattr(found, "param_groups", ()) for p in group["params"]]
        )
        for found in _find_optimizers(model_copy, trainer)
    ]
    vars(model_copy).update(
        dict.fromkeys(("log", "log_dict", "print", "lr_schedulers", "lr_scheduler_step", "clip_gradients"), no_op),
        optimizers=lambda *_, **__: optimizers if len(optimizers) > 1 else optimizers[0],
        manual_backward=run_backward,
        all_gather=_local_all_gather(getattr(trainer, "world_size", 1)),
        **_toggling(optimizers),
    )
    _stub_metrics(model_copy, no_op)


def _stub_metrics(model_copy: nn.Module, no_op: NoOp) -> None:
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:  # then no submodule can be a metric
        return
    for part in model_copy.modules():
        if isinstance(part, torchmetrics.Metric | torchmetrics.MetricCollection):
            value = _no_metric if isinstance(part, torchmetrics.Metric) else _no_metrics
            vars(part).update(forward=value, compute=value, update=no_op, reset=no_op)


def _no_metric(*args: Any, **kwargs: Any) -> Tensor:
    # one element of each, so that next to nothing is counted
    reached = [0.0 * tensor.flatten()[:1].sum() for tensor in tensors_in((args, kwargs)) if tensor.requires_grad]
    return sum(reached, torch.zeros(()))


def _no_metrics(*args: Any, **kwargs: Any) -> dict[str, Tensor]:
    value = _no_metric(*args, **kwargs)
    return defaultdict(lambda: value, metric=value)


def run_backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
    """Run a backward pass if the loss requires a gradient."""
    if loss.requires_grad:
        loss.backward(*args, **kwargs)


class redirect_backward(TorchFunctionMode):  # noqa: N801  # a context manager
    """Call a function in place of `self.manual_backward(loss)` and `loss.backward()` in a `training_step`.

    Args:
        model_copy: The copy of a LightningModule; changed in place.
        run: The function, called with the arguments of `manual_backward`.
    """

    def __init__(self, model_copy: nn.Module, run: Callable[..., None]) -> None:
        super().__init__()
        vars(model_copy)["manual_backward"] = self._run = run

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace `Tensor.backward`, and call every other function of torch."""
        return (self._run if func is Tensor.backward else func)(*args, **(kwargs or {}))


def _toggling(optimizers: Sequence[NoOpOptimizer]) -> dict[str, Callable[..., Any]]:
    """Return replacements for the methods that freeze the parameters of all optimizers but one."""
    before: dict[Tensor, bool] = {}

    def toggle(optimizer: Any) -> None:
        own = {id(p) for known in optimizers if known is optimizer for p in vars(known)["_toggled"]}
        if own:
            before.update((p, p.requires_grad) for known in optimizers for p in vars(known)["_toggled"])
            for parameter, trains in before.items():
                parameter.requires_grad_(trains and id(parameter) in own)

    def untoggle(optimizer: Any) -> None:
        for parameter, trains in before.items():
            parameter.requires_grad_(trains)
        before.clear()

    @contextmanager
    def toggled(optimizer: Any) -> Iterator[None]:
        toggle(optimizer)
        try:
            yield
        finally:
            untoggle(optimizer)

    return {"toggle_optimizer": toggle, "untoggle_optimizer": untoggle, "toggled_optimizer": toggled}


def _find_optimizers(model_copy: Any, trainer: Any) -> Sequence[Any]:
    """Return the optimizers of a Trainer, or those that a module makes, or [None]."""
    if trainer is not None:
        return trainer.optimizers or [None]
    if getattr(model_copy, "automatic_optimization", True):
        return [None]
    try:
        made = model_copy.configure_optimizers()
    except Exception:  # it needs a Trainer
        return [None]
    if isinstance(made, tuple | list) and len(made) == 2 and isinstance(made[0], list):
        made = made[0]  # the second list holds schedulers
    made = made if isinstance(made, tuple | list) else [made]
    return [entry["optimizer"] if isinstance(entry, dict) else entry for entry in made] or [None]


def _wrapped_type(optimizer: Any) -> type:
    """Return the type that Lightning's wrapper of an optimizer has."""
    own = type(optimizer) if isinstance(optimizer, Optimizer) else Optimizer
    lightning = sys.modules.get(f"{lightning_name()}.core.optimizer")
    return type(f"Lightning{own.__name__}", (lightning.LightningOptimizer, own), {}) if lightning else own


def _local_all_gather(world_size: int) -> Callable[..., Any]:
    """Return a replacement for `LightningModule.all_gather` that repeats the data of this rank."""

    def all_gather(data: Any, group: Any = None, sync_grads: bool = False) -> Any:
        if world_size == 1:
            return data
        return tree_map_only(Tensor, lambda tensor: torch.stack([tensor] * world_size), data)

    return all_gather
