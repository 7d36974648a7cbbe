"""Every use of a private Lightning symbol and of a Lightning version, one guarded function each."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from packaging.version import Version

if TYPE_CHECKING:
    from collections.abc import Callable

    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ThroughputMonitor
    from torch import Tensor


def logs_at_this_step(trainer: Trainer) -> bool:
    """Whether the Trainer sends this step's values to its loggers (`log_every_n_steps`)."""
    try:
        return bool(trainer._logger_connector.should_update_logs or trainer.fast_dev_run)  # type: ignore[attr-defined]
    except AttributeError as error:
        raise _unknown_lightning("logging at the logger's interval", error) from error


def hyperparameters_for_loggers(trainer: Trainer) -> dict[str, Any]:
    """Return what the Trainer is about to send to its loggers as the hyper-parameters of module and datamodule."""
    try:
        owners = [trainer.lightning_module, trainer.datamodule]  # type: ignore[attr-defined]
        logged = [owner.hparams_initial for owner in owners if owner is not None and owner._log_hyperparams]
    except AttributeError as error:
        raise _unknown_lightning("SeedEverything's record in the loggers", error) from error
    return {name: value for hparams in logged for name, value in hparams.items() if name != "_class_path"}


def replace_hyperparameter(module: LightningModule, name: str, value: Any) -> None:
    """Replace a saved hyper-parameter, both in `hparams` and in the frozen copy that the loggers get."""
    try:
        module._hparams[name] = value
        module._hparams_initial[name] = value  # type: ignore[operator, index]
    except AttributeError as error:
        raise _unknown_lightning("TricksMixin.save_hyperparameters", error) from error


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
        raise _unknown_lightning("FlopsReport's peak", error) from error
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
        raise _unknown_lightning(f"logging by {source}", error) from error


def names_logged_by_module(trainer: Trainer, source: str) -> set[str]:
    """Return what was logged in this stage, but not by `log_epoch_value` of `source`."""
    try:
        logged = [item.meta for item in trainer._results.values() if not item.has_reset]  # type: ignore[union-attr]
        return {meta.name for meta in logged if meta.fx != source}
    except AttributeError as error:
        raise _unknown_lightning(f"logging by {source}", error) from error


def evaluation_loaders(trainer: Trainer) -> list[Any]:
    """Return the loaders of the validation or test that runs; in `validate`, `val_dataloaders` are the last fit's."""
    try:
        return list(trainer._evaluation_loop._combined_loader.flattened)  # type: ignore[union-attr]
    except AttributeError as error:
        raise _unknown_lightning("MetricsMonitor on several ranks", error) from error


def replace_train_loaders(trainer: Trainer, module: LightningModule, replace: Callable[[Any], Any]) -> None:
    """Let what the user gave as training data pass through a function whenever the Trainer asks for it.

    Called in `setup`, before it does so; holds for fits of this module.
    """
    try:
        source: Any = trainer.fit_loop._data_source
        ask = type(source).dataloader  # a Trainer keeps its source from fit to fit
    except AttributeError as error:
        raise _unknown_lightning("an ensemble whose members see the samples in their own orders", error) from error

    def dataloader() -> Any:
        loaders = ask(source)
        return replace(loaders) if trainer.lightning_module is module else loaders

    source.dataloader = dataloader


def shares_out_samples(trainer: Trainer) -> bool:
    """Whether the Trainer gives each rank its share of the samples (`use_distributed_sampler`)."""
    try:
        return bool(trainer._accelerator_connector.use_distributed_sampler)
    except AttributeError as error:
        raise _unknown_lightning("an ensemble on several ranks", error) from error


def choose_what_to_resume(
    trainer: Trainer, choose: Callable[[Any], tuple[Any, dict[str, Any]] | None]
) -> Callable[[], None]:
    """Let a function choose the checkpoint that the next run restores, when the model is there to compare it with.

    It gets the path that was given to the Trainer, or None, and returns another one with what it read from there, or
    None to leave it at that. Returns what ends this before the next run asked.
    """
    try:
        from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint

        connector: Any = trainer._checkpoint_connector
        resume_start = connector.resume_start
    except (AttributeError, ImportError) as error:
        raise _unknown_lightning("AutoResume", error) from error

    def chosen(checkpoint_path: Any = None, *args: Any, **kwargs: Any) -> None:
        undo()
        choice = choose(checkpoint_path)
        if choice is None:
            resume_start(checkpoint_path, *args, **kwargs)
        else:
            connector._ckpt_path = choice[0]
            connector._loaded_checkpoint = _pl_migrate_checkpoint(choice[1], choice[0])

    def undo() -> None:
        vars(connector).pop("resume_start", None)

    connector.resume_start = chosen
    return undo


