"""What a fit is configured with, and what another start of its script changed: refused, taken or ignored."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.loaders import given_train_loaders
from lightning_tricks._lightning_compat.trainer import datamodule_of
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks.auto_resume.core.attributes.model_structure import param_group_names
from lightning_tricks.auto_resume.core.configuration import (
    ABSENT,
    Change,
    Configuration,
    describe_loaders,
    is_longer,
    numbered,
    plain,
)
from lightning_tricks.auto_resume.core.optimizer_changes import SCHEDULE_OPTIONS, ChangedOptimizers, describe_optimizers
from lightning_tricks.auto_resume.fit_settings import FitSettings
from lightning_tricks.auto_resume.parts import Part, Phase, SavedState, Settings

_LIMITS = {"max_epochs": "epochs", "max_steps": "steps"}  # a run that is given more of them is extended
# The training loaders as they are given to `fit`, and as the Trainer uses them
_GIVEN, _IN_USE = "train_dataloaders", "train_dataloader"
# What a Tuner sets before the fit, and what schedules take from it
_SEARCHED = re.compile(".*lrs?|.*learning_rate|batch_size")
_MOST_LINES = 20


class RunConfiguration(Part):
    """What a fit is configured with, compared with what its run was started with.

    Args:
        settings: The callback, with the user's choices.
        trainer: The Trainer of the fit.
        module: The module that is trained.

    Attributes:
        changes: What this start changed, as far as it is known.
        changed_states: The entries of the checkpoint with the states of optimizers and schedulers, if this start
            changed them; else empty.
        extended: How the run is extended, such as "from 3 to 10 epochs"; empty if it is not.
    """

    name = "configuration"

    def __init__(self, settings: Settings, trainer: Trainer, module: LightningModule) -> None:
        super().__init__(trainer, module)
        self.settings = settings
        self.changes: list[Change] = []
        self.extended = ""
        self.changed_states: dict[str, Any] = {}
        self._saved: SavedState  # where the fit resumes
        self._before: Configuration | None = None
        self._fit = FitSettings(trainer, module)
        self._now = self._fit.now
        self._ignored: list[Change] = []
        self._rescheduled: list[str] = []  # what another number of ranks changed in schedules
        self._created: Sequence[Any] = ()  # the optimizers
        self._has_loaders = self._has_optimizers = self._said_incidental = False

    def capture_shared(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint keeps: the present configuration, with the old values of what is ignored."""
        record = asdict(self._now)
        record["exchanged"] = list(map(id, self.trainer.optimizers)) != list(map(id, self._created))
        for change in self._ignored:
            part = "arguments" if change.name in self._now.arguments else "values"
            record[part][change.name] = change.before
            if self._before is not None:  # with it goes what its scheduler derived from it
                derived = f"{change.label}._"
                values = self._before.values.items()
                record["values"] |= {name: value for name, value in values if name.startswith(derived)}
        return {"configuration": record}

    def close(self) -> None:
        """Leave the Trainer as it was."""
        self._fit.close()

    def resume_from(self, saved: SavedState) -> None:
        """Compare with what the run was started with; with `on_change="old"`, set back what can be set."""
        self._saved = saved
        if "configuration" not in saved.shared:  # an older release wrote the checkpoint
            return
        self._before = Configuration(**saved.shared["configuration"])
        self.extended = " and ".join(
            f"from {before} to {now} {unit}" for _, (before, now, unit) in self._extensions().items()
        )
        for change in self._find_changes()[0] if self.settings.on_change == "old" else ():
            if self._fit.set_back(change):
                self._ignored.append(change)

    def _extensions(self) -> dict[str, tuple[Any, Any, str]]:
        before = {} if self._before is None else self._before.values
        limits = {name: (before.get(f"Trainer.{name}"), self._now.values[f"Trainer.{name}"]) for name in _LIMITS}
        return {
            name: (*pair, _LIMITS[name])
            for name, pair in limits.items()
            if f"Trainer.{name}" in before and is_longer(*pair)
        }

    def _find_changes(self) -> tuple[list[Change], list[Change]]:
        """Return the changes, and those that do not shape the training, as far as this start is known."""
        before = self._before
        if before is None:
            return [], []
        extensions = self._extensions()
        lengths = [(old, new) for old, new, _ in extensions.values()]
        extended = {f"Trainer.{name}" for name in extensions}
        found, incidental = before.changes_to(self._now, self._is_default)
        was_searched, schedules = self._was_searched(), self._schedule_labels()
        states = {*numbered(self.trainer.optimizers), *schedules}
        changes = []
        for change in found:
            leaf = change.name.rpartition(".")[2]
            is_length = ("epoch" in leaf or "step" in leaf) and (change.before, change.now) in lengths
            is_state = change.label in states or change.label.startswith(("optimizer ", "scheduler "))
            if change.name in extended or is_length or (before.exchanged and is_state):
                continue
            is_found = was_searched and _SEARCHED.fullmatch(leaf)
            # another number of ranks makes other steps, and the Trainer shuffles what several ranks read
            is_shuffle = leaf == "shuffle" and _is_of_loaders(change)
            if is_found or (self._saved.world_size_changed and (is_shuffle or change.label in schedules)):
                incidental.append(change)
            else:
                changes.append(replace(change, why=self._reason(change)))
        # what a scheduler derives from its arguments, in private attributes, changes with them
        labels = {change.label for change in changes if "._" not in change.name}
        return [change for change in changes if "._" not in change.name or change.label not in labels], incidental

    def _schedule_labels(self) -> list[str]:
        return numbered([config.scheduler for config in self.trainer.lr_scheduler_configs])

    def _was_searched(self) -> bool:
        """Whether a Tuner, of this Trainer or another one, has set a hyper-parameter."""
        initial = self.module.hparams_initial
        found = [name for name in self.module.hparams if _SEARCHED.fullmatch(str(name))]
        return self.settings.was_tuned or any(self.module.hparams[name] != initial.get(name) for name in found)

    def _reason(self, change: Change) -> str:
        """Return what a schedule's length follows from."""
        if change.label.startswith("optimizer ") and ABSENT not in (change.before, change.now):
            return "moments continue where both keep the same ones"
        is_schedule = change.label in self._schedule_labels()
        numbers = all(isinstance(value, int | float) for value in (change.before, change.now))
        if not (self.extended and is_schedule) or (numbers and change.now <= change.before):
            return ""
        return "its length follows from that of the run"

    def _is_default(self, name: str, value: Any) -> bool:
        owner: Any = datamodule_of(self.trainer) if name.startswith("datamodule.") else self.module
        parameter = inspect.signature(type(owner).__init__).parameters.get(name.rpartition(".")[2])
        return parameter is not None and plain(parameter.default) == value

    def check_optimizers(self, checkpoint: dict[str, Any] | None) -> None:
        """Note what the optimizers were created with, and decide on what changed; all ranks have to call it.

        Args:
            checkpoint: The checkpoint that the Trainer is about to restore; with `on_change="new"`, its states of
                optimizers and schedulers are changed in place. None if there is none.

        Raises:
            MisconfigurationException: If something changed, and it is not said what is to be done.
        """
        if self._has_optimizers:
            return  # the fit makes others, as for a later stage
        optimizers, configs = self.trainer.optimizers, self.trainer.lr_scheduler_configs
        with isolated_rng():  # functions of users are called
            found = describe_optimizers(optimizers, configs, param_group_names(self.module, optimizers))
        self._now.groups, self._created = found.groups, list(optimizers)
        for label, config in zip(self._schedule_labels(), configs, strict=True):
            for option in SCHEDULE_OPTIONS:
                self._fit.places[f"{label}.{option}"] = config, option, getattr(config, option)
        self._fit.add(found)
        self._fit.add(describe_loaders(given_train_loaders(self.trainer), _GIVEN))
        self._has_optimizers = True
        self._decide()
        if checkpoint is None or self._before is None or self._before.exchanged:
            return
        names = [change.name for change in self.changes] if self.settings.on_change == "new" else []
        names += self._rescheduled if self.settings.on_change != "old" else []
        if not names and self._before.groups == self._now.groups:
            return
        regrouped = bool(self._saved.shared["groups"])
        if regrouped and any(name.endswith(".groups") for name in names):
            raise MisconfigurationException(
                "AutoResume: hooks changed the parameter groups of the run, and configure_optimizers now returns other "
                "ones than at its first start, so that the saved states have no place. Return the groups of then, or "
                "choose another dirpath."
            )
        ranks = self._saved.world_size, self.trainer.world_size
        changed = ChangedOptimizers(
            optimizers, configs, self._before, self._now, names, regrouped=regrouped, ranks=ranks
        )
        states, manifest = (checkpoint["optimizer_states"], checkpoint["lr_schedulers"]), self._saved.manifest
        try:
            states = changed.states(*states, manifest.step, manifest.epoch)
        except ValueError as error:
            raise MisconfigurationException(
                f"AutoResume: a schedule ends before step {manifest.step}, which the run has reached ({error}). "
                "Give it more steps, or choose another dirpath to start a new run."
            ) from error
        changed_entries = dict(zip(("optimizer_states", "lr_schedulers"), states, strict=True))
        checkpoint |= changed_entries
        self.changed_states = copy.deepcopy(changed_entries)

    def check_loaders(self, loaders: Sequence[Any], *, resumes: bool) -> float | None:
        """Note the training loaders, and decide on what changed; those that a fit creates later are only noted.

        Returns:
            None if nothing changed in the loaders; else the new batch size over the old one, 1 if that is not known.
        """
        self._fit.add(describe_loaders(loaders, _IN_USE))
        if not resumes or self._has_loaders:  # those that are reloaded are the fit's
            return None
        self._has_loaders = True
        if self._has_optimizers:  # configure_optimizers may ask for the number of batches
            self._decide()
        changes = [change for change in self._find_changes()[0] if _is_of_loaders(change)]
        if not changes:
            return None
        sizes = [change for change in changes if change.name == f"{_IN_USE}.batch_size"]
        if len(loaders) != 1 or not sizes or not all(isinstance(x, int) for x in (sizes[0].before, sizes[0].now)):
            return 1.0
        return float(sizes[0].now / sizes[0].before)

    def _decide(self) -> None:
        """Raise an error for changes that are new, or say what becomes of them."""
        known = {change.name for change in self.changes}
        found, incidental = self.trainer.strategy.broadcast(self._find_changes())
        known |= {name.replace(_GIVEN, _IN_USE) for name in known}
        if not self._has_loaders:
            known |= {change.name for change in found if _is_of_loaders(change)}
        new = [change for change in found if change.name not in known]
        self.changes += new
        schedules = [change for change in incidental if change.label in self._schedule_labels()]
        incidental = [change for change in incidental if change not in schedules]
        if schedules and not self._rescheduled:
            self._rescheduled = [change.name for change in schedules]
            ranks = self._saved.world_size if self.settings.on_change == "old" else self.trainer.world_size
            rank_zero_info(
                f"AutoResume: schedules go on as those of a run with {ranks} ranks: {_listed(schedules, '; ')}."
            )
        if incidental and not self._said_incidental:
            self._said_incidental = True
            rank_zero_info(
                "AutoResume: these arguments differ from those of the first start, and were taken for what does not "
                f"shape the training: {_listed(incidental, '; ')}."
            )
        if not new:
            return
        if self.settings.on_change == "raise":
            raise MisconfigurationException(
                f"AutoResume: {self._saved.path.parent} holds a run that was started with other settings:\n  "
                f"{_listed(new, chr(10) + '  ')}\n"
                "Nothing was trained or changed. Choose one of these:\n"
                "- AutoResume(..., on_change='new') continues with the new values; moments, position and random states "
                "go on.\n"
                "- AutoResume(..., on_change='old') continues with the old values.\n"
                "- Another dirpath starts a new run."
            )
        if self.settings.on_change == "new":
            self._check_length(new)
            is_over = self._saved.manifest.finished and not self.extended
            end = " The run had finished: they take effect when it is given more epochs or steps." if is_over else ""
            rank_zero_info(f"AutoResume: the run goes on with new values: {_listed(new, '; ')}.{end}")
            return
        self._keep_old(new)

    def _check_length(self, changes: Sequence[Change]) -> None:
        manifest = self._saved.manifest
        begun = manifest.epoch + (manifest.batches > 0 and not manifest.finished)
        done = {"Trainer.max_epochs": begun, "Trainer.max_steps": manifest.step}
        for change in changes:
            if change.name in done and not is_longer(done[change.name] - 1, change.now):
                raise MisconfigurationException(
                    f"AutoResume: the run is at {done[change.name]} {_LIMITS[change.name.partition('.')[2]]}, beyond "
                    f"{change.name}={change.now}. Give it more, continue with the old value by "
                    "on_change='old', or choose another dirpath."
                )

    def _keep_old(self, changes: Sequence[Change]) -> None:
        """Say which changes are ignored, and which cannot be."""
        refused = [change for change in changes if self._cannot_go_on(change)]
        if refused:
            raise MisconfigurationException(
                f"AutoResume(on_change='old'): the saved state does not fit {_listed(refused, '; ')}. Set the old "
                "values in the script, continue with the new ones by on_change='new', or choose another dirpath."
            )
        restored = {*numbered(self.trainer.optimizers), *self._schedule_labels(), "seed"}
        for change in changes:
            is_restored = change.label in restored and not change.name.endswith("()")  # a function is not saved
            if change not in self._ignored and (self._fit.set_back(change) or is_restored):
                self._ignored.append(change)
        ignored = [change for change in changes if change in self._ignored]
        same = [(change.before, change.now) for change in ignored]  # an argument that was passed on
        in_effect = [change for change in changes if (change.before, change.now) not in same]
        if ignored:
            rank_zero_info(f"AutoResume(on_change='old'): the old values are kept: {_listed(ignored, '; ')}.")
        if in_effect:
            rank_zero_warn(
                f"AutoResume(on_change='old'): these changes are in effect nevertheless, as the script has made its "
                f"objects with them: {_listed(in_effect, '; ')}."
            )

    def _cannot_go_on(self, change: Change) -> bool:
        kind, _, option = change.name.rpartition(".")
        is_state = change.name.startswith(("optimizer ", "scheduler "))
        ends_early = option == "total_steps" and is_longer(change.before, change.now) and bool(self.extended)
        return is_state or (option == "groups" and kind in numbered(self.trainer.optimizers)) or ends_early

    def is_known_change(self, path: str) -> bool:
        """Whether the attribute at a path, such as "module.net.2.p", is among the changes, or what a Tuner found."""
        if self._was_searched() and _SEARCHED.fullmatch(path.rpartition(".")[2]):
            return True
        names = [change.name for change in self.changes]
        return any(path.endswith(f".{name}") or path == f"module.{name.partition('.')[2]}" for name in names)

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Load and set what another start changed once more, as the resume has restored old values."""
        if phase is not Phase.COMPARED:  # wrappers of optimizers keep options that were restored
            states = self.changed_states.get("optimizer_states", ())
            for optimizer, state in zip(self.trainer.optimizers, states, strict=False):
                optimizer.load_state_dict(state)
            return
        for change in self.changes if self.settings.on_change == "new" else ():
            owner, name, value = self._fit.places.get(change.name, (None, "", None))
            if owner is None or isinstance(owner, Trainer | Mapping):
                continue
            if plain(getattr(owner, name, None)) == change.before:  # else a hook has set it
                setattr(owner, name, value)


def _is_of_loaders(change: Change) -> bool:
    return change.name.startswith((f"{_IN_USE}.", f"{_IN_USE}["))


def _listed(changes: Sequence[Change], separator: str) -> str:
    more = len(changes) - _MOST_LINES
    return separator.join([*map(str, changes[:_MOST_LINES]), *([f"and {more} more"] if more > 0 else [])])
