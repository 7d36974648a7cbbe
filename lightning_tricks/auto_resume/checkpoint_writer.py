"""When a fit is saved, what each checkpoint holds and cannot hold, how far the fit is, and durable writes for all."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lightning_tricks._lightning_compat.checkpoints import checkpoint_io_inserted, checkpoint_ios
from lightning_tricks._lightning_compat.fit import dump_checkpoint, num_batches_done
from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    Strategy,
    TorchCheckpointIO,
    Trainer,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.sharded import is_sharding
from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.host_copies import HostCopies
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks._shared.shards import take_shards, write_shards
from lightning_tricks._shared.tensors import gather_objects
from lightning_tricks._shared.text import list_names
from lightning_tricks.auto_resume.core.checkpoint_contents import (
    files_of_rank,
    find_objects,
    load_plain_data,
    object_pickle,
    plain_tensors,
    split_arguments,
)
from lightning_tricks.auto_resume.core.checkpoint_folder import CHECKPOINT_KEY, FORMAT, Manifest, main_file
from lightning_tricks.auto_resume.core.durable_writing import write_atomically
from lightning_tricks.auto_resume.core.tensor_block import pack
from lightning_tricks.auto_resume.model_checkpoint_files import ORIGIN_KEY
from lightning_tricks.auto_resume.parts import SavePoint, Settings
from lightning_tricks.auto_resume.run_files import RunFiles
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError

_SECONDS_BETWEEN_STATUSES = 10.0
_SECONDS_BETWEEN_LOOKS = 0.5  # for whether other nodes have sent all
_MAX_BYTES_OF_COPY = 2**29  # of a checkpoint that is written beside training if nobody chose otherwise


class CheckpointWriter:
    """Writes the checkpoints of a fit, and its status for `lightning-tricks resume status`.

    Args:
        settings: The callback, with the user's choices.
        trainer: The Trainer of the fit.
        module: The module that is trained.
        run_files: The files around the checkpoints, with their folder.

    Attributes:
        final_manifest: The manifest of the checkpoint at the end of this fit, None before; on rank zero.
    """

    def __init__(self, settings: Settings, trainer: Trainer, module: LightningModule, run_files: RunFiles) -> None:
        self.settings, self.trainer, self.module, self.run_files = settings, trainer, module, run_files
        self.final_manifest: Manifest | None = None
        self._saved_step = -1
        self._saved_at = time.monotonic()
        self._status_at = -math.inf
        self._reported: set[str] = set()
        self._copies = HostCopies()
        self._thread: ThreadPoolExecutor | None = None  # which writes beside training
        self._writing: Future[str] | None = None  # what it writes
        self._group: Any = None  # of its own exchanges between ranks
        self._known_arguments = b""  # the objects among the hyper-parameters that were read from a checkpoint

    def skip_step(self, step: int) -> None:
        """Let a step that was just resumed not be saved once more."""
        self._saved_step = step

    def is_time_over(self) -> bool:
        """Whether `train_time_interval` is over since the last save; always False on other ranks than zero."""
        if not self.trainer.is_global_zero:
            return False
        return time.monotonic() - self._saved_at >= self.settings.seconds_between_saves

    def set_time_over(self) -> None:
        """Let the next step be saved."""
        self._saved_at = -math.inf

    def is_step_due(self, before: int, step: int) -> bool:
        """Whether `every_n_train_steps` asks for a save after a batch with the steps from `before` to `step`."""
        interval = self.settings.every_n_train_steps
        return interval is not None and step // interval > before // interval and step != self._saved_step

    def is_epoch_due(self, epoch: int) -> bool:
        """Whether `every_n_epochs` asks for a save before an epoch."""
        interval = self.settings.every_n_epochs
        return interval is not None and epoch % interval == 0

    def save(
        self,
        save_point: SavePoint,
        rank_state: Mapping[str, Any],
        get_rank_tensors: Callable[[], Mapping[str, Any]],
        get_shared_state: Callable[[Mapping[str, Any]], Mapping[str, Any]],
        identity: Mapping[str, Any],
        *,
        waits: bool,
    ) -> None:
        """Write a checkpoint and remove old ones, after the one that is still written. All ranks have to call it.

        Args:
            save_point: The moment of the save.
            rank_state: The state of this rank.
            get_rank_tensors: Returns a part of it as it is once the Trainer's checkpoint is made, with several ranks.
            get_shared_state: Returns the state that is the same on all ranks and that the Trainer's checkpoint, its
                argument, lacks; called on rank zero, and on all ranks where the model is sharded.
            identity: What distinguishes this run from others.
            waits: Whether it is on the disk when this returns; else a copy of it is.

        Raises:
            OSError: If the checkpoint, or the one before, could not be written, with `on_failed_save="raise"`.
        """
        self.finish()
        self._report_sending()
        trainer = self.trainer
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
        with isolated_rng():  # hooks of a save must not change the random numbers of the run
            checkpoint = dump_checkpoint(trainer)
        if trainer.world_size > 1:
            rank_state = {**rank_state, **get_rank_tensors()}
        shards: dict[str, Tensor] = {}
        knows_all = trainer.is_global_zero or is_sharding(trainer.strategy)
        shared = get_shared_state(checkpoint) if knows_all else {}
        checkpoint |= {
            CHECKPOINT_KEY: {"shared": shared, "ranks": rank_state},
            ORIGIN_KEY: vars(self.run_files.others.origin),
        }
        if is_sharding(trainer.strategy):
            checkpoint, shards = take_shards(checkpoint, self.module)
        packed = {name: pack(part) for name, part in checkpoint[CHECKPOINT_KEY].items()}
        is_small = not waits and self._may_be_beside({**checkpoint, CHECKPOINT_KEY: packed}, shards)
        mine = packed["ranks"], rank_state["not_saved"], is_small
        ranks, unsaved, (beside, *_) = zip(*gather_objects(mine), strict=True)  # of which rank zero decides
        entry = {"format": FORMAT, "moment": save_point.value, "shared": packed["shared"], "ranks": [*ranks]}
        checkpoint[CHECKPOINT_KEY] = entry
        self._warn_unsaved([name for names in unsaved for name in names])
        others = self.run_files.others
        run = {**identity, "start": others.origin.start, "starts": [*(others.continued or {}).items()]}
        known: dict[str, Any] = {"finished": save_point is SavePoint.FIT_END, "run": run}

        def note_position() -> None:
            for logger in trainer.loggers:  # rows that are still in memory would be lost in a kill
                logger.save()
            known.update(epoch=trainer.current_epoch, step=trainer.global_step, batches=num_batches_done(trainer))
            known.update(loggers=self.run_files.loggers.records())

        failure = self._failure_of(note_position) if trainer.is_global_zero else ""
        if not beside:
            self._report(self._write(checkpoint, shards, known, failure))
            return
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "AutoResume")
            if is_sharding(trainer.strategy):  # others would mix with what training exchanges
                self._group = torch.distributed.new_group(backend="gloo")
        if knows_all:
            arguments, entries = split_arguments(checkpoint)
            entries, shards = self._copies.take((entries, shards))
            checkpoint = {**arguments, **entries}
        self._writing = self._thread.submit(self._write, checkpoint, shards, known, failure)

    def _may_be_beside(self, checkpoint: Mapping[str, Any], shards: Mapping[str, Tensor]) -> bool:
        """Whether training goes on while a checkpoint is written: as the user said, or if it is small plain data."""
        if self.settings.asynchronous is not None:
            return self.settings.asynchronous
        tensors = plain_tensors(checkpoint)
        if shards or tensors is None:  # an object might change while it is written
            return False
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({one.data_ptr(): one.nbytes() for one in storages}.values()) <= _MAX_BYTES_OF_COPY

    def wait(self) -> None:
        """Wait for the checkpoint that is still written, if there is one."""
        if self._writing is not None:
            wait([self._writing])

    def finish(self) -> None:
        """Wait as well, and report a failure; all ranks have to call it.

        Raises:
            OSError: If it could not be written, with `on_failed_save="raise"`.
        """
        if self._writing is not None:
            writing, self._writing = self._writing, None
            self._report(writing.result())

    def close(self) -> None:
        """Wait for the last checkpoint, where a fit ends otherwise than by its end."""
        if self._writing is not None and (failure := self._writing.result()):
            rank_zero_warn(failure)
        self._writing = None
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None

    def _report(self, failure: str) -> None:
        """Raise or warn on all ranks if rank zero could not write a checkpoint."""
        failure = self.trainer.strategy.broadcast(failure)
        if failure and self.settings.on_failed_save == "raise":
            raise OSError(failure)
        if failure:
            rank_zero_warn(f"{failure} Training continues.")

    def _report_sending(self) -> None:
        """Report why the checkpoint before was not sent to an address."""
        if (mirror := self.run_files.mirror) is None:
            return
        reports = gather_objects(mirror.report() if self.run_files.is_writer else ("", False))
        problem, is_lost = max(reports, key=lambda report: report[::-1])
        if is_lost:
            raise MisconfigurationException(f"AutoResume: {problem}")
        self._report(
            problem and f"AutoResume: the checkpoint before step {self.trainer.global_step} was not sent: {problem}"
        )

    def finish_on_nodes(self, *, first: int) -> None:
        """Wait until nodes from the first one on have sent the shards of their ranks; all ranks have to call it.

        Raises:
            OSError: If the end of the fit could not be sent, with `on_failed_save="raise"`.
        """
        if not self.run_files.has_parts:
            return
        self.run_files.on_saved()
        with ThreadPoolExecutor(1) as thread:
            sending = thread.submit(self._finish_sending if self.trainer.node_rank >= first else str)
            while not all(gather_objects(sending.done())):  # a single exchange must not take as long as sending does
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        self._report_unsent(" ".join(filter(None, gather_objects(sending.result()))))

    def finish_sending(self) -> None:
        """Wait until all is sent to an address, after a stop only for some time; on rank zero.

        Raises:
            OSError: If the end of the fit could not be sent, with `on_failed_save="raise"`.
        """
        self._report_unsent(self._finish_sending())

    def _finish_sending(self) -> str:
        return self.run_files.finish_sending(None if self.final_manifest else self.settings.seconds_to_send)

    def _report_unsent(self, failure: str) -> None:
        if failure and self.final_manifest and self.settings.on_failed_save == "raise":
            raise OSError(failure)
        if failure:
            rank_zero_warn(failure)

    def write_status_if_due(self) -> None:
        """Write that the fit is running, at most every ten seconds."""
        if time.monotonic() - self._status_at > _SECONDS_BETWEEN_STATUSES:
            self.write_status("running")

    def write_status(self, state: str) -> None:
        """Write the status file, on rank zero: "running", "stopped" or "finished"."""
        self._status_at = time.monotonic()
        trainer = self.trainer
        if not trainer.is_global_zero:
            return
        with suppress(OSError):  # a full disk is reported by the checkpoint that is lost
            limits = {"max_epochs": trainer.max_epochs, "max_steps": trainer.max_steps}
            self.run_files.folder.write_status(
                state=state, epoch=trainer.current_epoch, step=trainer.global_step, **limits
            )

    def _write(
        self, checkpoint: Mapping[str, Any], shards: Mapping[str, Tensor], known: Mapping[str, Any], failure: str
    ) -> str:
        """Write a checkpoint and remove old ones; return why that failed, or nothing.

        Beside training a thread of its own calls it, on copies. Where there are shards all ranks have to call it.

        Args:
            checkpoint: What rank zero writes.
            shards: What each rank writes its part of.
            known: What the manifest says of it.
            failure: Why it cannot be written, on rank zero; or nothing.
        """
        folder, files = self.run_files.folder, dict[str, tuple[str, int]]()
        if shards:
            files, failure = self._write_shards(shards, failure)
        manifest: Manifest | None = None
        problems = []

        def write() -> None:
            nonlocal manifest
            manifest = folder.save(checkpoint, shards=files, **known)
            self.run_files.others.on_save(manifest.number)
            self.final_manifest = manifest if manifest.finished else None
            folder.prune(self.settings.keep_last)
            if not self.run_files.has_parts:
                self.run_files.on_saved()
            if not self.settings.allow_pickle:
                problems.append(self._why_not_loadable(checkpoint, main_file(folder.path_of(manifest))))

        if self.trainer.is_global_zero and not failure:
            failure = self._failure_of(write) or "".join(problems)
        return self._keep_on_nodes(manifest, failure) if self.run_files.has_parts else failure

    def _keep_on_nodes(self, saved: Manifest | None, failure: str) -> str:
        """Let the other nodes keep their part of what rank zero has saved, and all send it; return why that failed."""
        folder, mirror = self.run_files.folder, self.run_files.mirror
        manifest, failure = gather_objects((saved, failure), self._group)[0]
        if manifest is not None:
            self.final_manifest = manifest if manifest.finished else None
            if self.run_files.is_writer and not self.trainer.is_global_zero:
                kept = partial(folder.keep, manifest), partial(folder.prune, self.settings.keep_last)
                failure = next(filter(None, map(self._failure_of, kept)), failure)
        failures, are_idle = zip(*gather_objects((failure, mirror and mirror.is_idle()), self._group), strict=True)
        if manifest is not None and all(are_idle):  # else they would not send the same one
            self.run_files.on_saved()
        return next(filter(None, failures), "")

    def _write_shards(self, shards: Mapping[str, Tensor], failure: str) -> tuple[dict[str, tuple[str, int]], str]:
        """Write what is sharded; return the files of all ranks with SHA-256 and size, and why it failed, if it did."""
        folder, rank, files = self.run_files.folder, self.trainer.global_rank, dict[str, tuple[str, int]]()
        if self.run_files.is_writer and not failure:
            failure = self._failure_of(folder.begin)
        failure = next(filter(None, gather_objects(failure, self._group)), "")
        failure = failure or self._failure_of(lambda: write_shards(folder.writing, shards, self._group))
        failure = failure or self._failure_of(lambda: files.update(files_of_rank(folder.writing, rank)))
        failures, files_of_ranks = zip(*gather_objects((failure, files), self._group), strict=True)
        return {name: of for files in files_of_ranks for name, of in files.items()}, next(filter(None, failures), "")

    def _failure_of(self, write: Callable[[], object]) -> str:
        """Return why a write failed, or nothing."""
        try:
            write()
        except Exception as error:  # of the disk, a logger, or the pickling of a user's object
            folder = self.run_files.folder
            kept = "The previous checkpoint is complete" if folder.manifests() else "There is no earlier checkpoint"
            return f"AutoResume: step {self._saved_step} could not be saved in {folder.path}: {error}. {kept}."
        return ""

    def _warn_unsaved(self, names: Sequence[str]) -> None:
        """Name what a resumed run will lack, each thing once."""
        new = self._not_yet_reported([*dict.fromkeys(names)])
        if new:
            rank_zero_warn(
                f"AutoResume: these values changed in this fit, and cannot be saved: {list_names(new, 20)}. A resumed "
                "run starts with their initial values, or the contents of a memory-mapped file. Keep plain values, "
                "tensors or objects with a state_dict there, or save them in on_save_checkpoint."
            )

    def _why_not_loadable(self, checkpoint: Mapping[str, Any], path: Path) -> str:
        """Return why a checkpoint that was just written could not be resumed, each reason once; or nothing."""
        arguments, others = map(object_pickle, split_arguments(checkpoint))
        if not others and arguments == self._known_arguments:
            return ""
        try:
            reasons = find_objects(load_plain_data(path))
            self._known_arguments = arguments  # they do no harm
        except CheckpointError as error:
            reasons = [str(error)]
        new = self._not_yet_reported(reasons)
        if not new:
            return ""
        return (
            f"AutoResume: {'; '.join(new)}. AutoResume does not resume from a checkpoint that contains objects, as "
            "that would run code of the file. Save plain values and tensors, such as float(x) or x.tolist(), or set "
            "AutoResume(..., allow_pickle=True)."
        )

    def _not_yet_reported(self, phrases: Sequence[str]) -> list[str]:
        new = [phrase for phrase in phrases if phrase not in self._reported]
        self._reported.update(new)
        return new


class DurableCheckpointIO(TorchCheckpointIO):
    """Write checkpoints like `TorchCheckpointIO`, but atomically: a local file is complete at any moment.

    Paths of remote file systems (`s3://...`) are written as by `TorchCheckpointIO`.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(plugins=[DurableCheckpointIO()], accelerator="cpu", logger=False)
    """

    def save_checkpoint(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any | None = None) -> None:
        """Write a checkpoint as `save_durably` does, without a digest."""
        check_path("path", path, "a checkpoint", takes_address=True)
        if storage_options is not None or "://" in str(path):
            super().save_checkpoint(checkpoint, path, storage_options)
            return
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        flush = ("file", "directory")
        write_atomically(path, lambda stream: torch.save(checkpoint, stream), flush=flush, hashes=False)


@contextmanager
def durable_checkpoints(strategy: Strategy) -> Iterator[None]:
    """Let a strategy write its checkpoints by a `DurableCheckpointIO` until the context is left.

    It takes the place of Lightning's own `TorchCheckpointIO`; another innermost CheckpointIO, such as a user's, stays.
    """
    if type(checkpoint_ios(strategy)[-1]) is not TorchCheckpointIO:
        yield
        return
    with checkpoint_io_inserted(strategy, lambda _: DurableCheckpointIO(), innermost=True):
        yield
