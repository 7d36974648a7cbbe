"""What a fit is configured with, and what another start of its script changed: refused, taken, or said in a line."""

from __future__ import annotations

import copy
import os
import re
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any
from weakref import WeakSet

from torchmetrics import Metric, MetricCollection

from lightning_tricks._lightning_compat.fit import loop_limits
from lightning_tricks._lightning_compat.flavor import (
    LIGHTNING,
    Callback,
    LightningModule,
    MisconfigurationException,
    Trainer,
    import_lightning,
    rank_zero_info,
)
from lightning_tricks._lightning_compat.hyperparameters import SAVED_IN
from lightning_tricks._lightning_compat.loaders import given_train_loaders
from lightning_tricks._lightning_compat.trainer import callbacks_of, datamodule_of
from lightning_tricks._shared.patterns import as_patterns, strip_compile_prefix
from lightning_tricks._shared.text import describe_error, list_names
from lightning_tricks.auto_resume.attribute_parts import are_callbacks, default_attributes
from lightning_tricks.auto_resume.core.attributes.model_structure import param_group_names
from lightning_tricks.auto_resume.core.configuration import (
    ABSENT,
    BUFFER,
    IN_USE,
    ROOT,
    Change,
    Configuration,
    Describer,
    Rule,
    arguments_of,
    changes_between,
    describe_layers,
    describe_loaders,
    describe_optimizers,
    flatten,
    is_comparable,
    is_longer,
    is_place,
    numbered,
    own_files,
    plain,
)
from lightning_tricks.auto_resume.core.optimizer_changes import ChangedOptimizers
from lightning_tricks.auto_resume.parts import Part, Phase, SavedState, Settings
from lightning_tricks.auto_resume.trainer_parts import SHAPING_SETTINGS

_LIMITS = {"max_epochs": "epochs", "max_steps": "steps"}  # a run that is given more of them is extended
# The training loaders as they are given to `fit`, and as the Trainer uses them
_GIVEN, _USED = "train_dataloaders", "train_dataloader"
_MOST_LINES = 20
_OBSERVERS = (
    *("BasePredictionWriter", "BatchSizeFinder", "Checkpoint", "DeviceStatsMonitor", "LearningRateFinder"),
    *("LearningRateMonitor", "ModelSummary", "ProgressBar", "ThroughputMonitor", "Timer"),
)
# Why a change is no reason to stop -> what is said
_SENTENCES = {
    "record": "these changed since the first start, do not change the training by themselves, and the run continues",
    "ranks": "schedules and loaders continue as in a run with this number of ranks",
    "ignored": "these changes take effect, as ignore lists them",
}


_begun: WeakSet[LightningModule] = WeakSet()  # those that were trained in this process


