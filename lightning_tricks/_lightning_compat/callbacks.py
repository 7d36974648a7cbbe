"""Lightning's own callbacks: weight averaging, tickets of ModelPruning, ThroughputMonitor, LightningCLI's config."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_tricks._lightning_compat.flavor import LIGHTNING, import_lightning
from lightning_tricks._lightning_compat.guards import needs_private, set_private
from lightning_tricks._lightning_compat.trainer import callbacks_of

if TYPE_CHECKING:
    from lightning_tricks._lightning_compat.flavor import (
        LightningModule,
        ModelPruning,
        StochasticWeightAveraging,
        ThroughputMonitor,
        Trainer,
    )


def every_n_train_steps(callback: object) -> Any:
    """Return after how many training steps a callback acts each time: None if it keeps no such number."""
    return vars(callback).get("_every_n_train_steps", vars(callback).get("every_n_train_steps"))


@needs_private("AutoResume")
def allow_existing_config(trainer: Trainer) -> None:
    """Let LightningCLI accept a directory that has its config, as if it had saved it there."""
    # Not imported here: whoever runs a LightningCLI has done so, and it loads jsonargparse, which other runs may lack.
    cli = sys.modules.get(f"{LIGHTNING}.cli")
    for callback in callbacks_of(trainer):
        if cli is not None and isinstance(callback, cli.SaveConfigCallback):
            # Else `SaveConfigCallback.setup` (cli.py) raises an error where it finds the config that the first start
            # wrote.
            set_private(callback, already_saved=True)


def restore_swa_scheduler(trainer: Trainer, swa: StochasticWeightAveraging) -> None:
    """Give a fit that had ended the scheduler of weight averaging, which is otherwise created at an epoch's start."""
    from torch.optim.swa_utils import SWALR

    with needs_private("AutoResume"):
        state = swa._scheduler_state
        # Lightning 2.6.6 (stochastic_weight_avg.py, `on_train_epoch_start`) makes it up to `swa_end` only: in the epoch
        # for batch statistics there would be none, and the next save would lose its state.
        if state is None or swa._swa_scheduler is not None:
            return
        optimizer = trainer.optimizers[0]
        before = [{name: value for name, value in one.items() if name != "params"} for one in optimizer.param_groups]
        scheduler = SWALR(optimizer, swa_lr=state["base_lrs"])
        scheduler.load_state_dict(state)
        set_private(swa, _swa_scheduler=scheduler)
        if swa.n_averaged is None:
            swa.n_averaged = torch.tensor(swa._init_n_averaged)
        for group, values in zip(optimizer.param_groups, before, strict=True):
            group.update(values)  # a new scheduler sets the learning rate
        # `on_fit_start` emptied this list, as the state of a SWALR does not fit the user's scheduler (#11665).
        trainer.lr_scheduler_configs.append(import_lightning("pytorch.utilities.types").LRSchedulerConfig(scheduler))


@needs_private("AutoResume")
def averaged_models(trainer: Trainer) -> list[Any]:
    """Return the averaged models that callbacks of the type WeightAveraging hold and save; None before they do."""
    # Since Lightning 2.6.0 (#20545); an empty tuple lets `isinstance` find none in an older one.
    averaging = getattr(import_lightning("pytorch.callbacks"), "WeightAveraging", ())
    callbacks: list[Any] = [callback for callback in callbacks_of(trainer) if isinstance(callback, averaging)]
    return [callback._average_model for callback in callbacks]


@needs_private("AutoResume")
def restore_swa_max_epochs(trainer: Trainer, swa: StochasticWeightAveraging) -> None:
    """Undo the epoch that weight averaging adds for batch statistics, in a fit that had ended and was not trained."""
    # `on_fit_start` adds the epoch each time, `on_train_end` takes it away only behind it; since 2.6.1 (#21396) none is
    # added with `max_epochs=-1`.
    if swa._model_contains_batch_norm and swa._max_epochs != -1:
        trainer.fit_loop.max_epochs = swa._max_epochs


