"""The part of a fit's state that attributes of objects hold: of the module, the datamodule, callbacks, optimizers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.callbacks import PRUNING_TICKETS, averaged_models
from lightning_tricks._lightning_compat.flavor import (
    LIGHTNING,
    BatchSizeFinder,
    Callback,
    Checkpoint,
    LearningRateFinder,
    LightningDataModule,
    LightningModule,
    ModelPruning,
    ModelSummary,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
    Trainer,
    rank_zero_info,
)
from lightning_tricks._lightning_compat.hyperparameters import SAVED_IN
from lightning_tricks._lightning_compat.results import named_callbacks
from lightning_tricks._lightning_compat.trainer import datamodule_of
from lightning_tricks._shared.text import list_names
from lightning_tricks.auto_resume.core.attributes.attribute_access import (
    attributes,
    is_subclass,
    remembered_by_type,
    set_attribute,
)
from lightning_tricks.auto_resume.core.attributes.digests import ValueDigest
from lightning_tricks.auto_resume.core.attributes.encoding import (
    SkippedNames,
    differing_paths,
    is_clock_reading,
    is_held_object,
    nothing_skipped,
)
from lightning_tricks.auto_resume.core.attributes.model_structure import names_in_state_of
from lightning_tricks.auto_resume.core.attributes.object_walk import ObjectWalk
from lightning_tricks.auto_resume.core.attributes.restoring import restore_changes
from lightning_tricks.auto_resume.core.attributes.tracking import AttributeTracker, summarized
from lightning_tricks.auto_resume.core.attributes.value_kinds import container_kind, is_generator, kind_of
from lightning_tricks.auto_resume.parts import Part, Phase, SavedState
from lightning_tricks.lr_schedules.core.combined_optimizer import CombinedOptimizer

# Their attributes belong to the process, or another part of the state restores them
_EXCLUDED_CALLBACKS = (
    BatchSizeFinder,
    Checkpoint,
    LearningRateFinder,
    ModelSummary,
    ProgressBar,
    StochasticWeightAveraging,
    Timer,
    TrickCallback,
)

_OF_CALLBACKS = frozenset({"log", "log_dict", "state_dict"})  # what the Trainer sets, and saves
_MAX_LISTED = 10  # names in a sentence
_MAX_DEPTH, _MAX_ENTRIES = 3, 1_000  # of a container that may hold what random numbers made

# By name: its module takes long to import, and is there if the callback is
_SAVES_CONFIG = (f"{LIGHTNING}.cli", "SaveConfigCallback")


class AttributeOwners:
    """Lists the objects of a fit whose attributes are saved.

    Args:
        trainer: The Trainer of the fit.
        module: The module that is trained.

    Attributes:
        has_optimizers: Whether the optimizers of this fit were created, which may have attributes of their own.
    """

    def __init__(self, trainer: Trainer, module: LightningModule) -> None:
        self.trainer, self.module, self.has_optimizers = trainer, module, False

    def module_and_callbacks(self) -> dict[str, object]:
        """Return the module, the datamodule and the callbacks whose attributes are saved, by name."""
        datamodule = datamodule_of(self.trainer)
        callbacks = {
            name: callback
            for name, callback in named_callbacks(self.trainer).items()
            if not isinstance(callback, _EXCLUDED_CALLBACKS)
        }
        return {"module": self.module, **({} if datamodule is None else {"datamodule": datamodule}), **callbacks}

    def roots(self) -> dict[str, object]:
        """Return these, and what optimizers hold beside their state dicts, from the fit's start on."""
        return {**self.module_and_callbacks(), **(_numbered("optimizers", self._optimizers()))}

    def known(self) -> dict[str, object]:
        """Return what the Trainer holds and others restore, by name: attributes may refer to it."""
        trainer, optimizers = self.trainer, self._optimizers()
        combined = [part for one in optimizers if isinstance(one, CombinedOptimizer) for part in one.parts.values()]
        return {
            "trainer": trainer,
            "strategy": trainer.strategy,
            **named_callbacks(trainer),
            **_numbered("optimizers", optimizers),
            **_numbered("parts", combined),  # which share its state
            **_numbered("schedulers", [config.scheduler for config in trainer.lr_scheduler_configs]),
            **_numbered("averaged", averaged_models(trainer)),
            **_numbered("loggers", trainer.loggers),
        }

    def _optimizers(self) -> Sequence[Optimizer]:
        return self.trainer.optimizers if self.has_optimizers else []

    def skipped_names(self, owner: object) -> Collection[str]:
        """Return the names of the attributes that others restore; "state_dict" if they restore the object itself."""
        return _lightning_attributes(owner)

    def walk(self) -> ObjectWalk:
        """Return a walk over the module, the datamodule and the callbacks."""
        return ObjectWalk.from_roots(self.module_and_callbacks(), self.skipped_names)