class RunConfiguration(Part):
    """What a fit is configured with, compared with what its run was started with.

    Args:
        settings: The callback, with the user's choices.
        trainer: The Trainer of the fit.
        module: The module that is trained.

    Attributes:
        changes: What this start changed and takes effect, as far as it is known.
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
        self._rescheduled: list[str] = []  # what another number of ranks changed in schedules
        self._said: set[str] = set()  # the names of what was said
        self._created: list[weakref.ref[Any]] = []  # the first optimizers, whose ids others may get after them
        self._has_loaders = self._has_optimizers = False
        self._ignored = as_patterns("ignore", settings.ignore)
        self._parameters = {name for name, _ in module.named_parameters()}
        self._was_trained = module in _begun  # as where a cell of a notebook is run again
        self._now = self._describe()  # and what becomes known later

    def _describe(self) -> Configuration:
        """Return what there is before the fit."""
        found, module, owners = Configuration(files=own_files()), self.module, self._known()
        describer = Describer(found, owners)
        found.records = dict(self._records())
        describe_layers(found, describer, module, (Metric, MetricCollection))
        describer.add(ROOT, module, {*module.hparams, *SAVED_IN, *default_attributes(LightningModule)})
        for name, value in [*found.values.items()]:  # a config may be an attribute and hyper-parameters
            path = name.removeprefix(f"{ROOT}.")
            if any(found.records.get(f"hparams.{one}", ABSENT) == value for one in (path, path.partition(".")[2])):
                del found.values[name]
        seed, limits = os.environ.get("PL_GLOBAL_SEED", ""), loop_limits(self.trainer)
        settings = {name: getattr(self.trainer, name) for name in (*SHAPING_SETTINGS, "precision")}
        settings |= {name: limits[name] for name in ("min_epochs", "max_epochs", "min_steps", "max_steps")}
        found.values |= {f"Trainer.{name}": plain(value) for name, value in settings.items()}
        found.values["seed"] = int(seed) if seed.isdecimal() else None
        found.values[f"{ROOT}.automatic_optimization"] = module.automatic_optimization
        for label, callback in self._callbacks().items():
            _add_callback(found, describer, label, callback)
        return found

    def _known(self) -> list[object]:
        """Return what is described by itself, and not where something refers to it."""
        return [self.trainer, datamodule_of(self.trainer), *self.module.modules(), *callbacks_of(self.trainer)]

    def _callbacks(self) -> dict[str, Callback]:
        callbacks = callbacks_of(self.trainer)
        return dict(zip(numbered(callbacks), callbacks, strict=True))

    def _records(self) -> Iterator[tuple[str, Any]]:
        for prefix, owner in (("hparams", self.module), ("datamodule.hparams", datamodule_of(self.trainer))):
            for name, value in getattr(owner, "hparams", {}).items():
                if not are_callbacks(value):  # they are compared by themselves
                    yield from flatten(f"{prefix}.{name}", value)

    def capture_shared(self, checkpoint: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a checkpoint keeps: the present configuration; what does not train, as at the first start."""
        record = {**vars(self._now), "exchanged": [*map(weakref.ref, self.trainer.optimizers)] != self._created}
        for name in ("files", "records") if self._before is not None else ():
            record[name] = {**getattr(self._now, name), **getattr(self._before, name)}
        return {"configuration": record}

    def resume_from(self, saved: SavedState, checkpoint: dict[str, Any]) -> None:
        """Note with what the run was started, and let its weights be loaded into a module with other buffers.

        Args:
            saved: What is resumed.
            checkpoint: The checkpoint that is about to be loaded, whose state dict is changed in place.
        """
        self._saved, before = saved, Configuration.from_saved(saved.shared["configuration"])
        self._before, values, weights = before, before.values, checkpoint["state_dict"]
        limits = {name: (values[f"Trainer.{name}"], self._now.values[f"Trainer.{name}"]) for name in _LIMITS}
        if not any(is_longer(now, old) for old, now in limits.values()):
            self.extended = " and ".join(
                f"from {old} to {now} {_LIMITS[name]}" for name, (old, now) in limits.items() if is_longer(old, now)
            )
        if self.trainer.strategy.restore_checkpoint_after_setup:
            return
        own = {strip_compile_prefix(name): name for name in self.module.state_dict()}
        for change in changes_between(before.kinds, self._now.kinds):
            if BUFFER in f"{change.before} {change.now}":
                name = own.get(change.name, change.name)
                weights.pop(name, None)
                weights |= {name: self.module.state_dict()[name]} if change.name in own else {}

    def _differences(self) -> tuple[list[Change], list[Change]]:
        """Return what this start changes as far as it is known: what trains, and what need not, as users name it."""
        if (before := self._before) is None:
            return [], []
        loaders = _USED if self._has_loaders else _GIVEN
        are_known = self._has_loaders or all(
            any(name.startswith(_GIVEN) for name in one.values) for one in (before, self._now)
        )
        states = {*numbered(self.trainer.optimizers), *self._schedule_labels()}

        def _is_same(change: Change, name: str) -> bool:
            return (change.before, change.now) == (before.values[name], self._now.values[name])

        def counts(change: Change) -> bool:
            label = change.label.partition("[")[0]
            is_other = label in (_GIVEN, _USED) and (label != loaders or not are_known)
            limit = change.name.rpartition(".")[2]  # which a module may keep as well, as in its arguments
            is_extended = bool(self.extended) and limit in _LIMITS and _is_same(change, f"Trainer.{limit}")
            is_state = change.name.startswith(("optimizer ", "scheduler ")) or change.label in states
            return not (is_other or is_extended or (before.exchanged and is_state))

        training, others = before.changes_to(self._now)
        if self._saved.world_size_changed or self._was_trained:  # attributes may follow from it
            others += [one for one in training if one.name in self._now.derived]
        if not before.changed_files(self._now):  # neither an argument nor code made it another one
            drawn = [one for one in training if one.name in self._now.derived and one.may_be_drawn]
            others += [one for one in drawn if one.name.startswith("globals.")]
            training = [one for one in training if one not in drawn]  # attributes are named where they are restored
        training = [one for one in training if one not in others]
        named = [
            [replace(one, name=one.name.replace(_GIVEN, _USED)) for one in kind if counts(one)]
            for kind in (training, others)
        ]
        return named[0], named[1]

    def _schedule_labels(self) -> list[str]:
        return numbered([config.scheduler for config in self.trainer.lr_scheduler_configs])

    def _reason(self, change: Change) -> str:
        """Return why a change is no reason to stop; empty if it is one."""
        # another number of ranks makes other steps, the Trainer shuffles what several ranks read, and scripts share out
        is_shared_out = change.name.endswith((".shuffle", ".length")) and _is_of_loaders(change)
        if self._saved.world_size_changed and (is_shared_out or change.label in self._schedule_labels()):
            return "ranks"
        is_ignored = any(pattern.text == change.name or pattern.matches(change.name) for pattern in self._ignored)
        return "ignored" if is_ignored else ""  # a name may have brackets

    def _decide(self) -> None:
        """Raise an error for changes that are new, or say what becomes of them; all ranks have to call it."""
        if (before := self._before) is None:
            return
        every = self.trainer.strategy.broadcast(self._differences())
        found, told = [[one for one in kind if one.name not in self._said] for kind in every]
        reasons: dict[str, list[Change]] = {reason: [] for reason in ("", *_SENTENCES)}
        for change in found:
            reasons[self._reason(change)].append(change)
        new = reasons.pop("")
        if new and self.settings.on_change == "raise":
            names = [change.name for change in new[:_MOST_LINES]]
            raise MisconfigurationException(
                f"AutoResume: {os.fspath(self.settings.dirpath)} contains a run that was started with other "
                f"settings:\n  {_listed(new, chr(10) + '  ')}\nNothing was trained or changed. AutoResume(..., "
                "on_change='new') continues with the new values, and keeps optimizer states, position and random "
                f"states; ignore={names} does so only for these, whenever they change; another dirpath starts a new "
                "run."
            )
        self._check_can_go_on([*new, *reasons["ignored"]])
        reasons["record"] = told
        if not self._said and (names := before.changed_files(self._now)):
            rank_zero_info(f"AutoResume: the code in {list_names(names)} changed since the first start.")
        self._said |= {change.name for change in (*found, *reasons["record"])} | {""}
        self._rescheduled += [change.name for change in reasons["ranks"] if not _is_of_loaders(change)]
        self.changes += [*new, *reasons["ignored"]]
        for reason, changes in reasons.items():
            if changes:
                rank_zero_info(f"AutoResume: {_SENTENCES[reason]}: {_listed(changes, '; ')}.")
        if new:
            is_over = self._saved.manifest.finished and not self.extended
            end = " The run had finished: they take effect when you give it more epochs or steps." if is_over else ""
            rank_zero_info(f"AutoResume: the run continues with new values: {_listed(new, '; ')}.{end}")

    def _check_can_go_on(self, changes: Sequence[Change]) -> None:
        manifest = self._saved.manifest
        begun = manifest.epoch + (manifest.batches > 0 and not manifest.finished)
        done = {"Trainer.max_epochs": begun, "Trainer.max_steps": manifest.step}
        for change in changes:
            why = ""
            if change.name in done and not is_longer(done[change.name] - 1, change.now):
                why = f"it is already at {done[change.name]} {_LIMITS[change.name.partition('.')[2]]}"
            elif change.name == f"{ROOT}.automatic_optimization":
                why = "Lightning counts the steps of a run differently then"
            if why:
                raise MisconfigurationException(
                    f"AutoResume: the run cannot continue with {change}: {why}. Set the old value, or choose another "
                    "dirpath to start a new run."
                )

    def check_optimizers(self, checkpoint: dict[str, Any] | None) -> None:
        """Note what the optimizers were created with, and decide on what changed; all ranks have to call it.

        Args:
            checkpoint: The checkpoint that the Trainer is about to restore; if changes take effect, its states of
                optimizers and schedulers are changed in place. None if there is none.

        Raises:
            MisconfigurationException: If something changed, and it is not said what is to be done; or if
                `configure_optimizers` made parameters.
        """
        if self._has_optimizers:
            return  # the fit makes others, as for a later stage
        optimizers, configs = self.trainer.optimizers, self.trainer.lr_scheduler_configs
        found = describe_optimizers(optimizers, configs, param_group_names(self.module, optimizers), self._known())
        self._now.groups, self._created = found.groups, [*map(weakref.ref, optimizers)]
        self._now.add(found)
        self._now.add(describe_loaders(given_train_loaders(self.trainer), _GIVEN, self._known()))
        self._has_optimizers = True
        self._refuse_late_parameters()
        self._decide()
        if checkpoint is None or self._before is None or self._before.exchanged:
            return
        names = [*self._rescheduled, *(change.name for change in self.changes)]
        if not names and self._before.groups == self._now.groups:
            return
        regrouped, manifest = bool(self._saved.shared["groups"]), self._saved.manifest
        if regrouped and any(name.endswith(".groups") for name in names):
            raise MisconfigurationException(
                "AutoResume: hooks changed the parameter groups of the run, and configure_optimizers now returns "
                "other groups than at the first start, so the saved states do not match them. Return the groups of "
                "the first start, or choose another dirpath."
            )
        try:
            options = {"regrouped": regrouped, "other_ranks": self._saved.world_size_changed}
            shared = self.module, self.trainer  # which schedules may refer to
            changed = ChangedOptimizers(optimizers, configs, (self._before, self._now), names, shared, **options)
            saved = checkpoint["optimizer_states"], checkpoint["lr_schedulers"]
            states = changed.states(*saved, manifest.step, manifest.epoch)
        except Exception as error:  # of schedules, which may end, or call what cannot be copied
            raise MisconfigurationException(
                f"AutoResume: the new schedules cannot be advanced to step {manifest.step}, which the run has reached "
                f"({describe_error(error)}). Give more steps to a schedule that ends earlier, or choose another "
                "dirpath to start a new run."
            ) from error
        changed_entries = dict(zip(("optimizer_states", "lr_schedulers"), states, strict=True))
        checkpoint |= changed_entries
        self.changed_states = copy.deepcopy(changed_entries)

    def _refuse_late_parameters(self) -> None:
        """Refuse parameters that `configure_optimizers` made: saved weights are loaded before it is called."""
        names = (name.removesuffix("_orig") for name, _ in self.module.named_parameters())  # of one that is masked
        if made := [name for name in names if name not in self._parameters]:
            raise MisconfigurationException(
                f"AutoResume: configure_optimizers created the parameters {list_names(made)}, so a resume could not "
                "load their saved values. Create them in __init__ or configure_model."
            )

    def check_loaders(self, loaders: Sequence[Any], *, resumes: bool) -> float | None:
        """Note the training loaders, and decide on what changed; those that a fit creates later are only noted.

        Returns:
            None if nothing changed in the loaders; else the new batch size over the old one, 1 if that is not known.
        """
        self._now.forget(_USED)  # a fit may create others for a later stage
        self._now.add(describe_loaders(loaders, _USED, self._known()))
        if self._has_loaders:  # those that are reloaded are the fit's
            return None
        self._has_loaders = True
        if self._has_optimizers:  # configure_optimizers may ask for the number of batches
            self._decide()
        _begun.add(self.module)
        changes = [one for one in self._differences()[0] if _is_of_loaders(one) and self._reason(one) != "ranks"]
        if not (changes and resumes):
            return None
        sizes = [change for change in changes if change.name == f"{_USED}.batch_size"]
        if len(loaders) != 1 or not sizes or not all(isinstance(x, int) for x in (sizes[0].before, sizes[0].now)):
            return 1.0
        return float(sizes[0].now / sizes[0].before)

    # -- what follows for other parts

    def is_known_change(self, path: str) -> bool:
        """Whether the value at a path, such as "module.net.2.p", was said to differ, or does not train."""
        owners = self._callbacks().items()
        if any(path.startswith(f"callbacks.{label}.") and hasattr(one, "training_arguments") for label, one in owners):
            return True
        names = [re.sub(r"(^|\.)hparams\.", lambda at: at[1] or f"{ROOT}.", name) for name in self._said if name]
        return any(f".{path}".endswith(f".{name}") for name in names)

    @property
    def has_other_data(self) -> bool:
        """Whether another data set takes effect."""
        return any(_is_of_loaders(change) and ".dataset" in change.name for change in self.changes)

    def restore(self, saved: SavedState, phase: Phase) -> None:
        """Load and set what another start changed once more, as the resume has restored old values."""
        if phase is not Phase.COMPARED:  # wrappers of optimizers keep options that were restored
            states = self.changed_states.get("optimizer_states", ())
            for optimizer, state in zip(self.trainer.optimizers, states, strict=False):
                options = [dict(group) for group in optimizer.param_groups]
                optimizer.load_state_dict(state)
                for group, known in zip(optimizer.param_groups, options, strict=False):
                    group.update(known | group)  # with what a new scheduler has added
            return
        owners: dict[str, Any] = {**dict(self.module.named_modules()), **self._callbacks(), ROOT: self.module}
        for change in self.changes:
            label, _, name = change.name.rpartition(".")
            owner, is_plain = owners.get(label), isinstance(change.now, bool | int | float | str)
            if is_plain and plain(getattr(owner, name, None)) == change.before:  # else a hook has set it
                setattr(owner, name, change.now)


