"""Every use of a private Lightning symbol and of a Lightning version, one guarded function each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from packaging.version import Version

from lightning_tricks._lightning_compat._unknown import unknown_lightning

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ThroughputMonitor
    from torch import Tensor


def logs_at_this_step(trainer: Trainer) -> bool:
    """Whether the Trainer sends this step's values to its loggers (`log_every_n_steps`)."""
    try:
        return bool(trainer._logger_connector.should_update_logs or trainer.fast_dev_run)  # type: ignore[attr-defined]
    except AttributeError as error:
        raise unknown_lightning("logging at the logger's interval", error) from error


def hyperparameters_for_loggers(trainer: Trainer) -> dict[str, Any]:
    """Return what the Trainer is about to send to its loggers as the hyper-parameters of module and datamodule."""
    try:
        owners = [trainer.lightning_module, trainer.datamodule]  # type: ignore[attr-defined]
        logged = [owner.hparams_initial for owner in owners if owner is not None and owner._log_hyperparams]
    except AttributeError as error:
        raise unknown_lightning("SeedEverything's record in the loggers", error) from error
    return {name: value for hparams in logged for name, value in hparams.items() if name != "_class_path"}


def replace_hyperparameter(module: LightningModule, name: str, value: Any) -> None:
    """Replace a saved hyper-parameter, both in `hparams` and in the frozen copy that the loggers get."""
    try:
        module._hparams[name] = value
        module._hparams_initial[name] = value  # type: ignore[operator, index]
    except AttributeError as error:
        raise unknown_lightning("TricksMixin.save_hyperparameters", error) from error


def restricted_classmethod(method: Any) -> Any:
    """Make a classmethod that Lightning's own guard keeps from being called on an instance."""
    try:
        from lightning.pytorch.utilities.model_helpers import _restricted_classmethod
    except ImportError:  # the guard is a courtesy
        return classmethod(method)
    return _restricted_classmethod(method)


def repeats_worker_streams() -> bool:
    """Whether Lightning's worker seeding gives torch the same numbers in every epoch, whatever the seed (#20412)."""
    import lightning

    return Version(lightning.__version__) < Version("2.6.1")


def peak_flops_of(trainer: Trainer) -> float | None:
    """Return the peak FLOPs per second of the Trainer's device in its precision, or None for an unknown one."""
    from lightning.fabric.utilities.throughput import get_available_flops

    try:
        from lightning.pytorch.callbacks.throughput_monitor import _plugin_to_compute_dtype
    except ImportError as error:
        raise unknown_lightning("FlopsReport's peak", error) from error
    return get_available_flops(trainer.strategy.root_device, _plugin_to_compute_dtype(trainer.precision_plugin))


def forget_module_flops(monitor: ThroughputMonitor) -> None:
    """Make a ThroughputMonitor look again whether the module has `flops_per_batch`; before 2.6 it always looks."""
    if hasattr(monitor, "_module_has_flops"):
        monitor._module_has_flops = None


def log_epoch_value(trainer: Trainer, source: str, name: str, value: Tensor) -> None:
    """Log a value of an epoch that is the same on all ranks, from a callback's hook at the epoch's end.

    `LightningModule.log` would take it for another part of what the module logs under this name in the same hook, and
    would warn that it is not synchronised, or synchronise it, with a rounding error.
    """
    try:
        results: Any = trainer._results
        known = results.get(f"{source}.{name}")
        if known is not None and known.value.device == value.device:
            results.update_metrics(f"{source}.{name}", value, 1)  # a tenth of the time
        else:
            results.log(
                source, name, value, on_step=False, on_epoch=True, batch_size=1, sync_dist=True, rank_zero_only=True
            )
    except (AttributeError, TypeError) as error:
        raise unknown_lightning(f"logging by {source}", error) from error


def keys_logged_by_others(trainer: Trainer, source: str, *, reset_ones: bool = False) -> dict[str, str]:
    """Return what is logged in this stage, but not by `log_epoch_value` of `source`: key -> hook, or source.

    Keys are those that loggers or callbacks see: also with `_step`, `_epoch` and `/dataloader_idx_<n>` behind.

    Args:
        trainer: That runs the stage.
        source: Of `log_epoch_value`.
        reset_ones: Whether to include what was logged in an epoch that is over, at any time since it was first logged.
    """
    try:
        keys: dict[str, str] = {}
        for item in trainer._results.values():  # type: ignore[union-attr]
            meta = item.meta
            if meta.fx == source or (item.has_reset and not reset_ones):
                continue
            index = meta.dataloader_idx if meta.add_dataloader_idx else None
            suffix = "" if index is None else f"/dataloader_idx_{index}"
            hook = meta.fx.removesuffix(f".{index}")
            for name in (meta.name, meta.forked_name(on_step=True), meta.forked_name(on_step=False)):
                keys[name + suffix] = hook
        return keys
    except AttributeError as error:
        raise unknown_lightning(f"logging by {source}", error) from error


def forget_logged_before(trainer: Trainer, source: str, keys: Collection[str]) -> None:
    """Drop the memory of others' values that were logged under some keys in epochs that are over."""
    try:
        results: Any = trainer._results
        over = [
            key for key, item in results.items() if item.has_reset and item.meta.name in keys and item.meta.fx != source
        ]
        for key in over:
            del results[key]
    except AttributeError as error:
        raise unknown_lightning(f"logging by {source}", error) from error


def evaluation_loaders(trainer: Trainer) -> list[Any]:
    """Return the loaders of the validation or test that runs; in `validate`, `val_dataloaders` are the last fit's."""
    try:
        return list(trainer._evaluation_loop._combined_loader.flattened)  # type: ignore[union-attr]
    except AttributeError as error:
        raise unknown_lightning("MetricsMonitor on several ranks", error) from error


def replace_train_loaders(trainer: Trainer, module: LightningModule, replace: Callable[[Any], Any]) -> None:
    """Let what the user gave as training data pass through a function whenever the Trainer asks for it.

    Called in `setup`, before it does so; holds for fits of this module.
    """
    try:
        source: Any = trainer.fit_loop._data_source
        ask = type(source).dataloader  # a Trainer keeps its source from fit to fit
    except AttributeError as error:
        raise unknown_lightning("an ensemble whose members see the samples in their own orders", error) from error

    def dataloader() -> Any:
        loaders = ask(source)
        return replace(loaders) if trainer.lightning_module is module else loaders

    source.dataloader = dataloader


def shares_out_samples(trainer: Trainer) -> bool:
    """Whether the Trainer gives each rank its share of the samples (`use_distributed_sampler`)."""
    try:
        return bool(trainer._accelerator_connector.use_distributed_sampler)
    except AttributeError as error:
        raise unknown_lightning("an ensemble on several ranks", error) from error


def module_from_checkpoint(
    module: type[LightningModule], checkpoint: dict[str, Any], strict: bool | None, arguments: dict[str, Any]
) -> LightningModule:
    """Make a module of a checkpoint in memory, as `load_from_checkpoint` does of a file."""
    try:
        from lightning.pytorch.core.saving import _load_state
        from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint
    except ImportError as error:
        raise unknown_lightning("TricksMixin.load_from_checkpoint", error) from error
    checkpoint = _pl_migrate_checkpoint(checkpoint)
    made: Any = _load_state(module, checkpoint, strict=strict, **arguments)
    return made  # type: ignore[no-any-return]