def checkpoint_of(trainer: Trainer) -> dict[str, Any]:
    """Return what `Trainer.save_checkpoint` would write; every rank has to call it."""
    try:
        checkpoint: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
        return checkpoint
    except AttributeError as error:
        raise _unknown_lightning("AutoResume", error) from error


class FitWatcher:
    """What `watch_fit` calls, in this order; it does nothing by itself."""

    def signals_registered(self) -> None:
        """The Trainer has registered its own signal handlers."""

    def epoch_of_loaders(self, epoch: int) -> int:
        """The epoch whose order the samplers shall give, where the Trainer thinks of `epoch`."""
        return epoch

    def train_loaders_ready(self, loaders: list[Any], all_sized: bool) -> None:
        """The training loaders are there, their iterators not yet."""

    def validation_loaders_ready(self, loaders: list[Any]) -> None:
        """The validation loaders are there, their iterators not yet."""

    def is_resumed(self) -> bool:
        """Whether the epoch that begins goes on where another process was stopped."""
        return False

    def epoch_starts(self) -> None:
        """The iterators of this epoch come next, unless they are there since `train_loaders_ready`."""

    def epoch_started(self, finish_batch: Callable[[], None]) -> None:
        """The first batch comes next; `finish_batch` does what follows a batch, validation included."""

    def batch_done(self) -> None:
        """A batch is done and logged; the validation that may be due is not."""


def watch_fit(trainer: Trainer, watcher: FitWatcher) -> Callable[[], None]:
    """Call a watcher at the moments of a fit that no hook marks; return what ends that."""
    try:
        from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len

        signals, fit, epoch = trainer._signal_connector, trainer.fit_loop, trainer.fit_loop.epoch_loop
        validation = epoch.val_loop
        replaced: dict[tuple[Any, str], Any] = {
            (owner, name): getattr(owner, name)
            for owner, name in (
                (signals, "register_signal_handlers"),
                (fit, "_load_combined_loader_states"),
                (validation, "setup_data"),
                (epoch, "reset"),
                (epoch, "on_run_start"),
                (epoch, "on_advance_end"),
            )
        }
    except (AttributeError, ImportError) as error:
        raise _unknown_lightning("AutoResume", error) from error
    plain = {name: function for (_, name), function in replaced.items()}
    seen: list[Any] = []  # the validation loaders that were followed

    def register_signal_handlers() -> None:
        plain["register_signal_handlers"]()
        watcher.signals_registered()

    def load_combined_loader_states() -> None:
        loader: Any = fit._combined_loader
        parts = list(loader.flattened)
        number = watcher.epoch_of_loaders(fit.epoch_progress.current.processed)  # type: ignore[attr-defined]
        for part in parts:
            _set_sampler_epoch(part, number)
        watcher.train_loaders_ready(parts, all(sized_len(part) is not None for part in parts))
        plain["_load_combined_loader_states"]()

    def setup_data() -> None:
        plain["setup_data"]()
        loader: Any = validation._combined_loader
        if loader is not None and seen != [loader]:
            seen[:] = [loader]
            watcher.validation_loaders_ready(list(loader.flattened))

    def reset() -> None:
        if not watcher.is_resumed():
            plain["reset"]()  # which else would take the place for the middle of a step

    def on_run_start(fetcher: Any) -> None:
        watcher.epoch_starts()
        plain["on_run_start"](fetcher)
        watcher.epoch_started(lambda: plain["on_advance_end"](fetcher))

    def on_advance_end(fetcher: Any) -> None:
        watcher.batch_done()
        plain["on_advance_end"](fetcher)

    watching = (register_signal_handlers, load_combined_loader_states, setup_data, reset, on_run_start, on_advance_end)
    for (owner, name), function in zip(replaced, watching, strict=True):
        setattr(owner, name, function)

    def undo() -> None:
        for owner, name in replaced:
            vars(owner).pop(name, None)

    return undo


def train_iterators(trainer: Trainer) -> tuple[list[Any], int]:
    """Return the iterators of the training loaders, and how many batches were fetched but not trained on."""
    try:
        fetcher: Any = trainer.fit_loop._data_fetcher
        return list(fetcher.combined_loader._iterator.iterators), len(getattr(fetcher, "batches", ()))
    except AttributeError as error:
        raise _unknown_lightning("AutoResume", error) from error


