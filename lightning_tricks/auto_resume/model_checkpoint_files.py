"""The checkpoints that others write in a run: they name it, and a resumed one writes and removes them as before."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from lightning_tricks._lightning_compat.checkpoints import writes_folders
from lightning_tricks._lightning_compat.flavor import ModelCheckpoint, Trainer, rank_zero_warn
from lightning_tricks._lightning_compat.guards import overriding
from lightning_tricks._lightning_compat.trainer import callbacks_of_type
from lightning_tricks._shared.checks import is_address
from lightning_tricks._shared.files import MAIN_FILE, PARTIAL_SUFFIX
from lightning_tricks.auto_resume.core.checkpoint_contents import load_plain_data
from lightning_tricks.auto_resume.core.checkpoint_folder import CHECKPOINT_KEY, main_file

ORIGIN_KEY = "auto_resume_run"  # of what a checkpoint says of the run that wrote it


@dataclass(frozen=True)
class Origin:
    """What a checkpoint says of the run that wrote it.

    Attributes:
        run: The run's id; empty where no run of AutoResume wrote the checkpoint.
        start: A token of the start of the script.
        fit: Number of the fit among those of the run.
        save: Number of the last complete save of AutoResume; 0 before the first one.
    """

    run: str = ""
    start: str = ""
    fit: int = 1
    save: int = 0


def read_origin(path: str | os.PathLike[str]) -> Origin | None:
    """Return what a checkpoint says of the run that wrote it, without its tensors; None if it cannot be read.

    A checkpoint may be a folder of shards. Nothing is read at an address, nor from a pipe or a device.
    """
    file = main_file(Path(path))
    if not file.is_file():  # a pipe would wait for a writer
        return None
    try:
        entry = load_plain_data(file).get(ORIGIN_KEY, {})
        origin = Origin(**entry)
    except TypeError:  # an entry of somebody else
        return Origin()
    except Exception:  # of the file system, of torch, or of a file that is something else
        return None
    # A dataclass checks no types, and a file is not trusted.
    return origin if list(map(type, vars(origin).values())) == [str, str, int, int] else Origin()


class ModelCheckpointFiles:
    """Lets ModelCheckpoint write and remove in a resumed fit what it would in one that was never stopped.

    Each checkpoint that the strategy saves in the fit says by which start of the run, and after which save of
    AutoResume, it was written. What another start wrote after the save that is resumed counts as absent: the steps are
    repeated, and write it again under the same name. What is removed, and was there at the last save, is removed after
    the next one: a resumed fit finds the files that its state names.

    Args:
        trainer: The Trainer of the fit.
        origin: What is written into the checkpoints; empty on other ranks than zero.
        await_save: Waits for a save of AutoResume that is being written: what is written now belongs to the next one.

    Attributes:
        origin: What is written into the checkpoints now.
        continued: The starts whose saves this one continues -> number of the save at which the next start took over;
            empty at the start of the fit, None if nothing is repeated.
    """

    def __init__(self, trainer: Trainer, origin: Origin, await_save: Callable[[], object]) -> None:
        self.trainer, self.origin, self.await_save = trainer, origin, await_save
        self.continued: Mapping[str, int] | None = None
        self._made_after: dict[Path, float] = {}  # path -> number of the save after which this start made the file
        self._put_off: set[Path] = set()  # what is removed after the next save
        self._remove: Callable[[Any], object] = trainer.strategy.remove_checkpoint

    @contextmanager
    def observed(self) -> Iterator[None]:
        """Observe the strategy and each ModelCheckpoint until the context is left, on all ranks."""
        strategy, is_writer = self.trainer.strategy, self.trainer.is_global_zero
        save, remove = strategy.save_checkpoint, strategy.remove_checkpoint

        def save_checkpoint(checkpoint: dict[str, Any], filepath: Any, *args: Any, **kwargs: Any) -> None:
            if is_writer:
                self._before_save(checkpoint, filepath)
            save(checkpoint, filepath, *args, **kwargs)

        def remove_checkpoint(filepath: Any) -> None:
            if not (is_writer and self._puts_off(filepath)):
                remove(filepath)

        # Where a name is taken, ModelCheckpoint takes `name-v1` (`_get_metric_interpolated_filepath_name`): the
        # repeated steps would write each file a second time, and `best_model_path` be another than in a run that was
        # not stopped.
        def file_exists(exists: Callable[..., bool], filepath: Any, trainer: Trainer) -> bool:
            if is_writer:
                self.await_save()  # which may remove the file
            if not exists(filepath, trainer):
                return False
            # All ranks have to choose the same name.
            return not trainer.strategy.broadcast(is_writer and self.counts_as_absent(filepath))

        with (
            ExitStack() as stack,
            overriding(strategy, save_checkpoint=save_checkpoint, remove_checkpoint=remove_checkpoint),
        ):
            for callback in callbacks_of_type(self.trainer, ModelCheckpoint):
                stack.enter_context(overriding(callback, file_exists=partial(file_exists, callback.file_exists)))
            yield

    def _before_save(self, checkpoint: dict[str, Any], filepath: Any) -> None:
        self.await_save()
        checkpoint[ORIGIN_KEY] = vars(self.origin)
        if is_address(filepath):
            return
        path = _absolute(filepath)
        self._put_off.discard(path)
        if path not in self._made_after:
            for staged in path.parent.glob(f".{glob.escape(path.name)}.{'?' * 16}{PARTIAL_SUFFIX}"):
                staged.unlink(missing_ok=True)  # of a killed process, as this one has not written that name yet
        if not os.path.lexists(path):
            self._made_after[path] = self.origin.save
        # It was there before this start, which may not remove it at once.
        self._made_after.setdefault(path, -1)
        if writes_folders(self.trainer.strategy) and not path.is_file():
            path.mkdir(parents=True, exist_ok=True)  # a kill leaves a folder that can be told apart
            torch.save({ORIGIN_KEY: vars(self.origin)}, path / MAIN_FILE)

    def _puts_off(self, filepath: Any) -> bool:
        """Whether a file is removed after the next save, as it was there at the last one."""
        self.await_save()
        path = _absolute(filepath)
        # Made since the last save: no saved state names it, and a resumed run writes it again.
        if is_address(filepath) or path.is_symlink() or self._made_after.get(path) == self.origin.save:
            return False
        self._put_off.add(path)
        return True

    def counts_as_absent(self, filepath: Any) -> bool:
        """Whether a file was removed, or another start wrote it in the steps that are repeated.

        The latter made a link that no ModelCheckpoint knows, even if what it leads to is written again already.
        """
        if is_address(filepath):
            return False
        path = _absolute(filepath)
        if path in self._put_off:
            return True
        origin = read_origin(path)
        if origin is None or origin.run != self.origin.run:
            return False
        # A later fit of the run, after the one that is resumed, is repeated with it.
        if origin.fit != self.origin.fit:
            return origin.fit > self.origin.fit
        if self.continued is None:
            return False
        if origin.start == self.origin.start:
            known = [_absolute(one.last_model_path) for one in callbacks_of_type(self.trainer, ModelCheckpoint)]
            return path.is_symlink() and path not in known
        return origin.save >= self.continued.get(origin.start, 0)

    def on_save(self, number: int) -> None:
        """Note that a save of AutoResume is complete, and remove what was put off."""
        self.origin = replace(self.origin, save=number)
        while self._put_off:
            self._remove(str(self._put_off.pop()))


def carry_over(trainer: Trainer, checkpoint: Mapping[str, Any]) -> None:
    """Let each ModelCheckpoint keep what it knows where its folder has another name than before, such as a date.

    Lightning would drop the scores, and another checkpoint would be the best.

    Args:
        trainer: The Trainer of the fit.
        checkpoint: What is resumed; the states in it are changed.
    """
    for callback in callbacks_of_type(trainer, ModelCheckpoint):
        if is_address(callback.dirpath):
            rank_zero_warn(
                f"AutoResume: {callback.dirpath} is an address, where checkpoints of repeated steps are not removed: "
                "all that the run wrote stays."
            )
        key, ranks = callback.state_key, checkpoint[CHECKPOINT_KEY]["ranks"]
        of_ranks = [rank["callbacks"].get(key, {}).get("state_dict") for rank in ranks]
        states = [checkpoint["callbacks"].get(key), *of_ranks]
        for state in filter(None, states):
            # `ModelCheckpoint.load_state_dict` drops scores and paths where the folder is another one (#12045), as in a
            # requeued run of Hydra, whose folders have the time in their names.
            before, state["dirpath"] = state["dirpath"], callback.dirpath
            if state is states[0] and before != callback.dirpath:
                rank_zero_warn(
                    f"AutoResume: ModelCheckpoint now writes to {callback.dirpath}; its checkpoints in {before} stay "
                    "there and still count. Give ModelCheckpoint a fixed dirpath to keep all of them in one folder."
                )
        best = states[0] and states[0]["best_model_path"]
        if best and not is_address(best) and not os.path.lexists(best):
            rank_zero_warn(
                f"AutoResume: the best checkpoint {best} is gone: ckpt_path='best' fails until there is a better one."
            )


def _absolute(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.abspath(path))  # noqa: PTH100 - resolves no links
