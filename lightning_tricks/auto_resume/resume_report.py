"""What differs after a resume from what was saved, and the warning that names it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.fit import dump_checkpoint
from lightning_tricks._lightning_compat.trainer import callbacks_of
from lightning_tricks._shared.ranks import gather_objects
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks._shared.text import list_names
from lightning_tricks.auto_resume.core.attributes.encoding import differing_paths
from lightning_tricks.auto_resume.core.attributes.uncheckpointed_structure import differing_parts
from lightning_tricks.auto_resume.core.manifests import CHECKPOINT_KEY
from lightning_tricks.auto_resume.pending_resume import PendingResume
from lightning_tricks.auto_resume.rank_state import REPLACED_MODULE_SUFFIX, RankState

# Parts of a rank's state that are compared, and entries of a checkpoint that are not, as each save writes new ones
_COMPARED_RANK_STATES = ("rng", "trainer", "buffers", "gradients", "callbacks")
_NOT_COMPARED_ENTRIES = (
    CHECKPOINT_KEY,
    "epoch",
    "global_step",
    "loops",
    "pytorch-lightning_version",
    "hparams_name",
    "hyper_parameters",
    "datamodule_hyper_parameters",
)


def find_differences(
    trainer: Trainer, rank: RankState, pending: PendingResume, load_saved: Callable[[], Mapping[str, Any]]
) -> list[str]:
    """Return the key paths of what is not as it was saved, on this rank; all ranks have to call it.

    Args:
        trainer: The Trainer of the fit.
        rank: The state of this rank, restored.
        pending: What was to be restored.
        load_saved: Returns the checkpoint as it was read.
    """
    saved, now = pending.rank_state, rank.capture()
    skipped = ("callbacks",) if pending.world_size_changed else ()
    compared = [name for name in _COMPARED_RANK_STATES if name in saved and name not in skipped]
    found = [*rank.failed, *_differing_attributes(saved, now)]
    found += differing_paths({name: saved[name] for name in compared}, now)
    found += _differences_from_checkpoint(trainer, load_saved)
    found += differing_parts(saved.get("outline", {}), now["outline"])
    recreated_by_hooks = {path for path in rank.unsaved_names(now) if path.endswith(REPLACED_MODULE_SUFFIX)}
    return [*found, *(path for path in saved["not_saved"] if path not in recreated_by_hooks)]


def report_differences(
    trainer: Trainer, key_paths: Sequence[str], drawn_anew: Sequence[str], data_differences: Sequence[str]
) -> None:
    """Warn of what is not as it was saved on any rank, and tell the callbacks; all ranks have to call it.

    Args:
        trainer: The Trainer of the fit.
        key_paths: What was not restored, as `find_differences` returns it.
        drawn_anew: The attributes that had other values in the stopped run, and were not saved.
        data_differences: A sentence for each loader whose data are others.
    """
    ranks = gather_objects((key_paths, drawn_anew, data_differences))
    names, drawn, sentences = (list(dict.fromkeys(one for parts in ranks for one in parts[part])) for part in range(3))
    for callback in callbacks_of(trainer):
        if isinstance(callback, TrickCallback):
            callback.resumed(trainer, [*names, *drawn, *("the data" for _ in sentences[:1])])
    if drawn:
        sentences.append(
            f"these attributes had other values in the stopped run: {list_names(drawn, 5)}. They come from "
            "random numbers without a seed, or from code or arguments that have changed. Call seed_everything before "
            "the module is created, or keep them in a state_dict, as register_buffer does."
        )
    if names:
        sentences.append(
            f"these values were not restored: {list_names(names, 5)}. The run continues and may diverge from the one "
            "that was never stopped. Keep values in a state_dict, or in on_save_checkpoint and on_load_checkpoint. "
            "Change other things, such as hooks, in on_train_epoch_start, which a resumed run calls again."
        )
    for sentence in sentences:
        rank_zero_warn(f"AutoResume: {sentence}")


def _differences_from_checkpoint(trainer: Trainer, load_saved: Callable[[], Mapping[str, Any]]) -> list[str]:
    """Return where the checkpoint that the Trainer would write now differs from the saved one."""
    with isolated_rng():  # hooks may draw random numbers
        checkpoint = dump_checkpoint(trainer)
    if not trainer.is_global_zero:
        return []
    saved: Mapping[str, Any] = {}
    with suppress(MisconfigurationException):  # somebody may have overwritten the file since it was read
        saved = load_saved()
    compared = {name: value for name, value in saved.items() if name not in _NOT_COMPARED_ENTRIES}
    timers = tuple(f"callbacks.{one.state_key}." for one in callbacks_of(trainer) if isinstance(one, Timer))
    return [path for path in differing_paths(compared, checkpoint) if not path.startswith(timers)]


def _differing_attributes(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[str]:
    """Yield the attributes that changed in both processes, and to different values."""
    saved_changes, present_changes = (state["attributes"]["values"] for state in (saved, now))
    for path in saved_changes.keys() & present_changes.keys():
        value = saved_changes[path]["value"]
        is_clock = isinstance(value, dict) and value.get("kind") == "clock"  # readings of a clock are not restored
        if not is_clock and any(True for _ in differing_paths(value, present_changes[path]["value"])):
            yield path