def begun_again(trainer: Trainer) -> list[bool]:
    """Return which of the training loaders were at their end in this epoch already, and began again."""
    try:
        fetcher: Any = trainer.fit_loop._data_fetcher
        return list(getattr(fetcher.combined_loader._iterator, "_consumed", ()))
    except AttributeError as error:
        raise _unknown_lightning("AutoResume", error) from error


def mark_begun_again(trainer: Trainer, which: list[bool]) -> None:
    """Take loaders for such that were at their end in this epoch already."""
    fetcher: Any = trainer.fit_loop._data_fetcher
    if begun_again(trainer):
        fetcher.combined_loader._iterator._consumed = list(which)


def load_states_of_loaders(trainer: Trainer) -> None:
    """Let loaders with a `state_dict` take up their saved states, if they were made before these were there.

    Where `configure_optimizers` asks for `estimated_stepping_batches`, that makes the loaders before the Trainer
    restores its loops.
    """
    try:
        fit: Any = trainer.fit_loop
        states, fit._combined_loader_states_to_load = fit._combined_loader_states_to_load, []
        if states:
            fit._combined_loader._load_state_dicts(states)
            fetcher = fit._data_fetcher
            fetched = fetcher.fetched
            iter(fetcher)
            fetcher.fetched = fetched
    except AttributeError as error:
        raise _unknown_lightning("AutoResume", error) from error


def skip_train_batches(trainer: Trainer, count: int) -> None:
    """Fetch batches for nothing."""
    try:
        fetcher: Any = trainer.fit_loop._data_fetcher
        fetched, fetcher.fetched = fetcher.fetched, 0
        for _ in range(count):
            next(fetcher)
        fetcher.fetched = fetched
        if fetcher.length is not None:
            fetcher.done = fetched >= fetcher.length
    except AttributeError as error:
        raise _unknown_lightning("AutoResume", error) from error


def batches_done(trainer: Trainer) -> int:
    """Return how many batches of the epoch that runs are done."""
    try:
        return int(trainer.fit_loop.epoch_loop.batch_progress.current.ready)
    except AttributeError as error:
        raise _unknown_lightning("AutoResume", error) from error


def end_workers(trainer: Trainer) -> None:
    """End the workers of a fit's loaders, which the fit will not ask again."""
    try:
        trainer.fit_loop.teardown()
    except AttributeError as error:
        raise _unknown_lightning("AutoResume", error) from error


def is_at_end_of_epoch(trainer: Trainer) -> bool:
    """Whether the batch that was just done is the last of its epoch."""
    try:
        return bool(trainer.fit_loop.epoch_loop._num_ready_batches_reached())
    except AttributeError as error:
        raise _unknown_lightning("AutoResume", error) from error


def slurm_requeue_signal(trainer: Trainer) -> str | None:
    """Return the name of the signal on which Lightning has SLURM requeue the job, or None where it does not."""
    from lightning.pytorch.plugins.environments import SLURMEnvironment

    try:
        environment = trainer._accelerator_connector.cluster_environment
    except AttributeError as error:
        raise _unknown_lightning("AutoResume", error) from error
    if not isinstance(environment, SLURMEnvironment) or not environment.auto_requeue:
        return None
    return environment.requeue_signal.name if environment.requeue_signal is not None else "SIGUSR1"


def is_between_steps(trainer: Trainer) -> bool:
    """Whether the batch that was just done ended with an optimizer step, and another batch or epoch follows."""
    try:
        loop = trainer.fit_loop.epoch_loop
        return not (loop._should_accumulate() or 0 <= loop.max_steps <= loop.global_step)
    except AttributeError as error:
        raise _unknown_lightning("AutoResume", error) from error


def place_in_fit(trainer: Trainer) -> dict[str, Any]:
    """Return what the Trainer remembers beside its checkpoints: what was logged in this epoch, and when it reloads."""
    try:
        connector, fit = trainer._logger_connector, trainer.fit_loop
        return {
            "logged": {
                name: dict(getattr(connector, name))
                for name in ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
            },
            "current_fx": connector._current_fx,
            "first_loop_iter": connector._first_loop_iter,
            "should_stop": bool(trainer.should_stop),
            "reloaded": [fit._last_train_dl_reload_epoch, fit.epoch_loop.val_loop._last_val_dl_reload_epoch],
            "results": [
                _plain_result(trainer, key, item)
                for key, item in fit.epoch_loop._results.items()
                if item.meta.sync.group is None
            ],
        }
    except AttributeError as error:
        raise _unknown_lightning("AutoResume", error) from error