def _numbered(name: str, objects: Sequence[object]) -> dict[str, object]:
    return {f"{name}.{number}": one for number, one in enumerate(objects)}


class Attributes(Part):
    """The attributes that changed in the fit, and what of the unchanged ones random numbers may have made.

    Args:
        owners: The objects whose attributes are saved.

    Attributes:
        failed: What could not be restored, and why.
    """

    name = "attributes"

    def __init__(self, owners: AttributeOwners) -> None:
        super().__init__(owners.trainer, owners.module)
        self._owners = owners
        self._tracker = AttributeTracker(
            owners.roots,
            skipped=owners.skipped_names,
            saves_unchanged=is_generator,  # as they may have no seed
            known=owners.known,
        )
        self._drawn = self._unseeded_values()  # what changes later is saved or named
        self.failed: list[str] = []
        self._said = set[str]()

    def note(self, phase: Phase) -> None:
        """Note what optimizers hold as soon as there are some, and what the hooks of an epoch's start changed."""
        if phase is Phase.FIT_START:
            # all of what they hold counts as changed: another process makes it of the weights that it resumes
            self._owners.has_optimizers = True
        elif phase is Phase.AFTER_HOOKS:
            self.changes(after_hooks=True)

    def changes(self, *, after_hooks: bool = False) -> dict[str, Any]:
        """Return what changed as tensors and plain values; it is saved from here on, even if it is changed back.

        With `after_hooks`, the hooks were called that a resumed fit calls again before it restores attributes.
        """
        return dict(self._tracker.changes(after_hooks=after_hooks))

    def capture(self, walk: ObjectWalk) -> dict[str, Any]:
        """Return the changes, and digests of what random numbers may have made."""
        changes = self.changes()
        say_unwatched(changes["unwatched"], self._said)
        return {"attributes": changes, "drawable": {**self._drawn, **_unseeded_buffers(walk)}}

    def unsaved(self, captured: Mapping[str, Any]) -> list[str]:
        """Return the attributes that changed and are not data."""
        return [f"{path} ({kind})" for path, kind in summarized(captured["attributes"]["lost"]).items()]

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Restore the attributes as they were at the save; before the hooks of an epoch's start, as they were there."""
        if phase is not Phase.BEFORE_HOOKS:
            self.restore_changes(saved.rank["attributes"])
        elif saved.rank["epoch"] is not None:
            # not those of an object of which others could not be saved: a flag which says that something was created
            # would keep the hooks from creating it
            changes = saved.rank["epoch"]["attributes"]
            incomplete = {path.rpartition(".")[0] for path in changes["lost"]}
            incomplete |= {change["of"] for change in changes["values"].values() if "by_hooks" in change}
            values = {path: change for path, change in changes["values"].items() if change["of"] not in incomplete}
            self.restore_changes({**changes, "values": values})

    def restore_changes(self, changes: Mapping[str, Any]) -> None:
        """Restore what `changes` returned."""
        self._tracker.note(changes)
        owners = self._owners.roots()
        failed = restore_changes(owners, changes, skipped=self._owners.skipped_names, known=self._owners.known())
        removed_callbacks = {
            path for path in failed if path.startswith("callbacks.") and path not in owners and path.count(".") == 1
        }
        failed = {path: why for path, why in failed.items() if path not in removed_callbacks}
        self.failed = [f"{path} ({why})" for path, why in summarized(failed).items()]

    def differences(self, saved: SavedState, now: Mapping[str, Any]) -> Iterator[str]:
        """Yield what was not restored, and the attributes that changed in both processes, and to different values."""
        yield from self.failed
        if self.trainer.global_rank >= saved.world_size:
            return  # it has those of another rank, but for metrics
        before, present = (state["attributes"]["values"] for state in (saved.rank, now))
        for path in before.keys() & present.keys():
            if any(True for _ in differing_paths(before[path]["value"], present[path]["value"])):
                yield path

    def drawn_anew(self, saved: SavedState) -> list[str]:
        """Return the attributes that had other values in the saved run, and were not saved, as they did not change."""
        before, now = saved.rank.get("drawable", {}), {**self._drawn, **_unseeded_buffers(self._owners.walk())}
        known = (*saved.rank["attributes"]["values"], *saved.rank["attributes"]["lost"])
        others = [path for path in before if path in now and before[path] != now[path]]
        return [path for path in others if not any(f"{path}.".startswith(f"{parent}.") for parent in known)]

    def _unseeded_values(self) -> dict[str, int]:
        """Return digests of the attributes that random numbers may have made."""

        def skipped(owner: object) -> Collection[str]:
            # hyper-parameters are part of the run's identity, and modules of the collection restore what they need
            is_ours = any(base.__module__.startswith("lightning_tricks.") for base in type(owner).__mro__)
            own = [name for name in vars(owner) if name.startswith("_")] if is_ours else ()
            return (*self._owners.skipped_names(owner), *SAVED_IN, *own)

        return unseeded_values(self._owners.module_and_callbacks(), skipped=skipped)


