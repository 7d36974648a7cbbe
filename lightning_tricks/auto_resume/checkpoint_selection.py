"""Which checkpoint a fit resumes, and why a checkpoint is refused."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.sharded import is_sharding
from lightning_tricks._shared.patterns import name_as_in_
from lightning_tricks._shared.shards import put_shards, shape_of
from lightning_tricks._shared.text import describe_error, list_names
from lightning_tricks.auto_resume.core.checkpoint_contents import KeptCheckpoint, find_objects, load_plain_data
from lightning_tricks.auto_resume.core.checkpoint_folder import CHECKPOINT_KEY, Manifest, UnusableFolderError, main_file
from lightning_tricks.auto_resume.core.tensor_block import unpack
from lightning_tricks.auto_resume.model_checkpoint_files import carry_over
from lightning_tricks.auto_resume.parts import Settings
from lightning_tricks.auto_resume.run_files import RunFiles, raise_for_problem, run_identity
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError


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
        self._announce: Callable[[], object] = lambda: None

    def newest(self, user_path: str | os.PathLike[str] | None) -> tuple[Manifest, Path] | None:
        """Return the newest complete checkpoint of this run, the same on all ranks; None if there is none.

        Args:
            user_path: The `ckpt_path` that the user gave to the Trainer, or that Lightning found.

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
            if user_path is not None and not problem:
                self._note_given(user_path, manifest)
        manifest, problem = self.trainer.strategy.broadcast((manifest, problem))
        raise_for_problem(problem)
        self.run_files.begin_on_nodes(manifest)
        if manifest is None:
            return None
        path = self.folder.path_of(manifest)
        self._check_same_parameters(manifest, path)
        return manifest, path

    def announce(self) -> None:
        """Say what was chosen; to be called after all that may refuse it."""
        self._announce()
        self._announce = lambda: None

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
                f"AutoResume: {path} was saved without shards, and {strategy} restores shards. Resume with the "
                "strategy of the run, or start a new run in another dirpath; load_weights can load the weights."
            )
        stream, self._stream = self._stream or main_file(path).open("rb"), None
        with stream:
            if self.settings.allow_pickle:
                checkpoint: dict[str, Any] = torch.load(stream, map_location="cpu", weights_only=False)
            else:
                checkpoint = _load_plain_data_or_raise(main_file(path), stream)
                _check_plain(checkpoint, path)
        try:
            entry = checkpoint[CHECKPOINT_KEY]
            entry |= {"shared": unpack(entry["shared"]), "ranks": [*map(unpack, entry["ranks"])]}
            if path.is_dir():
                checkpoint = put_shards(checkpoint, path, self.module)
        except Exception as error:
            raise MisconfigurationException(f"AutoResume: {path} cannot be read: {describe_error(error)}.") from error
        if not path.is_dir():
            name_as_in_(checkpoint["state_dict"], self.module.state_dict())
        carry_over(self.trainer, checkpoint)
        return checkpoint

    def _note_given(self, user_path: str | os.PathLike[str], manifest: Manifest | None) -> None:
        """Note what is said of a checkpoint that the user gave: it is resumed if the run has none of its own."""
        if manifest is not None:
            others = f"the run resumes from {manifest.file!r}, not from {str(user_path)!r}"
            self._announce = partial(
                rank_zero_info, f"AutoResume: {others}. To start from the latter, choose another dirpath."
            )
        elif self.run_files.fit_that_wrote(user_path) == self.run_files.others.origin.fit:
            self._announce = partial(
                rank_zero_warn,
                f"AutoResume: this run wrote {str(user_path)!r} before its own first save, and resumes from it as "
                "Lightning does, which is not exact. To start again instead, remove the file.",
            )

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
                f"AutoResume: {self.folder.path} contains checkpoints of another model: {'; '.join(found)}. Choose "
                "another dirpath to start a new run; load_weights loads the weights that fit."
            )


def _load_plain_data_or_raise(path: Path, stream: IO[bytes] | None) -> dict[str, Any]:
    try:
        return load_plain_data(path, stream)
    except CheckpointError as error:
        raise MisconfigurationException(f"AutoResume: {error}") from error


def _check_plain(checkpoint: Mapping[str, Any], path: Path) -> None:
    if found := find_objects(checkpoint):
        raise MisconfigurationException(
            f"AutoResume: {list_names(found, 3)} in {path}. Objects are not restored, as that would run code of "
            "the file. If only you write to that directory, AutoResume(..., allow_pickle=True) restores them."
        )


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