PRUNING_TICKETS = "_original_layers"  # an attribute of ModelPruning


@needs_private("AutoResume")
def capture_lottery_tickets(callback: ModelPruning) -> dict[str, Any]:
    """Return the tickets by the names of their parameters; None for one that shares the memory of its parameter.

    A reset lets the parameter use the memory of its ticket, which from then on is trained as well.
    """
    # `_copy_param` (callbacks/pruning.py) sets `dst.data = src.data.to(device)`, no copy on the same device: saved
    # apart, ticket and parameter would be two tensors after a resume, and the ticket would stand still.
    pairs = _tickets_with_parameters(callback)
    return {name: None if kept.data_ptr() == used.data_ptr() else kept.detach() for name, (kept, used) in pairs}


@needs_private("AutoResume")
def restore_lottery_tickets(callback: ModelPruning, saved: Mapping[str, Any]) -> None:
    """Restore tickets, after the parameters were restored."""
    # `ModelPruning.setup` copies the weights of this start, which in a resumed run are others than those of the first
    # one.
    for name, (ticket, parameter) in _tickets_with_parameters(callback):
        if name not in saved:
            continue
        if saved[name] is None:
            ticket.data = parameter.data
        else:
            with torch.no_grad():
                ticket.copy_(saved[name])


def _tickets_with_parameters(callback: ModelPruning) -> Iterator[tuple[str, tuple[Tensor, Tensor]]]:
    layers: Mapping[int, Any] = getattr(callback, PRUNING_TICKETS) or {}
    for layer in layers.values():
        for number, name in layer["names"]:
            module = callback._parameters_to_prune[number][0]
            # torch.nn.utils.prune renames what it masks to `<name>_orig`, and leaves a product that is no parameter at
            # the name.
            parameter = getattr(module, f"{name}_orig", getattr(module, name))
            ticket = getattr(layer["data"], name)
            if isinstance(parameter, Tensor) and isinstance(ticket, Tensor):
                yield f"{number}.{name}", (ticket, parameter)


def device_peak_flops(trainer: Trainer) -> float | None:
    """Return the peak FLOPs per second of the Trainer's device in its precision; None if Lightning does not know it."""
    from lightning_tricks._lightning_compat.flavor import get_available_flops

    with needs_private("FlopsReport's peak"):
        # Lightning's table has a row for each dtype: with bfloat16, the peak is a multiple of that of float32.
        dtype_of = import_lightning("pytorch.callbacks.throughput_monitor")._plugin_to_compute_dtype
    return get_available_flops(trainer.strategy.root_device, dtype_of(trainer.precision_plugin))


def set_flops_per_batch(module: LightningModule, flops: float | None) -> None:
    """Set the FLOPs that a ThroughputMonitor counts for each batch; None counts none."""
    untyped: Any = module
    untyped.flops_per_batch = flops


@contextmanager
def providing_flops_per_batch(
    module: LightningModule, flops: float, monitors: Iterable[ThroughputMonitor]
) -> Iterator[None]:
    """Give a module `flops_per_batch`, and delete the attribute again on exit.

    Args:
        module: A module without this attribute.
        flops: The FLOPs of one training step.
        monitors: The callbacks that read it; on exit they forget that the module had it.
    """
    # ThroughputMonitor reads it from the module and nowhere else; left there, it would count for the user's next fit
    # too.
    set_flops_per_batch(module, flops)
    try:
        yield
    finally:
        del module.flops_per_batch
        for monitor in monitors:
            reset_module_flops(monitor)


def reset_module_flops(monitor: ThroughputMonitor) -> None:
    """Let a ThroughputMonitor check again whether the module has `flops_per_batch`; before 2.6.1 it always checks."""
    # Since 2.6.1 (#21453) the answer is kept for all modules: another one without the attribute would be an
    # AttributeError.
    if hasattr(monitor, "_module_has_flops"):
        monitor._module_has_flops = None