class DatasetHolders(Part):
    """Which attributes hold the datasets of the training loaders.

    Args:
        owners: The objects whose attributes are saved.
        datasets: Returns the datasets that are tracked.
    """

    name = "data_held_by"

    def __init__(self, owners: AttributeOwners, datasets: Callable[[], Sequence[object]]) -> None:
        super().__init__(owners.trainer, owners.module)
        self._owners, self._datasets = owners, datasets

    def capture(self, walk: ObjectWalk) -> dict[str, Any]:
        """Return the paths of the attributes for each dataset."""
        slots = walk.slots.items()
        return {
            "data_held_by": [[path for path, slot in slots if slot.value is dataset] for dataset in self._datasets()]
        }

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Give a copy to each attribute that holds a dataset, but did not hold it in the stopped run.

        It was set to another object after the loaders had been created. What is restored in it must not change what
        the loaders read.
        """
        slots = self._owners.walk().slots
        for dataset, known in zip(self._datasets(), saved.rank.get("data_held_by", ()), strict=False):
            others = [slot for path, slot in slots.items() if slot.value is dataset and path not in known]
            replacement = copy.deepcopy(dataset) if others else dataset
            for slot in others:
                set_attribute(slot.owner, slot.name, replacement)


def _lightning_attributes(owner: object) -> Collection[str]:
    """Return the names of the attributes that are Lightning's, or callbacks, which are owners themselves."""
    kind = type(owner)  # a proxy answers `isinstance` as it likes
    if issubclass(kind, Optimizer):
        return names_in_state_of(owner)
    if issubclass(kind, _EXCLUDED_CALLBACKS):
        return (*vars(owner), "state_dict")  # met in what a module keeps, such as the arguments of its Trainer
    if issubclass(kind, LightningModule):
        return _attributes_of_lightning(kind) | {name for name, value in vars(owner).items() if are_callbacks(value)}
    return _attributes_of_lightning(kind)


@remembered_by_type
def _attributes_of_lightning(kind: type) -> frozenset[str]:
    """Return the names of the attributes of all objects of a class that are Lightning's."""
    if issubclass(kind, LightningModule):
        return default_attributes(LightningModule) | {"forward"}  # which DDP binds for each step
    if issubclass(kind, LightningDataModule):
        return default_attributes(LightningDataModule) | {"state_dict"}
    if issubclass(kind, ModelPruning):
        return _OF_CALLBACKS | {PRUNING_TICKETS}
    if any((base.__module__, base.__name__) == _SAVES_CONFIG for base in kind.__mro__):
        return _OF_CALLBACKS | {"parser", "config"}  # of the process: some 50,000 objects
    return _OF_CALLBACKS if issubclass(kind, Callback) else frozenset()