def return_to_place(trainer: Trainer, place: dict[str, Any]) -> None:
    """Put back what `place_in_fit` returned."""
    try:
        connector, fit = trainer._logger_connector, trainer.fit_loop
        for name, values in place["logged"].items():
            setattr(connector, name, dict(values))
        connector._current_fx, connector._first_loop_iter = place["current_fx"], place["first_loop_iter"]
        trainer.should_stop = place["should_stop"]
        fit._last_train_dl_reload_epoch, fit.epoch_loop.val_loop._last_val_dl_reload_epoch = place["reloaded"]
        fit.epoch_loop._results.clear()
        for item in place["results"]:
            _add_result(trainer, item)
    except AttributeError as error:
        raise _unknown_lightning("AutoResume", error) from error


def skip_sanity_check(trainer: Trainer) -> None:
    """Let the fit that is about to run begin without one, as a restored fit does."""
    trainer.fit_loop.epoch_loop.val_loop._restarting = True


def forget_restart(trainer: Trainer) -> None:
    """Let the loops go on as if they had never been restored."""
    fit = trainer.fit_loop
    parts = (fit.epoch_loop.automatic_optimization, fit.epoch_loop.manual_optimization)
    for loop in (fit, fit.epoch_loop, fit.epoch_loop.val_loop, *parts):
        loop._restarting = loop._loaded_from_state_dict = loop._resuming_from_checkpoint = False
    for loop in (fit.epoch_loop, fit.epoch_loop.val_loop):
        loop.reset_restart_stage()


_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")


def _plain_result(trainer: Trainer, key: str, item: Any) -> dict[str, Any]:
    meta, sync = item.meta, item.meta.sync
    plain = {name: getattr(meta, name) for name in _META}
    plain |= {"reduce_fx": meta.reduce_fx.__name__, "dataloader_idx": meta.dataloader_idx}
    plain |= {"metric_attribute": meta.metric_attribute}
    return {
        "key": key,
        "meta": plain,
        "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only, "_op": sync.op},
        "reduces": sync.fn == trainer.strategy.reduce,
        "is_tensor": item.is_tensor,
        "value": item.value if item.is_tensor else None,
        "cumulated_batch_size": getattr(item, "cumulated_batch_size", None),
        "state": {name: getattr(item, name) for name in ("has_reset", "_update_count", "_computed", "_forward_cache")},
    }


def _add_result(trainer: Trainer, item: dict[str, Any]) -> None:
    from lightning.pytorch.trainer.connectors.logger_connector.result import _Metadata, _ResultMetric, _Sync

    meta = _Metadata(**item["meta"])
    meta.sync = _Sync(fn=trainer.strategy.reduce if item["reduces"] else _Sync.no_op, **item["sync"])
    result: Any = _ResultMetric(meta, item["is_tensor"])
    if item["is_tensor"]:
        result.value = item["value"]
    elif not item["state"]["has_reset"] and meta.metric_attribute:
        result.value = trainer.lightning_module.get_submodule(meta.metric_attribute)
    if item["cumulated_batch_size"] is not None:
        result.cumulated_batch_size = item["cumulated_batch_size"]
    vars(result).update(item["state"])
    trainer.fit_loop.epoch_loop._results[item["key"]] = result.to(trainer.strategy.root_device)


def module_from_checkpoint(
    module: type[LightningModule], checkpoint: dict[str, Any], strict: bool | None, arguments: dict[str, Any]
) -> LightningModule:
    """Make a module of a checkpoint in memory, as `load_from_checkpoint` does of a file."""
    try:
        from lightning.pytorch.core.saving import _load_state
        from lightning.pytorch.utilities.migration.utils import _pl_migrate_checkpoint
    except ImportError as error:
        raise _unknown_lightning("TricksMixin.load_from_checkpoint", error) from error
    checkpoint = _pl_migrate_checkpoint(checkpoint)
    made: Any = _load_state(module, checkpoint, strict=strict, **arguments)
    return made  # type: ignore[no-any-return]


def _unknown_lightning(trick: str, error: Exception) -> RuntimeError:
    import lightning

    return RuntimeError(
        f"{trick} does not work with lightning {lightning.__version__} ({error}): install a version from 2.5 to 2.6."
    )
