"""The callback `PredictionWriter`."""

from __future__ import annotations

import inspect
import os
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any, Literal

from torch.utils.data import DataLoader, IterableDataset, default_collate

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.flavor import (
    BasePredictionWriter,
    DDPStrategy,
    LightningModule,
    MisconfigurationException,
    Trainer,
    rank_zero_info,
    rank_zero_warn,
    sized_len,
)
from lightning_tricks._lightning_compat.loaders import batch_sampler_replaced, predict_loaders_prepared
from lightning_tricks._lightning_compat.trainer import callbacks_of_type, datamodule_of, is_fast_dev_run
from lightning_tricks._shared.checks import check_choice, check_path
from lightning_tricks._shared.extras import import_extra
from lightning_tricks._shared.patterns import Pattern
from lightning_tricks._shared.tensors import gather_objects
from lightning_tricks._shared.text import describe_error
from lightning_tricks.predictions.core import parts
from lightning_tricks.predictions.core.columns import OrderWatch, to_columns
from lightning_tricks.predictions.core.formats import FORMATS, check_kinds, write_predictions


class PredictionWriter(TrickCallback):
    """Write the predictions of all ranks and dataloaders to one file, in the order of the dataset, each sample once.

    `predict_step` returns a tensor, or a dict, a tuple or a dataclass of tensors, with one value per sample of the
    batch. Each becomes a column; nested names are joined by dots, and a single tensor is "prediction". Lists of
    strings, numbers or tensors become columns too; the first dimension of tensors may vary. The columns `loader` and
    `index` locate each row: `loader` is the name, if loaders are a dict, or the number of the dataloader, and `index`
    the index in its dataset, or a running number for an `IterableDataset`.

    While predicting, each rank appends its batches to its own files in the folder `<path>.parts`, so that nothing is
    kept in memory; pass `return_predictions=False`, or the Trainer keeps them. At the end rank zero writes the file
    piece by piece, moves it to `path`, where it replaces an older one, and removes the parts. Samples that a
    distributed sampler repeats are left out. After a kill or an exception the parts remain.

    Values of float16 and bfloat16 are float32 in parquet, as are bfloat16 values in npz. In npz, a column of varying
    lengths is joined, with `<name>.lengths`; in pt it is a list. NaN in jsonl is the word that Python reads.

    Args:
        path: The path of the file. Multiple nodes need a shared disk.
        format: "parquet" (needs the extra `parquet`), "npz" (arrays), "jsonl" (one line per sample) or "pt" (a dict of
            tensors). None takes the suffix of `path`, and parquet if it has none.
        columns: The columns to write, as names or patterns (a glob, or `re:` and a regular expression); None writes
            all.
        resume: Whether to resume a killed `predict` that had the same weights, datasets and settings. With
            `return_predictions=False`, on one rank or under DDP, batches that are in the parts are not read again, and
            `batch_idx` counts the others; otherwise they are predicted again. False starts from the beginning.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If `path` is an address, or `format` is unknown.
        ModuleNotFoundError: When `predict` starts, if pyarrow is missing.
        MisconfigurationException: In `predict`, if a value cannot be written, or the parts belong to another run.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> writer = PredictionWriter("predictions.npz", resume=True)
        >>> trainer = Trainer(callbacks=[writer], accelerator="cpu", logger=False)
    """

    path_arguments = ("path",)

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: Literal["parquet", "npz", "jsonl", "pt"] | None = None,  # noqa: A002
        columns: list[str] | None = None,
        resume: bool = False,
    ) -> None:
        self.path = check_path("path", path, "a file")
        self.format = format
        self.columns = columns
        self.resume = resume
        self._format = check_choice("format", Path(path).suffix[1:] or "parquet" if format is None else format, FORMATS)
        if columns is not None and (isinstance(columns, str) or not columns):
            raise TypeError(f"columns must be a list of names, or None for all, got {columns!r}.")
        self._patterns = tuple(map(Pattern, columns or ()))
        super().__init__()

    @property
    def _folder(self) -> Path:
        """The folder of the parts."""
        return Path(f"{os.fspath(self.path)}.parts")

    def _forget_run(self) -> None:
        self._parts: parts.PartWriter | None = None
        self._loaders: dict[str, parts.KnownBatches | Iterator[int]] = {}  # the running numbers of one without indices
        self._watches: dict[str, OrderWatch] = {}  # of loaders with a collate_fn of their own
        self._samples = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Check what can be checked before the loaders exist."""
        super().setup(trainer, pl_module, stage)
        if stage != "predict" or is_fast_dev_run(trainer):
            return
        if "dataloader_iter" in inspect.signature(pl_module.predict_step).parameters:
            raise MisconfigurationException("PredictionWriter needs predict_step(batch, ...), without dataloader_iter.")
        if self._format == "parquet":
            import_extra("pyarrow", "parquet", "PredictionWriter(format='parquet') needs pyarrow")
        begin = partial(self._begin, trainer, pl_module)
        self._installed.enter_context(predict_loaders_prepared(trainer, begin))

    def _begin(
        self, trainer: Trainer, pl_module: LightningModule, loaders: dict[str, Any], limits: list[float]
    ) -> None:
        """Find out which samples the loaders read, and open a part, on all ranks."""
        for (name, loader), limit in zip(loaders.items(), limits, strict=True):
            known = batch_sampler_replaced(loader, partial(parts.KnownBatches, limit=limit))
            sampler = self._installed.enter_context(known)
            source = self._loaders[name] = count() if sampler is None else sampler
            if sampler is not None and loader.collate_fn is not default_collate:
                self._installed.callback(setattr, loader, "collate_fn", loader.collate_fn)
                loader.collate_fn = self._watches[name] = OrderWatch(loader.collate_fn)
            is_stream = not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset)
            is_unordered = not getattr(loader, "in_order", True) and loader.num_workers > 1
            if is_unordered or (isinstance(source, count) and (trainer.world_size > 1 or not is_stream)):
                raise MisconfigurationException(
                    f"PredictionWriter cannot tell which samples loader {name!r} reads. Give a DataLoader with "
                    "batch_size and in_order=True; an IterableDataset, whose samples have no indices, needs devices=1."
                )
        sizes = {name: sized_len(getattr(loader, "dataset", loader)) for name, loader in loaders.items()}
        run = {
            "weights": sorted(set(gather_objects(parts.weights_digest(pl_module)))),
            "samples": sizes,
            "limit_predict_batches": trainer.limit_predict_batches,
            "precision": str(trainer.precision),
            "columns": [pattern.text for pattern in self._patterns] or None,
            "hyperparameters": {**getattr(datamodule_of(trainer), "hparams_initial", {}), **pl_module.hparams_initial},
        }
        resume = self.resume and not any(isinstance(source, count) for source in self._loaders.values())
        begin = partial(parts.begin_parts, Path(self.path), self._folder, run, resume=resume)
        attempt, changed = _on_rank_zero(trainer, begin)
        if changed:
            rank_zero_warn(
                f"PredictionWriter: {self._folder} has predictions of other hyperparameters ({changed}), and keeps "
                "them. Give resume=False to start again."
            )
        found = parts.MergedParts(self._folder)
        if not all(gather_objects(self._folder.exists())):  # all ranks have read before one adds a part
            raise MisconfigurationException(f"Not all ranks see {self._folder}: give a path on a disk that they share.")
        if len(found):
            rank_zero_info(f"PredictionWriter: resumes with {len(found):,} predictions in {self._folder}.")
        # Batches are left out if nobody else wants them, and no rank waits for another
        is_free = trainer.world_size == 1 or isinstance(trainer.strategy, DDPStrategy)
        is_wanted = trainer.predict_loop.return_predictions or callbacks_of_type(trainer, BasePredictionWriter)
        for number, source in enumerate(self._loaders.values()):
            if is_free and not is_wanted and isinstance(source, parts.KnownBatches):
                source.done = found.index[found.loader == number]
        self._samples = sum(size or 0 for size in sizes.values()) * (trainer.limit_predict_batches == 1.0)
        stem = self._folder / f"{attempt:06}-{trainer.global_rank:06}"
        self._parts = parts.PartWriter(stem, self._installed, found.kinds, partial(check_kinds, self._format))

    def on_predict_batch_end(
        self,
        trainer: Trainer,
        pl_module: LightningModule,
        outputs: Any,
        batch: Any,
        batch_idx: int,
        dataloader_idx: int = 0,
    ) -> None:
        """Write the predictions of a batch into the part of this rank."""
        if self._parts is None:
            return
        name, source = [*self._loaders.items()][dataloader_idx]
        try:
            indices = source.take(batch_idx) if isinstance(source, parts.KnownBatches) else None
            columns = to_columns(outputs, None if indices is None else len(indices), self._patterns)
            if isinstance(source, Iterator):
                indices = [*islice(source, len(next(iter(columns.values()))))]
            self._parts.append(dataloader_idx, indices or [], columns)
            if name in self._watches and self._watches[name].changed:
                del self._watches[name]
                warnings.warn(
                    f"PredictionWriter: the collate_fn of loader {name!r} sorts the samples of a batch. The n-th "
                    "prediction is written for the n-th index: do not sort, use "
                    "pack_padded_sequence(enforce_sorted=False), or let predict_step return them in the old order.",
                    stacklevel=2,
                )
        except (TypeError, ValueError) as error:
            where = f"the predictions of batch {batch_idx} of loader {name!r}"
            raise MisconfigurationException(f"PredictionWriter cannot write {where}: {error}.") from error

    def on_predict_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Merge the parts of all ranks into the file."""
        if self._parts is not None:
            merge, rows = partial(self._merge, [*self._loaders], self._samples), self._parts.rows
            self._close()
            _on_rank_zero(trainer, partial(merge, sum(gather_objects(rows))))  # when all ranks have written

    def _merge(self, loaders: list[str], samples: int, rows: int) -> None:
        merged = parts.MergedParts(self._folder)
        if (found := len(merged) + merged.repeated) < rows:
            raise OSError(
                f"{self._folder} contains {found:,} of {rows:,} predictions that were written to it. Run again with "
                "resume=True, while no other program uses this path, and on a disk that all nodes share."
            )
        write_predictions(Path(self.path), self._format, merged, loaders)
        parts.remove_parts(self._folder)
        said = f"{len(merged):,}{f' of {samples:,}' if samples else ''} samples to {self.path}"
        if merged.repeated:
            said += f", without {merged.repeated:,} that were repeated"
        if is_lossy := merged.repeated and len(merged) < samples:
            said += ". Samples are lost if ranks shuffle differently, or draw some twice: use shuffle=False"
        (rank_zero_warn if is_lossy else rank_zero_info)(f"PredictionWriter: wrote the predictions of {said}.")


def _on_rank_zero(trainer: Trainer, function: Callable[[], Any]) -> Any:
    """Call a function on rank zero, and return its result on all ranks, on which an error is raised as well."""
    result, cause = None, None
    if trainer.is_global_zero:
        try:
            result = function()
        except Exception as error:
            cause = error
    result, problem = trainer.strategy.broadcast((result, cause and describe_error(cause)))
    if problem:
        raise MisconfigurationException(f"PredictionWriter cannot write the predictions: {problem}") from cause
    return result