def say_unwatched(unwatched: Mapping[str, str], said: set[str]) -> None:
    """Name once what no one sees a change of, and note it."""
    new = {path: kind for path, kind in summarized(unwatched).items() if path not in said}
    said.update(new)
    if new:
        listed = list_names([f"{path} ({kind})" for path, kind in new.items()], _MAX_LISTED)
        rank_zero_info(f"AutoResume: not saved and not watched, as pickle cannot write them: {listed}.")


def are_callbacks(value: object) -> bool:
    """Whether a value is a callback, or a list of nothing else."""
    if not isinstance(value, list | tuple):
        return issubclass(type(value), Callback)
    return bool(value) and all(issubclass(type(part), Callback) for part in value)


@cache
def default_attributes(kind: type) -> frozenset[str]:
    """Return the names of the attributes that each object of a class has from its construction on."""
    return frozenset(vars(kind()))


def unseeded_values(roots: Mapping[str, Any], *, skipped: SkippedNames = nothing_skipped) -> dict[str, int]:
    """Return a digest of each attribute that random numbers may have made, the same in every process.

    These are tensors, arrays and floats, random generators with their states, buffers that no state dict holds, and
    containers of nothing but numbers and these. Readings of clocks are left out.

    Args:
        roots: Objects by name.
        skipped: Returns the names of attributes to leave out of an object.

    Returns:
        Path -> digest of 64 bits.

    Examples:
        >>> class Sampler:
        ...     def __init__(self, offset):
        ...         self.offset, self.name = offset, "uniform"
        >>> first, second = (unseeded_values({"sampler": Sampler(offset)}) for offset in (0.25, 0.5))
        >>> first.keys(), first == second
        (dict_keys(['sampler.offset']), False)
    """
    walk = ObjectWalk.from_roots(roots, skipped)
    found = {
        path: value for slot_path, slot in walk.slots.items() for path, value in _within(slot.value, slot_path, walk)
    }
    return {path: _digest(value) for path, value in found.items() if _may_be_drawn(value)} | _unseeded_buffers(walk)


def _within(value: Any, path: str, walk: ObjectWalk, depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield a value, or the attributes of an object in its place."""
    if not is_held_object(type(value)):
        yield path, value
    elif depth < _MAX_DEPTH and id(value) not in walk.references:
        left_out = walk.skipped(value)
        for name, part in attributes(value):
            if name not in left_out:
                yield from _within(part, f"{path}.{name}", walk, depth + 1)


def _unseeded_buffers(walk: ObjectWalk) -> dict[str, int]:
    """Return a digest of each buffer that no state dict holds."""
    found = dict[str, int]()
    for path, owner in walk.owners.items():
        if is_subclass(type(owner), nn.Module) and owner._non_persistent_buffers_set:
            names = [name for name in owner._buffers if name in owner._non_persistent_buffers_set]
            buffers = {name: owner._buffers[name] for name in names}
            found |= {f"{path}.{name}": _digest(value) for name, value in buffers.items() if value is not None}
    return found


def _may_be_drawn(value: Any, depth: int = 0) -> bool:
    kind = type(value)
    if is_subclass(kind, nn.Parameter):
        return False  # the weights of a module, which are saved
    if kind is float or is_subclass(kind, np.floating):
        return not is_clock_reading(float(value))
    if is_subclass(kind, Tensor, np.ndarray) or is_generator(value):
        return True
    container = container_kind(kind)
    if container is None or depth == _MAX_DEPTH or not 0 < container.container.__len__(value) <= _MAX_ENTRIES:
        return False
    return all(type(part) is int or _may_be_drawn(part, depth + 1) for _, part in container.entries(value))


def _digest(value: Any) -> int:
    kind = kind_of(value)
    state = tuple(kind.parts(value).values()) if kind is not None and is_generator(value) else value
    return int(ValueDigest.of(state, same_process=False))
