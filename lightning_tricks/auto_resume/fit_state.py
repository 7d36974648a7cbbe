"""The state of a fit beside the Trainer's own checkpoint: its parts, in which order they are restored, and a report.

What hooks of an epoch's start set outside the model is restored by calling them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from typing import Any

from torch import Tensor

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.fit import dump_checkpoint, repeat_epoch_start_hooks
from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    Timer,
    Trainer,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.sharded import is_sharding
from lightning_tricks._lightning_compat.trainer import callbacks_of, callbacks_of_type
from lightning_tricks._shared.patterns import name_as_in_
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks._shared.tensors import gather_objects, is_sharded
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.tensors import tensor_version
from lightning_tricks.auto_resume.attribute_parts import AttributeOwners, Attributes, DatasetHolders
from lightning_tricks.auto_resume.core.attributes.attribute_access import patched
from lightning_tricks.auto_resume.core.attributes.encoding import differing_paths
from lightning_tricks.auto_resume.core.attributes.model_structure import restore_param_groups
from lightning_tricks.auto_resume.core.checkpoint_folder import CHECKPOINT_KEY
from lightning_tricks.auto_resume.loader_tracker import LoaderTracker
from lightning_tricks.auto_resume.model_checkpoint_files import ORIGIN_KEY
from lightning_tricks.auto_resume.model_parts import (
    ORDER_OF_SUMS,
    BucketOrder,
    Communication,
    Gradients,
    LeftOutTensors,
    RankTensors,
    Structure,
    UnsavedOutline,
)
from lightning_tricks.auto_resume.parts import Part, Phase, SavedState
from lightning_tricks.auto_resume.run_configuration import RunConfiguration
from lightning_tricks.auto_resume.trainer_parts import (
    CallbackStates,
    LoopResults,
    RandomStates,
    TrainerSettings,
    WeightAveraging,
)

# The loops' results before the attributes: they refer to metrics, whose states are attributes. Tensors after the
# attributes: some belong to metrics that were added. States of callbacks after the weights and buffers that they refer
# to. The configuration, which is what another start changed in optimizers, after the attributes: wrappers of optimizers
# keep old options there. DDP's buckets before the gradients, which may be views of them. The random states last: all
# else may draw.
_STEP = (
    *("trainer", "attributes", "rank_tensors", "buckets", "gradients", "communication", "callbacks", "configuration"),
    "rng",
)
# Weights that hooks left out of the checkpoint after the pruning masks, which replace parameters
_STRUCTURE = ("settings", "structure", "left_out")
# Which parts are restored in a phase, in which order
ORDER: Mapping[Phase, tuple[str, ...]] = {
    # the Trainer loads the optimizers' states next, which have to find the groups that they were saved with
    Phase.FIT_START: ("structure", "settings", "left_out"),
    Phase.LIMITS_GIVEN: ("settings",),
    Phase.LOADERS_CREATED: ("settings",),
    # no batch follows that needs the rest
    Phase.RESULTS: (*_STRUCTURE, "trainer", "attributes", "rank_tensors", "callbacks", "averaging"),
    # code that creates loaders may have set attributes
    Phase.RESULTS_WITH_LOADERS: ("attributes",),
    # the structure before the attributes: lists of modules have grown, and attributes lie in the new modules
    Phase.BEFORE_HOOKS: ("data_held_by", *_STRUCTURE, "buckets", "attributes"),
    # the hooks may have changed the structure once more, and a scheduler sets learning rates when it is created
    Phase.AFTER_HOOKS: ("averaging", *_STRUCTURE),
    # the loaders first: creating their iterators draws random numbers, and changes what attributes hold
    Phase.BEFORE_BATCH: ("loaders", *_STEP),
    # the same, without hooks that are called again: the next epoch calls its own
    Phase.CONTINUED: ("data_held_by", "loaders", *_STRUCTURE, *_STEP),
    # what another start changed would be a difference from what was saved
    Phase.COMPARED: ("configuration",),
    # the hooks of the end were called again and may have drawn
    Phase.FIT_END: ("averaging", "rng"),
}
_MAX_OF_DATA = 3  # sentences
# Entries of a checkpoint that are not compared, as each save writes new ones
NOT_COMPARED_ENTRIES = (
    CHECKPOINT_KEY,
    ORIGIN_KEY,
    "epoch",
    "global_step",
    "loops",
    "pytorch-lightning_version",
    "hparams_name",
    "hyper_parameters",
    "datamodule_hyper_parameters",
)


class FitState:
    """Captures, restores and compares the parts of a fit's state.

    What has changed is relative to the moment when this object was created, before the hooks of the fit.

    Args:
        trainer: The Trainer of the fit.
        module: The module that is trained.
        loaders: The loaders of the fit.
        configuration: With what the run was started.
    """

    def __init__(
        self, trainer: Trainer, module: LightningModule, loaders: LoaderTracker, configuration: RunConfiguration
    ) -> None:
        self._trainer, self._owners = trainer, AttributeOwners(trainer, module)
        self.settings, self.attributes = TrainerSettings(trainer, module), Attributes(self._owners)
        self.outline = UnsavedOutline(trainer, module)
        parts: tuple[Part, ...] = (
            RandomStates(trainer, module),  # captured before code of the user is called, which may draw
            Structure(trainer, module),
            self.settings,
            LeftOutTensors(trainer, module),
            LoopResults(trainer, module),
            RankTensors(trainer, module),
            BucketOrder(trainer, module),
            Communication(trainer, module),
            Gradients(trainer, module),
            CallbackStates(trainer, module),
            WeightAveraging(trainer, module),
            self.outline,
            DatasetHolders(self._owners, loaders.datasets),
            self.attributes,
            loaders,
            configuration,
        )
        self._parts = {part.name: part for part in parts}
        # Found before the first batch and told after the first step, which may create objects again.
        self._noted: tuple[SavedState, Sequence[str], Sequence[str], Sequence[str]] | None = None

    def note(self, phase: Phase) -> None:
        """Note what there is in a phase; all that has changed up to then is saved, even if it is changed back."""
        for part in self._parts.values():
            part.note(phase)

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Restore the parts of a phase."""
        for name in ORDER[phase]:
            self._parts[name].restore(saved, phase)

    def capture(self) -> dict[str, Any]:
        """Return the state of this rank as tensors on the CPU and plain values; all ranks have to call it."""
        # One walk for all parts: it is most of the time of a save.
        walk, state = self._owners.walk(), dict[str, Any]()
        for part in self._parts.values():
            state |= part.capture(walk)
        return {**state, "not_saved": [name for part in self._parts.values() for name in part.unsaved(state)]}

    def capture_rank_tensors(self) -> dict[str, Any]:
        """Return them once a checkpoint of the Trainer is made, whose hooks may let all ranks have the same ones."""
        return self._parts[RankTensors.name].capture(self._owners.walk())

    def capture_shared(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return what is the same on all ranks and a checkpoint of the Trainer lacks; on rank zero."""
        return {name: value for part in self._parts.values() for name, value in part.capture_shared(checkpoint).items()}

    def replay_epoch_start(self, saved_groups: Sequence[Any], reload_weights: Callable[[], None]) -> None:
        """Call `on_train_epoch_start` of callbacks and module, and undo its changes to state that was restored already.

        The calls are for what the hooks set outside the model: the epoch of a dataset, the number of accumulated
        batches, a part of the Trainer. Learning rates, momenta and schedulers are restored afterwards, and so are the
        weights and the states of the optimizers if the hooks change them. The random state must be that of the epoch's
        start.

        Args:
            saved_groups: What `param_group_names` returned before the hooks were first called.
            reload_weights: Loads weights and optimizer states from the checkpoint once more.
        """
        trainer, optimizers = self._trainer, self._trainer.optimizers
        groups = [[(group, dict(group)) for group in optimizer.param_groups] for optimizer in optimizers]
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        # A scheduler's `state_dict` of torch holds its own lists and dicts, which hooks may change.
        states = [deepcopy(scheduler.state_dict()) for scheduler in schedulers]
        # A hook may write into weights, as to reset a layer. Versions tell without a copy of the model, which may not
        # fit into the memory of the device.
        before = [(value, tensor_version(value)) for value in self._tensors()]
        # Hooks that unfreeze a layer add its group; with the group there already, torch raises an error ("some
        # parameters appear in more than one parameter group").
        restore_param_groups(self._owners.module, optimizers, saved_groups)
        with ExitStack() as muted:
            for logger in trainer.loggers:  # the values of the epoch's start were logged already
                muted.enter_context(patched(logger, {"log_metrics": lambda *_, **__: None}))
            repeat_epoch_start_hooks(trainer)
        for optimizer, initial_groups in zip(optimizers, groups, strict=True):
            # In place: schedulers and wrappers of optimizers hold the list.
            optimizer.param_groups[:] = [group for group, _ in initial_groups]
            for group, values in initial_groups:
                added = {name: value for name, value in group.items() if name not in values}  # by a new scheduler
                group.clear()
                group.update(values | added)
        for scheduler, state in zip(schedulers, states, strict=True):
            scheduler.load_state_dict(state)
        now = list(self._tensors())
        unchanged = len(now) == len(before) and all(
            value is old and tensor_version(value) == version for value, (old, version) in zip(now, before, strict=True)
        )
        if not unchanged:
            reload_weights()

    def _tensors(self) -> Iterator[Tensor]:
        """Yield parameters, buffers and the tensors of the optimizers' states."""
        yield from self._owners.module.parameters()
        yield from self._owners.module.buffers()
        for optimizer in self._trainer.optimizers:
            for state in optimizer.state.values():
                # Optimizers that are not torch's may keep objects.
                values: Any = state.values() if isinstance(state, dict) else ()
                yield from (value for value in values if isinstance(value, Tensor))

    def differences(self, saved: SavedState, load_saved: Callable[[], Mapping[str, Any]]) -> list[str]:
        """Return the key paths of what is not as it was saved, on this rank; all ranks have to call it.

        Args:
            saved: What was to be restored.
            load_saved: Returns the checkpoint as it was read.
        """
        # What a save would hold now is compared, not what was restored: what a save does not see cannot differ.
        now = self.capture()
        # attributes first, as the user can do most about them
        parts = sorted(self._parts.values(), key=lambda part: part is not self.attributes)
        found = [path for part in parts for path in part.differences(saved, now)]
        found += _differences_from_checkpoint(self._trainer, load_saved)
        changed = [*saved.rank["not_saved"], *saved.rank.get("changed_callbacks", ())]
        return [*found, *(name for name in changed if name not in now["changed_callbacks"])]  # as hooks do it again

    def differences_of_results(self, saved: SavedState) -> list[str]:
        """Return what is not as it was saved of a fit that had finished, whose results alone are restored."""
        others = self.outline.differences(saved, {"outline": self.outline.now()})
        changed = saved.rank.get("changed_callbacks", ())
        return [*self.attributes.failed, *saved.rank["not_saved"], *changed, *others]

    def note_differences(
        self, saved: SavedState, key_paths: Sequence[str], drawn_anew: Sequence[str], of_data: Sequence[str]
    ) -> None:
        """Tell the callbacks what is not as it was saved on any rank, and keep it for `report_differences`.

        All ranks have to call it.

        Args:
            saved: What was to be restored.
            key_paths: What was not restored, as `differences` returns it.
            drawn_anew: The attributes that had other values in the stopped run, and were not saved.
            of_data: A sentence for each difference of a loader.
        """
        by_kind = zip(*gather_objects((key_paths, drawn_anew, of_data)), strict=True)
        names, drawn, sentences = ([*dict.fromkeys(found for rank in kind for found in rank)] for kind in by_kind)
        # Two parts may name one value; the first one knows more of it.
        names = [*{name.partition(" (")[0]: name for name in reversed(names)}.values()][::-1]
        self._noted = saved, names, drawn, sentences
        self._tell_callbacks([*names, *drawn, *("the data" for _ in sentences[:1])])

    def report_differences(self, *, made_step: bool = True) -> None:
        """Warn of what was noted, once for all, except what the first step has created again as it was.

        Without `made_step` something else has ended the fit, and all is said.
        """
        if self._noted is None:
            return
        (saved, names, drawn, sentences), self._noted = self._noted, None
        # Code of a first step, such as a cache that is filled when it is needed, makes objects as they were: no warning
        # of these.
        missing = [name for name in names if not (made_step and self._came_again(saved, name.partition(" (")[0]))]
        if len(missing) < len(names):
            self._tell_callbacks([*missing, *drawn, *("the data" for _ in sentences[:1])])
        for sentence in _as_sentences(missing, drawn, sentences):
            rank_zero_warn(f"AutoResume: {sentence}")

    def _tell_callbacks(self, not_restored: Sequence[str]) -> None:
        for callback in callbacks_of(self._trainer):
            if isinstance(callback, TrickCallback):
                callback.resumed(self._trainer, not_restored)

    def _came_again(self, saved: SavedState, path: str) -> bool:
        """Whether what could not be restored was created again as it was."""
        before, now = saved.rank["attributes"]["values"].get(path), self.attributes.changes()["values"].get(path)
        return bool(before and now) and not any(True for _ in differing_paths(before["value"], now["value"]))


def _as_sentences(names: Sequence[str], drawn: Sequence[str], of_data: Sequence[str]) -> list[str]:
    """Return at most six sentences on what is not as it was saved."""
    found = [*of_data]
    if len(found) > _MAX_OF_DATA:
        found[_MAX_OF_DATA - 1 :] = [f"{len(found) - _MAX_OF_DATA + 1} more differences of loaders were found."]
    if drawn:
        found.append(
            f"these attributes had other values in the stopped run: {list_names(drawn, 5)}. They come from "
            "random numbers without a seed, or from code or arguments that have changed. Call seed_everything before "
            "the module is created, or keep them in a state_dict, as register_buffer does."
        )
    if ORDER_OF_SUMS in names:
        names = [name for name in names if name != ORDER_OF_SUMS]
        found.append(
            "torch's DDP adds the first gradients of each start in another order, so their last bits may differ from "
            "those of an uninterrupted run. find_unused_parameters=True keeps the order, and takes more time."
        )
    if names:
        found.append(
            f"these values were not restored: {list_names(names, 5)}. The run continues and may diverge from an "
            "uninterrupted one. Keep values in a state_dict, or in on_save_checkpoint and on_load_checkpoint. Make "
            "other changes, such as hooks, in on_train_epoch_start, which a resumed run calls again."
        )
    return found


def _differences_from_checkpoint(trainer: Trainer, load_saved: Callable[[], Mapping[str, Any]]) -> list[str]:
    """Return where the checkpoint that the Trainer would write now differs from the saved one."""
    with isolated_rng():  # hooks may draw random numbers
        checkpoint = dump_checkpoint(trainer)
    # The file has rank zero's values; those of other ranks are compared as RankTensors.
    if not (trainer.is_global_zero or is_sharding(trainer.strategy)):
        return []
    saved: Mapping[str, Any] = {}
    with suppress(MisconfigurationException):  # somebody may have overwritten the file since it was read
        saved = load_saved()
    compared = {name: value for name, value in saved.items() if name not in NOT_COMPARED_ENTRIES}
    if not trainer.is_global_zero:  # all that is not sharded is as rank zero had it
        weights = {name: value for name, value in compared.get("state_dict", {}).items() if is_sharded(value)}
        compared = {"state_dict": weights, "optimizer_states": compared.get("optimizer_states", [])}
    name_as_in_(checkpoint["state_dict"], compared.get("state_dict", {}))
    # Lightning's Timer saves the seconds that have passed, which are others in each start.
    timers = tuple(f"callbacks.{timer.state_key}." for timer in callbacks_of_type(trainer, Timer))
    return [path for path in differing_paths(compared, checkpoint) if not path.startswith(timers)]
