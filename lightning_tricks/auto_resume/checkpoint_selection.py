"""Which checkpoint a fit resumes, and why a checkpoint is refused."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn

from lightning_tricks.auto_resume.core.manifests import Manifest, NewerFormatError, differences
from lightning_tricks.auto_resume.core.safe_loading import find_objects, load_plain_data
from lightning_tricks.auto_resume.run_files import RunFiles, raise_for_problem
from lightning_tricks.auto_resume.run_identity import run_identity, shape_differences
from lightning_tricks.auto_resume.unsafe_objects import describe_object
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError

if TYPE_CHECKING:
    from lightning_tricks.auto_resume.callback import AutoResume


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

    def __init__(self, settings: AutoResume, trainer: Trainer, module: LightningModule, run_files: RunFiles) -> None:
        self.settings, self.trainer, self.module, self.run_files = settings, trainer, module, run_files
        self.folder = run_files.folder
        self.identity: Mapping[str, Any] = run_identity(module, os.environ.get("PL_GLOBAL_SEED"))

    def newest(self, user_path: str | os.PathLike[str] | None) -> tuple[Manifest, Path] | None:
        """Return the newest complete checkpoint of this run, the same on all ranks; None if there is none.

        Args:
            user_path: The `ckpt_path` that the user gave to the Trainer, or that Lightning found. If it is newer, and
                this run did not write it, None is returned.

        Raises:
            MisconfigurationException: If the folder holds checkpoints of another run or of a newer release.
        """
        manifest, problem = None, ""
        if self.trainer.is_global_zero:
            try:
                with self.run_files.noting_problems():
                    manifest = self.folder.newest(lambda sentence: rank_zero_warn(f"AutoResume: {sentence}"))
                problem = self.run_files.problem
            except NewerFormatError as error:
                problem = f"AutoResume: {error}"
            if user_path is not None and not problem and self._is_taken(Path(user_path), manifest):
                manifest = None
        manifest, problem = self.trainer.strategy.broadcast((manifest, problem))
        raise_for_problem(problem)
        if manifest is None:
            return None
        path = self.folder.path / manifest.file
        self._check_same_run(manifest, path)
        return manifest, path

    def load(self, path: Path, *, mmap: bool = False) -> dict[str, Any]:
        """Read a checkpoint; without `allow_pickle` as plain data.

        Raises:
            MisconfigurationException: If the file holds objects that are not plain data, or cannot be read.
        """
        if self.settings.allow_pickle:
            checkpoint: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
            return checkpoint
        checkpoint = _load_plain_data_or_raise(path, mmap=mmap)
        for key_path, kind in find_objects(checkpoint).items():
            raise MisconfigurationException(
                f"AutoResume: {describe_object(self.trainer, self.module, key_path, kind)} in {path}. Objects are not "
                "restored, as that would run code of the file. If nobody else writes to that directory, "
                "AutoResume(..., allow_pickle=True) restores them."
            )
        return checkpoint

    def _is_taken(self, user_path: Path, manifest: Manifest | None) -> bool:
        """Return whether the user's checkpoint is resumed, and log which one is.

        What this run wrote itself is resumed exactly from its own checkpoints alone.
        """
        position = _position(user_path)
        is_ours = position in self.run_files.written_states(of_all_fits=manifest is not None)
        if manifest is None:
            if is_ours:
                rank_zero_warn(
                    f"AutoResume: this run wrote {str(user_path)!r} before its own first save, and resumes from it as "
                    "Lightning does, which is not exact. To start again instead, remove the file."
                )
            return True
        newer = user_path.exists() and user_path.stat().st_mtime > manifest.written
        if newer and (is_ours or position is None):
            why = "was written by this run" if is_ours else "cannot be read"
            rank_zero_info(f"AutoResume: {str(user_path)!r} {why}, and {manifest.file!r} is resumed instead.")
            return False
        which, other = (str(user_path), manifest.file) if newer else (manifest.file, str(user_path))
        rank_zero_info(f"AutoResume: {which!r} is newer than {other!r} and is resumed.")
        return newer

    def _check_same_run(self, manifest: Manifest, path: Path) -> None:
        found = differences(manifest.run, self.identity)
        shapes = [phrase for phrase in found if phrase.startswith("parameters was")]
        if shapes:
            found.remove(shapes[0])
            found += shape_differences(self.module, _load_plain_data_or_raise(path)["state_dict"])
        if not found:
            return
        problem = f"{self.folder.path} holds checkpoints of another run: {'; '.join(found)}."
        if not self.settings.force:
            raise MisconfigurationException(
                f"AutoResume: {problem} Choose another dirpath to start a new run, or force=True to resume this one."
            )
        rank_zero_warn(f"AutoResume(force=True): {problem} The run resumes from them.")


def _position(path: Path) -> tuple[Any, Any] | None:
    """Return epoch and step of a checkpoint that anybody may have written; None if it cannot be read."""
    try:
        checkpoint = load_plain_data(path, mmap=True)
        return checkpoint["epoch"], checkpoint["global_step"]
    except Exception:  # of the file system, of torch, or of a file that is something else
        return None


def _load_plain_data_or_raise(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    try:
        return load_plain_data(path, mmap=mmap)
    except CheckpointError as error:
        raise MisconfigurationException(f"AutoResume: {error}") from error
