"""What the Trainer remembers of the values that were logged in the epoch that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torchmetrics import Metric

from lightning_tricks._lightning_compat.flavor import import_lightning
from lightning_tricks._lightning_compat.guards import needs_private, set_private
from lightning_tricks._lightning_compat.trainer import callbacks_of

if TYPE_CHECKING:
    from lightning_tricks._lightning_compat.flavor import Callback, Trainer


def capture_loop_state(trainer: Trainer) -> dict[str, Any]:
    """Return what no checkpoint of the Trainer holds: values logged in this epoch, and when loaders were reloaded."""
    return hold_loop_state(trainer)()


# Lightning saves no results of an epoch that runs: a mean over the epoch would begin anew after a resume, and `monitor`
# of EarlyStopping find no value until the next validation.
_LOGGED = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


@needs_private("AutoResume")
def hold_loop_state(trainer: Trainer) -> Callable[[], dict[str, Any]]:
    """Return a function that makes of what is there now what `capture_loop_state` returns."""
    connector, fit = trainer._logger_connector, trainer.fit_loop
    validation = fit.epoch_loop.val_loop
    held = {
        "logged": {name: dict(getattr(connector, name)) for name in _LOGGED},
        "current_fx": connector._current_fx,
        # These two tell `log` to drop what the epoch before logged (logger_connector.py, `should_reset_tensors`):
        # without them, a resume in mid epoch would take its first batch for that of the epoch, and drop what was
        # restored.
        "first_loop_iter": connector._first_loop_iter,
        "should_stop": bool(trainer.should_stop),
        "reloaded": [fit._last_train_dl_reload_epoch, validation._last_val_dl_reload_epoch],
        "validated": dict(validation._seen_batches_per_dataloader),  # the steps of what it logs
    }
    # `update` assigns new tensors and changes none in place (result.py), so that the state of now can be made later.
    items = [(key, dict(vars(item))) for key, item in fit.epoch_loop._results.items()]

    @needs_private("AutoResume")
    def state() -> dict[str, Any]:
        has_metrics = not all(item["is_tensor"] for _, item in items)
        # A logged metric is the module's own object: its state is saved with it, and only its place here.
        paths = {id(metric): path for path, metric in _named_metrics(trainer)} if has_metrics else {}
        kept = (named for named in items if named[1]["meta"].sync.group is None)
        return held | {"results": [_result_state(trainer, key, item, paths) for key, item in kept]}

    return state


@needs_private("AutoResume")
def restore_loop_state(trainer: Trainer, state: dict[str, Any]) -> None:
    """Restore what `capture_loop_state` returned, except metrics that are not there."""
    connector, fit = trainer._logger_connector, trainer.fit_loop
    validation = fit.epoch_loop.val_loop
    set_private(connector, **{name: dict(values) for name, values in state["logged"].items()})
    set_private(connector, _current_fx=state["current_fx"], _first_loop_iter=state["first_loop_iter"])
    trainer.should_stop = state["should_stop"]
    train_reload_epoch, validation_reload_epoch = state["reloaded"]
    set_private(fit, _last_train_dl_reload_epoch=train_reload_epoch)
    set_private(validation, _last_val_dl_reload_epoch=validation_reload_epoch)
    validation._seen_batches_per_dataloader.clear()
    validation._seen_batches_per_dataloader.update(state["validated"])
    fit.epoch_loop._results.clear()
    metrics = dict(_named_metrics(trainer)) if any(item["metric"] for item in state["results"]) else {}
    for item in state["results"]:
        _restore_result(trainer, item, metrics)


_RESULT_FIELDS = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "enable_graph", "add_dataloader_idx")


def named_callbacks(trainer: Trainer) -> dict[str, Callback]:
    """Return the callbacks by names that do not depend on callbacks of other types, as `callbacks.EarlyStopping`."""
    found: dict[str, Callback] = {}
    for callback in callbacks_of(trainer):
        # By class and number: a resumed run may have one more progress bar in front.
        alike = sum(type(other).__name__ == type(callback).__name__ for other in found.values())
        found[f"callbacks.{type(callback).__name__}{alike or ''}"] = callback
    return found


def _named_metrics(trainer: Trainer) -> Iterator[tuple[str, Metric]]:
    """Yield the path and the metric of all metrics that may be logged, also of callbacks and in containers."""
    # A metric that is logged has to be an attribute of the module (`LightningModule.log`), or is one of a callback.
    yield from _metrics_in("", trainer.lightning_module)
    for name, callback in named_callbacks(trainer).items():
        yield from _metrics_in(name, vars(callback))
    yield from _metrics_in("attributes", getattr(trainer.lightning_module, "__dict__", {}))


def _metrics_in(path: str, value: Any, parents: tuple[int, ...] = ()) -> Iterator[tuple[str, Metric]]:
    kind = type(value)
    if issubclass(kind, nn.Module):
        parts = ((f"{path}.{name}".strip("."), part) for name, part in value.named_modules())
        yield from ((name, part) for name, part in parts if isinstance(part, Metric))
    # Such a list is no ModuleList, and `named_modules` does not see it; it may hold itself.
    elif kind in (dict, list, tuple) and id(value) not in parents:
        named = value.items() if kind is dict else enumerate(value)
        for name, part in named:
            if issubclass(type(part), nn.Module | dict | list | tuple):
                yield from _metrics_in(f"{path}.{name}", part, (*parents, id(value)))


def _result_state(trainer: Trainer, key: str, item: Mapping[str, Any], paths: Mapping[int, str]) -> dict[str, Any]:
    meta, sync, is_tensor = item["meta"], item["meta"].sync, item["is_tensor"]
    # As plain values: a checkpoint loads with `weights_only`, and holds no class of Lightning.
    plain = {name: getattr(meta, name) for name in _RESULT_FIELDS}
    plain |= {"reduce_fx": meta.reduce_fx.__name__, "dataloader_idx": meta.dataloader_idx}
    plain |= {"metric_attribute": meta.metric_attribute}
    return {
        "key": key,
        "meta": plain,
        "sync": {"_should": sync.should, "rank_zero_only": sync.rank_zero_only, "_op": sync.op},
        "reduces": sync.fn == trainer.strategy.reduce,
        "is_tensor": is_tensor,
        "metric": None if is_tensor else paths.get(id(item.get("value"))),
        "value": item["value"] if is_tensor else None,
        "cumulated_batch_size": item["cumulated_batch_size"] if is_tensor and meta.is_mean_reduction else None,
        "state": {name: item[name] for name in ("has_reset", "_update_count", "_computed", "_forward_cache")},
    }


def merged_result(
    item: Mapping[str, Any], of_ranks: Sequence[Sequence[Mapping[str, Any]]], is_distributed: bool
) -> Mapping[str, Any]:
    """Return the state of a logged value with what these ranks logged; what ranks do not add up stays as it is."""
    sums = {key: item[key] for key in ("value", "cumulated_batch_size") if item[key] is not None}
    # Values that are synchronised are added over the ranks of now: those of ranks that are no more have to be among
    # them. Without `sync_dist` each rank logs its own.
    is_sum = item["sync"]["_should"] and item["meta"]["reduce_fx"] in ("mean", "sum")
    same = [one for results in of_ranks for one in results if one["key"] == item["key"]] if is_sum else [item]
    merged = {key: sum((one[key] for one in same), torch.zeros_like(value)) for key, value in sums.items()}
    return {**item, **merged, "sync": {**item["sync"], "_should": item["sync"]["_should"] and is_distributed}}


def _restore_result(trainer: Trainer, item: dict[str, Any], metrics: Mapping[str, Metric]) -> None:
    results = import_lightning("pytorch.trainer.connectors.logger_connector.result")
    # It compares equal to what the next `log` makes of the same arguments; any difference there is an error ("twice ...
    # with different arguments").
    meta = results._Metadata(**item["meta"])
    meta.sync = results._Sync(fn=trainer.strategy.reduce if item["reduces"] else results._Sync.no_op, **item["sync"])
    result: Any = results._ResultMetric(meta, item["is_tensor"])
    if item["is_tensor"]:
        set_private(result, value=item["value"])
    elif item["metric"] in metrics:
        result.value = metrics[item["metric"]]
    else:
        return
    if item["cumulated_batch_size"] is not None:
        set_private(result, cumulated_batch_size=item["cumulated_batch_size"])
    set_private(result, **item["state"])
    trainer.fit_loop.epoch_loop._results[item["key"]] = result.to(trainer.strategy.root_device)
