"""An assertion for the tests of users: training gives the same result when it runs again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from lightning_tricks._lightning_compat.flavor import LightningModule, Trainer
from lightning_tricks._lightning_compat.trainer import callbacks_of
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks.run_fingerprint.callback import RunFingerprint
from lightning_tricks.run_fingerprint.core.comparison import Comparison, compare
from lightning_tricks.run_fingerprint.core.record import FingerprintRecord, read_ranks


def assert_reproducible(
    make_trainer: Callable[[], Trainer],
    make_module: Callable[[], LightningModule],
    make_data: Callable[[], Any] | None = None,
    *,
    detail: Literal["step", "layer"] = "layer",
) -> Comparison:
    """Train twice and compare each step, bit for bit.

    Each time, it calls `make_trainer`, `make_module` and `make_data`, in this order, and fits. Put everything that
    makes a run reproducible into these functions, above all seeding: otherwise the second run draws different random
    numbers. The random states of Python, NumPy and torch are restored afterwards; settings that the functions switch
    on, such as deterministic algorithms, stay on.

    Args:
        make_trainer: Returns a new Trainer.
        make_module: Returns a new LightningModule.
        make_data: Returns a LightningDataModule or training loaders, the second argument of `Trainer.fit`; None if the
            module has its own dataloaders.
        detail: "layer" names the layer at which the runs diverge; "step" is faster.

    Returns:
        The comparison of the two runs.

    Raises:
        AssertionError: If the runs diverge. The message names the step and the layer, and says whether the data, the
            forward pass, the gradient or the update differed.

    Examples:
        >>> from lightning.pytorch import Trainer, seed_everything
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> def make_trainer():
        ...     seed_everything(1, verbose=False)
        ...     return Trainer(max_steps=3, accelerator="cpu", logger=False, enable_checkpointing=False,
        ...                    enable_progress_bar=False, enable_model_summary=False)
        >>> print(assert_reproducible(make_trainer, BoringModel))
        No difference: 3 batches are equal, bit for bit.
    """
    with TemporaryDirectory() as folder, isolated_rng():
        first, second = (
            _record_run(Path(folder) / f"{run}.jsonl", make_trainer, make_module, make_data, detail) for run in "AB"
        )
        comparison = compare(first, second)
    if comparison.divergence is not None:
        raise AssertionError(f"Training is not reproducible. {comparison}")
    return comparison


def _record_run(
    path: Path,
    make_trainer: Callable[[], Trainer],
    make_module: Callable[[], LightningModule],
    make_data: Callable[[], Any] | None,
    detail: Literal["step", "layer"],
) -> list[FingerprintRecord]:
    trainer, module = make_trainer(), make_module()
    callbacks: list[Any] = callbacks_of(trainer)
    callbacks[:] = [callback for callback in callbacks if not isinstance(callback, RunFingerprint)]
    callbacks.insert(0, RunFingerprint(path, detail=detail))
    trainer.fit(module, make_data() if make_data is not None else None)
    return read_ranks(path)
