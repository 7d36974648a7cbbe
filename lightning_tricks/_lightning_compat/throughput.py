"""Peak FLOPs of devices, and Lightning's ThroughputMonitor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lightning_tricks._lightning_compat.guards import needs_private

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.callbacks import ThroughputMonitor


def device_peak_flops(trainer: Trainer) -> float | None:
    """Return the peak FLOPs per second of the Trainer's device in its precision, or None for an unknown one."""
    from lightning.fabric.utilities.throughput import get_available_flops

    with needs_private("FlopsReport's peak"):
        from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
    return get_available_flops(trainer.strategy.root_device, _plugin_to_compute_dtype(trainer.precision_plugin))


def reset_module_flops(monitor: ThroughputMonitor) -> None:
    """Make a ThroughputMonitor look again whether the module has `flops_per_batch`; before 2.6 it always looks."""
    if hasattr(monitor, "_module_has_flops"):
        monitor._module_has_flops = None
