"""Which checkpoint a fit resumes, and why a checkpoint is refused."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    is_overridden,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.sharded import is_sharding
from lightning_tricks._lightning_compat.trainer import callbacks_of, datamodule_of
from lightning_tricks._shared.checks import is_address
from lightning_tricks._shared.patterns import name_as_in_
from lightning_tricks._shared.text import describe_error
from lightning_tricks.auto_resume.core.checkpoint_folder import Manifest, UnusableFolderError, main_file
from lightning_tricks.auto_resume.core.safe_loading import KeptCheckpoint, find_objects, load_plain_data
from lightning_tricks.auto_resume.core.shards import put_shards, shape_of
from lightning_tricks.auto_resume.model_checkpoint_files import carry_over
from lightning_tricks.auto_resume.parts import Settings
from lightning_tricks.auto_resume.run_files import RunFiles, raise_for_problem, run_identity
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError

_TRAINER_ENTRIES = {
    "state_dict": "the state_dict of {module}",
    "optimizer_states": "the state_dict of an optimizer",
    "lr_schedulers": "the state_dict of a learning rate scheduler",
    "loops": "the state_dict of a data loader",
}


class CheckpointSelection:
    """Selects the checkpoint that a fit resumes, and reads it.

    Args:
        settings: The callback, with the user's choices.
        trainer: The Trainer of the fit.
        module: The module that is trained, as it is before anything is restored.
        run_files: The files of the run, with the folder of this fit's checkpoints.

    Attributes:
        identity: What distinguishes this run from others; it is saved in each manifest.
    """

    def __init__(self, settings: Settings, trainer: Trainer, module: LightningModule, run_files: RunFiles) -> None:
        self.settings, self.trainer, self.module, self.run_files = settings, trainer, module, run_files
        self.folder = run_files.folder
        self.identity: Mapping[str, Any] = run_identity(module)
        self._stream: IO[bytes] | None = None  # the file of the newest checkpoint, until it is read
        self._kept: KeptCheckpoint | None = None
        self._announcement: tuple[Callable[[str], object], str] | None = None

    def newest(self, user_path: str | os.PathLike[str] | None) -> tuple[Manifest, Path] | None:
        """Return the newest complete checkpoint of this run, the same on all ranks; None if there is none.

        Args:
            user_path: The `ckpt_path` that the user gave to the Trainer, or that Lightning found. If it is newer, and
                this run did not write it, None is returned.

        Raises:
            MisconfigurationException: If the folder holds checkpoints of another model or of another release, or
                that cannot be read.
        """
        manifest, problem = None, ""
        if self.trainer.is_global_zero:
            try:
                with self.run_files.noting_problems():
                    newest = self.folder.open_newest(lambda sentence: rank_zero_warn(f"AutoResume: {sentence}"))
                    manifest, self._stream = newest or (None, None)
                problem = self.run_files.problem
            except UnusableFolderError as error:
                problem = f"AutoResume: {error}"
            if user_path is not None and not problem and self._is_taken(user_path, manifest):
                manifest = self._stream = None
        manifest, problem = self.trainer.strategy.broadcast((manifest, problem))
        raise_for_problem(problem)
        if manifest is None:
            return None
        path = self.folder.path_of(manifest)
        self._check_same_parameters(manifest, path)
        return manifest, path

    def announce(self) -> None:
        """Say what was chosen; to be called after all that may refuse it."""
        if self._announcement is not None:
            say, sentence = self._announcement
            say(sentence)
        self._announcement = None

    def load(self, path: Path) -> dict[str, Any]:
        """Return a copy of the checkpoint that `loaded` returns, which hooks may change."""
        checkpoint = self.loaded(path)
        return dict(checkpoint) if self._kept is None else self._kept.copy()

    def loaded(self, path: Path) -> Mapping[str, Any]:
        """Return a checkpoint, which is read once; again only if what was read may have been changed.

        Without `allow_pickle` it is read as plain data.

        Raises:
            MisconfigurationException: If the file holds objects that are not plain data, or cannot be read.
        """
        if self._kept is None or not self._kept.is_intact:
            checkpoint, self._kept = KeptCheckpoint(self._read(path)), None
            if not checkpoint.is_intact:
                return checkpoint.values
            self._kept = checkpoint
        return self._kept.values

    def forget(self) -> None:
        """Release what was read."""
        self._kept = None

    def _read(self, path: Path) -> dict[str, Any]:
        if is_sharding(self.trainer.strategy) and not path.is_dir():
            strategy = type(self.trainer.strategy).__name__
            raise MisconfigurationException(
                f"AutoResume: {path} was saved whole, and {strategy} restores shards. Resume with the strategy of the "
                "run, or start anew in another dirpath; load_weights takes its weights."
            )
        stream, self._stream = self._stream or main_file(path).open("rb"), None
        with stream:
            if self.settings.allow_pickle:
                checkpoint: dict[str, Any] = torch.load(stream, map_location="cpu", weights_only=False)
            else:
                checkpoint = _load_plain_data_or_raise(main_file(path), stream)
                self._check_plain(checkpoint, path)
        if path.is_dir():
            try:
                checkpoint = put_shards(checkpoint, path, self.module)
            except Exception as error:
                raise MisconfigurationException(
                    f"AutoResume: {path} cannot be read: {describe_error(error)}."
                ) from error
        else:
            name_as_in_(checkpoint["state_dict"], self.module.state_dict())
        carry_over(self.trainer, checkpoint)
        return checkpoint

    def _check_plain(self, checkpoint: Mapping[str, Any], path: Path) -> None:
        for key_path, kind in find_objects(checkpoint).items():
            raise MisconfigurationException(
                f"AutoResume: {describe_object(self.trainer, self.module, key_path, kind)} in {path}. Objects are not "
                "restored, as that would run code of the file. If nobody else writes to that directory, "
                "AutoResume(..., allow_pickle=True) restores them."
            )

    def _is_taken(self, user_path: str | os.PathLike[str], manifest: Manifest | None) -> bool:
        """Return whether the user's checkpoint is resumed, and note what is to be said of it.

        What this run wrote itself is resumed exactly from its own checkpoints alone.
        """
        is_ours = self.run_files.fit_that_wrote(user_path)
        given, is_taken = repr(str(user_path)), False
        say: Callable[[str], object] = rank_zero_info
        if manifest is None:
            is_taken, say = True, rank_zero_warn
            said = is_ours == self.run_files.others.origin.fit and (
                f"this run wrote {given} before its own first save, and resumes from it as Lightning does, which is "
                "not exact. To start again instead, remove the file."
            )
        elif isinstance(time := _time_written(user_path), str):
            say = rank_zero_warn
            said = (
                f"it cannot be known when {given} was written ({time}), so {manifest.file!r} is resumed. To resume the "
                "other one, choose another dirpath."
            )
        elif time <= manifest.written:
            said = f"{manifest.file!r} is newer than {given} and is resumed."
        elif is_ours or (is_ours is None and not is_address(user_path)):
            why = "was written by this run" if is_ours else "cannot be read"
            said = f"{given} {why}, and {manifest.file!r} is resumed instead."
        else:
            is_taken, said = True, f"{given} is newer than {manifest.file!r} and is resumed."
        self._announcement = (say, f"AutoResume: {said}") if said else None
        return is_taken

    def _check_same_parameters(self, manifest: Manifest, path: Path) -> None:
        if manifest.run.get("parameters") == self.identity["parameters"]:
            return
        saved = _load_plain_data_or_raise(main_file(path), self._stream)["state_dict"]
        name_as_in_(saved, self.module.state_dict())
        found = _shape_differences(self.module, saved)
        if self._stream is not None:
            self._stream.seek(0)
        if found:
            raise MisconfigurationException(
                f"AutoResume: {self.folder.path} holds checkpoints of another model: {'; '.join(found)}. Choose "
                "another dirpath to start a new run; load_weights takes those weights of it that fit."
            )


def _time_written(path: str | os.PathLike[str]) -> float | str:
    """Return when a checkpoint was written, in seconds since the epoch; or why that is unknown."""
    from fsspec.core import url_to_fs

    try:
        files, name = url_to_fs(str(path))
        return float(files.modified(name).timestamp())
    except FileNotFoundError:
        return -math.inf
    except Exception as error:  # of one of fsspec's many libraries
        return describe_error(error)


def _load_plain_data_or_raise(path: Path, stream: IO[bytes] | None) -> dict[str, Any]:
    try:
        return load_plain_data(path, stream)
    except CheckpointError as error:
        raise MisconfigurationException(f"AutoResume: {error}") from error


def describe_object(trainer: Trainer, module: LightningModule, key_path: Sequence[str], kind: str) -> str:
    """Return a phrase such as "the state_dict of X saved a Y (checkpoint['a'])" about an object in a checkpoint."""
    subscripts = "".join(f"[{key!r}]" for key in key_path)
    return f"{_describe_owner(trainer, module, key_path)} saved a {kind} (checkpoint{subscripts})"


def _describe_owner(trainer: Trainer, module: LightningModule, key_path: Sequence[str]) -> str:
    key = key_path[0]
    if key in _TRAINER_ENTRIES:
        return _TRAINER_ENTRIES[key].format(module=type(module).__name__)
    callbacks = callbacks_of(trainer)
    if key == "callbacks":
        owners = [type(callback).__name__ for callback in callbacks if callback.state_key == key_path[1]]
        return f"the state_dict of {' or '.join(owners) or key_path[1]}"
    datamodule = datamodule_of(trainer)
    if datamodule is not None and key == type(datamodule).__qualname__:
        return f"the state_dict of {key}"
    hook_owners = [
        type(part).__name__
        for part in (module, datamodule, *callbacks)
        if part is not None and is_overridden("on_save_checkpoint", part) and not isinstance(part, TrickCallback)
    ]
    return f"on_save_checkpoint of {' or '.join(hook_owners) or 'a hook'}"


def _shape_differences(module: nn.Module, saved: Mapping[str, Any], max_names: int = 5) -> list[str]:
    """Return a phrase for each parameter in which a module differs from a saved state dict."""
    own = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    found = [
        f"{name} has shape {shape} in this run and {shape_of(saved[name]) if name in saved else 'is missing'} "
        "in the checkpoint"
        for name, shape in own.items()
        if name not in saved or shape_of(saved[name]) != shape
    ]
    mine = module.state_dict().keys()
    found += [f"{name} is in the checkpoint only" for name in saved if name not in mine]
    return [*found[:max_names], *([f"and {len(found) - max_names} more"] if len(found) > max_names else [])]
