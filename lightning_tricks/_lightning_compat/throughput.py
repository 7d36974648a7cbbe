"""The peak FLOPs of devices, and the FLOPs that Lightning's ThroughputMonitor reads from a module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lightning_tricks._lightning_compat.guards import needs_private

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ThroughputMonitor


def device_peak_flops(trainer: Trainer) -> float | None:
    """Return the peak FLOPs per second of the Trainer's device in its precision; None if Lightning does not know it."""
    from lightning.fabric.utilities.throughput import get_available_flops

    with needs_private("FlopsReport's peak"):
        from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
    return get_available_flops(trainer.strategy.root_device, _plugin_to_compute_dtype(trainer.precision_plugin))


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
    set_flops_per_batch(module, flops)
    try:
        yield
    finally:
        del module.flops_per_batch
        for monitor in monitors:
            reset_module_flops(monitor)


def reset_module_flops(monitor: ThroughputMonitor) -> None:
    """Let a ThroughputMonitor check again whether the module has `flops_per_batch`; before 2.6 it always checks."""
    if hasattr(monitor, "_module_has_flops"):
        monitor._module_has_flops = None
