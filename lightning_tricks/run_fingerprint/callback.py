"""The callback `RunFingerprint`, and the assertion for the tests of users that training gives the same twice."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.ddp import equal_on_ranks
from lightning_tricks._lightning_compat.flavor import LightningModule, MisconfigurationException, Trainer
from lightning_tricks._lightning_compat.loaders import fit_loaders
from lightning_tricks._lightning_compat.trainer import callbacks_of, is_fast_dev_run
from lightning_tricks._shared.checks import SENT_BY_AUTO_RESUME, check_choice, check_count, check_path
from lightning_tricks._shared.files import find_write_problem
from lightning_tricks._shared.report_parts import Facts
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks._torch_compat.distributed import store_of_ranks
from lightning_tricks.run_fingerprint.core import record as on_disk
from lightning_tricks.run_fingerprint.core.comparison import Comparison, compare
from lightning_tricks.run_fingerprint.core.ranks import RankExchange, RepeatedBatches
from lightning_tricks.run_fingerprint.core.record import FingerprintRecord, RecordHeader, read_ranks
from lightning_tricks.run_fingerprint.core.step_recorder import RowWriter, StepRecorder


class RunFingerprint(TrickCallback):
    """Record 64-bit fingerprints of batch, loss, gradients and weights at each step, to find where two runs diverge.

    `lightning-tricks fingerprint diff A B` names the first step at which two files differ, and whether the difference
    is in the data, the forward pass, the gradient or the update; with `detail="layer"`, also the layer. The
    fingerprints stay on the device and are copied to the host in blocks of 128 steps, when a checkpoint is saved, and
    at the end. A resumed fit continues its file at the checkpoint: if the resume is exact, the file equals that of an
    uninterrupted run.

    Gradients are recorded before each optimizer step as this callback receives them, unscaled and accumulated; weights
    and buffers after the step, and once before the first batch. Batches without an optimizer step have neither. Under
    DDP, each rank writes its own record: rank 1 of `run.jsonl` writes `run.rank1.jsonl`.

    Several ranks are compared with each other where rows are copied to the host. A warning names the step if learning
    rates differ, if weights differ that DDP keeps equal, with `detail="layer"` by name, or if ranks read the same
    batches. Nothing waits for another rank during training. `lightning-tricks fingerprint ranks DIR` reads files.

    Not recorded: optimizer states, until they change weights; gradients that DeepSpeed does not expose; layers inside a
    compiled module, for which only the output of the module is recorded; validation.

    Args:
        path: The JSON lines file to write. Missing parent directories are created. An existing file of another run
            is moved to `run.earlier-1.jsonl`.
        every_n_train_steps: Record the batches of every n-th optimizer step; at least 1.
        detail: "step" records four fingerprints a step; "layer" records one for each part of the batch, each layer's
            output, each gradient and each weight.
        compare_ranks: Whether several ranks are compared with each other. It has no effect with one rank.

    For other training loops: `lightning_tricks.run_fingerprint.fingerprint`.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If one is out of range or unknown.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[RunFingerprint("runs/a.jsonl", detail="layer")], accelerator="cpu")
    """

    path_arguments = ("path",)

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every_n_train_steps: int = 1,
        detail: Literal["step", "layer"] = "step",
        compare_ranks: bool = True,
    ) -> None:
        self.path = check_path("path", path, "a file", remedy=SENT_BY_AUTO_RESUME)
        self.every_n_train_steps = check_count("every_n_train_steps", every_n_train_steps)
        self.detail = check_choice("detail", detail, ("step", "layer"))
        self.compare_ranks = compare_ranks
        self._found: dict[str, str] = {}  # what is wrong in the run, by kind; on rank zero
        self._num_rows = 0
        self._digest = ""  # of the rows of rank zero when they were written last
        self._num_rows_to_keep: int | None = None  # of the file that a resumed fit continues
        super().__init__()

    def _forget_run(self) -> None:
        self._recorder: StepRecorder | None = None  # from the start of training on

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise an error for a path that cannot be written."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._num_rows_to_keep, self._digest, self._found = None, "", {}
        if problem := find_write_problem(Path(self.path)):
            raise MisconfigurationException(f"RunFingerprint cannot write {self.path}: {problem}. Choose another path.")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start the file with the initial weights, or continue it after a resume."""
        if is_fast_dev_run(trainer):
            self.say("does not record a fast_dev_run")
        else:
            self._start(trainer, pl_module)
        super().on_train_start(trainer, pl_module)

    def _start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        header = RecordHeader(
            detail=self.detail,
            every_n_train_steps=self.every_n_train_steps,
            rank=trainer.global_rank,
            world_size=trainer.world_size,
        )
        path = on_disk.rank_path(self.path, trainer.global_rank)
        is_replicated = equal_on_ranks(trainer) if self.compare_ranks else None
        recorder = self._recorder = StepRecorder(RowWriter(path, header), pl_module, is_replicated)
        self._installed.callback(recorder.writer.close)
        self._installed.callback(recorder.close)
        found = self._find(header) if trainer.is_global_zero else None
        sent = (*found[:2], token_hex(8)) if found is not None else (None, 0, "")
        source, unused, run = trainer.strategy.broadcast(sent)
        watchers = recorder.writer.watchers
        if trainer.is_global_zero and self.every_n_train_steps == 1:
            watchers.append(RepeatedBatches())
        if is_replicated is not None:
            exchange = RankExchange(store_of_ranks(run), trainer.global_rank, trainer.world_size)
            watchers.append(exchange)
            if not trainer.is_global_zero:
                self._installed.callback(exchange.finish)
        record = found[2] if found is not None else None
        with self._stops_on_oserror(recorder):
            if not trainer.is_global_zero and source is not None and self._num_rows_to_keep is not None:
                record = on_disk.read_first_rows(self._earlier(source, trainer), header, self._num_rows_to_keep)
            if path.exists() and not (record is not None and source == 0):
                aside = self._earlier(unused, trainer)
                path.replace(aside)
                self.say(f"moved the record of another run from {path} to {aside}")
            recorder.writer.start_file(record)
            self.say(f"records each {self.detail} in {path}")
            if record is None:
                loaders = None if is_replicated is None else fit_loaders(trainer)
                recorder.record_initial_weights(trainer.global_step, trainer.current_epoch, loaders)

    def _find(self, header: RecordHeader) -> tuple[int | None, int, FingerprintRecord | None]:
        """Find the rows of this run that a resumed fit continues.

        Returns:
            The number of the earlier file that has them, 0 for the file itself, None for no file; an unused number; and
            the rows.
        """
        path = Path(self.path)
        unused = next(number for number in count(1) if not on_disk.earlier_path(path, number).exists())
        if self._num_rows_to_keep is not None:
            for number in range(unused):
                earlier = on_disk.earlier_path(path, number)
                record = on_disk.read_first_rows(earlier, header, self._num_rows_to_keep, self._digest)
                if record is not None:
                    return number, unused, record
        return None, unused, None

    def _earlier(self, number: int, trainer: Trainer) -> Path:
        return on_disk.rank_path(on_disk.earlier_path(Path(self.path), number), trainer.global_rank)

    def resumed(self, trainer: Trainer, not_restored: Sequence[str]) -> None:
        """Record what `AutoResume` could not restore; `fingerprint diff` names it where the runs diverge."""
        recorder = self._recorder
        if recorder is not None and not_restored:
            with self._stops_on_oserror(recorder):
                recorder.writer.add_resume(trainer.global_step, trainer.current_epoch, not_restored)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Find the layers and weights again: the module may have changed."""
        if self._recorder is not None:
            self._recorder.find_layers()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Record the batch, and hook the layers."""
        if self._recorder is not None and trainer.global_step % self.every_n_train_steps == 0:
            self._recorder.on_batch_start(trainer.global_step, trainer.current_epoch, batch_idx, batch)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Record the loss."""
        if self._recorder is not None:
            self._recorder.on_backward_start(loss)

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Record the gradients."""
        if self._recorder is not None:
            self._recorder.on_optimizer_step(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Record the weights, and unhook the layers."""
        recorder = self._recorder
        if recorder is not None:
            loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
            with self._stops_on_oserror(recorder):
                recorder.on_batch_end(loss, may_have_stepped=not pl_module.automatic_optimization)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Write the remaining rows."""
        self._flush(is_last=True)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Write the remaining rows, also that of the interrupted step."""
        recorder = self._recorder
        if recorder is not None:
            with suppress(RuntimeError), self._stops_on_oserror(recorder):  # raised by a lost device
                recorder.on_exception()
        super().on_exception(trainer, pl_module, exception)

    def report_parts(self, trainer: Trainer) -> list[Facts]:
        """Return where the record is, and how to compare it."""
        if not self._num_rows:
            return []
        path = os.fspath(self.path)
        batches = self._num_rows - 1  # the first row has the initial weights
        facts = [("file", path), ("batches", f"{batches:,}"), ("detail", self.detail)]
        said = f"To find the first step at which another run differs: lightning-tricks fingerprint diff {path} OTHER"
        return [Facts(title="Run fingerprint", facts=facts, sentences=[said], warnings=list(self._found.values()))]

    def state_dict(self) -> dict[str, Any]:
        """Write the remaining rows, and return how many rows the file has, and on rank zero a digest of them."""
        self._flush()
        known = {"digest": self._digest, "found": dict(self._found)}
        return {"rows": self._num_rows, **{name: value for name, value in known.items() if value}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Remember from which row to continue the file."""
        self._num_rows_to_keep = self._num_rows = int(state_dict["rows"])
        self._digest = str(state_dict.get("digest", ""))
        self._found = {str(kind): str(said) for kind, said in state_dict.get("found", {}).items()}

    def _flush(self, is_last: bool = False) -> None:
        recorder = self._recorder
        if recorder is not None:
            with self._stops_on_oserror(recorder):
                recorder.writer.flush()
                for watcher in recorder.writer.watchers if is_last else ():
                    watcher.finish()
                if recorder.writer.header.rank == 0:
                    self._digest = recorder.writer.digest()

    @contextmanager
    def _stops_on_oserror(self, recorder: StepRecorder) -> Iterator[None]:
        """Count the rows recorded in the block; if the file cannot be written, training continues without it."""
        try:
            yield
            self._num_rows = recorder.writer.num_rows
            for kind, said in [item for watcher in recorder.writer.watchers for item in watcher.found.items()]:
                if kind not in self._found:
                    self._found[kind] = said
                    warnings.warn(f"RunFingerprint: {said}", stacklevel=2)
        except OSError as error:
            warnings.warn(f"RunFingerprint stops recording: {self.path} cannot be written ({error}).", stacklevel=2)
            self._close()


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