def _add_callback(found: Configuration, describer: Describer, label: str, callback: Callback) -> None:
    """Add the arguments of a callback that may train: those that its class names, or all plain ones."""
    names, known = getattr(callback, "training_arguments", None), import_lightning("pytorch.callbacks")
    if isinstance(callback, tuple(getattr(known, name) for name in _OBSERVERS)) or (names is not None and not names):
        return
    arguments = arguments_of(callback).values()
    settings = [one for one in arguments if callable(one) or (is_comparable(plain(one)) and not is_place(one))]
    # one of the user's without arguments may be there to look or to stop
    is_record = names is None and not settings and not type(callback).__module__.startswith(f"{LIGHTNING}.")
    (found.records if is_record else found.kinds)[label] = IN_USE
    for name in names or ():
        describer.add_value(f"{label}.{name}", getattr(callback, name), Rule(texts_train=True))
    if names is None:
        describer.add(label, callback, is_told=is_record)


def _is_of_loaders(change: Change) -> bool:
    return change.name.startswith((f"{_USED}.", f"{_USED}["))


def _listed(changes: Sequence[Change], separator: str) -> str:
    more = len(changes) - _MOST_LINES
    return separator.join([*map(str, changes[:_MOST_LINES]), *([f"and {more} more"] if more > 0 else [])])
