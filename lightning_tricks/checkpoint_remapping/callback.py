"""The callback `CheckpointRemapping`."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lightning_tricks._callback import FLATTENING, SHARDING, TrickCallback
from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    TrainerFn,
    lightning_version,
    rank_zero_info,
)
from lightning_tricks._lightning_compat.guards import overriding
from lightning_tricks._shared.added_parameters import RECORD_KEY
from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.tensors import shard_as
from lightning_tricks._torch_compat.modules import set_state_dict_versions, state_dict_versions
from lightning_tricks.checkpoint_remapping.core.atomic_loading import load_tensors
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError
from lightning_tricks.checkpoint_remapping.core.files.checkpoint import Checkpoint
from lightning_tricks.checkpoint_remapping.core.files.reading import read_checkpoint
from lightning_tricks.checkpoint_remapping.core.loading import LoadReport, load_weights, plan_loading
from lightning_tricks.checkpoint_remapping.core.remapping import strip_wrappers
from lightning_tricks.checkpoint_remapping.load_from_checkpoint import ARGUMENT_KEYS


class CheckpointRemapping(TrickCallback):
    """Load weights from any checkpoint format, with any names, into the Trainer's module, without running its code.

    With `path`, each rank loads the weights before training starts; sharded parameters receive their shards. Nothing is
    loaded if the fit resumes from a checkpoint (`ckpt_path=`; before a checkpoint that `TrainableCheckpoint` made
    smaller, the weights are loaded first), if the Trainer has trained before, or if the module comes from
    `load_from_checkpoint` of `TricksMixin`. With and without `path`, `fit/validate/test/predict(ckpt_path=...)` accept
    weights of other projects, names with prefixes and safetensors files, read by `read_checkpoint`. A fit from a file
    that is not a checkpoint of the Trainer starts at step 0 with new optimizers, which a log line reports.

    Args:
        path: A file or an address, as in `read_checkpoint`.
        rules: As in `load_weights`: `"auto"`; a list of rules or the path of a file of rules, which are applied before
            the rest is matched; `"wrappers"`; or None for names as they are.
        submodule: The part of the module that takes the weights of `path`, such as `"backbone"`.
        allow_missing: As in `load_weights`: patterns of names of the module that may be missing.
        allow_unexpected: Patterns of names of the file that may be left over.
        allow_mismatched: Patterns of names of the module that keep their values if shapes differ.
        interpolate: Patterns of position embeddings that are resized.
        accept: Patterns of names of the module whose suggestions are taken, as in `load_weights`.
        clean_on_save: Whether the parts of names that `torch.compile`, DDP and thop add are removed from the
            checkpoints that the Trainer writes. This does not apply to weights-only checkpoints (`weights_only=True`:
            call `save_weights` instead), nor to strategies that write their own files. Loading such a checkpoint into a
            compiled submodule needs this callback, which finds the names.

    Without a Trainer, call `load_weights`. A callback cannot change `load_from_checkpoint`: use `TricksMixin`, or call
    `load_weights` on the module.

    Attributes:
        report: The `LoadReport` of the last file that was loaded, None before.

    Raises:
        TypeError: If an argument is of the wrong type.
        MisconfigurationException: In a fit with `path` under FSDP1 or DeepSpeed, or if the module has no such
            submodule.
        CheckpointError: As in `load_weights` and `read_checkpoint`; the module is then not modified.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> pretrained = CheckpointRemapping("weights.safetensors", submodule="backbone", allow_unexpected="fc.*")
        >>> trainer = Trainer(callbacks=[pretrained], accelerator="cpu", logger=False)
    """

    path_arguments = ("path", "rules")

    def __init__(
        self,
        path: str | None = None,
        rules: str | list[Any] | dict[str, Any] | None = "auto",
        *,
        submodule: str | None = None,
        allow_missing: str | list[str] = (),  # type: ignore[assignment]
        allow_unexpected: str | list[str] = (),  # type: ignore[assignment]
        allow_mismatched: str | list[str] = (),  # type: ignore[assignment]
        interpolate: str | list[str] = (),  # type: ignore[assignment]
        accept: str | list[str] = (),  # type: ignore[assignment]
        clean_on_save: bool = False,
    ) -> None:
        if path is not None:
            check_path("path", path, "a file, or its address", takes_address=True)
        if isinstance(rules, str | os.PathLike):
            check_path("rules", rules, "a file of rules")
        self.path = path
        self.rules = rules
        self.submodule = submodule
        self.allow_missing = allow_missing
        self.allow_unexpected = allow_unexpected
        self.allow_mismatched = allow_mismatched
        self.interpolate = interpolate
        self.accept = accept
        self.clean_on_save = clean_on_save
        self.report: LoadReport | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Replace what reads the Trainer's checkpoints."""
        super().setup(trainer, pl_module, stage)
        strategy = trainer.strategy
        if self.path is not None and stage == "fit":
            remedy = "call load_weights(model, path) before the fit, or use ModelParallelStrategy."
            message = f"CheckpointRemapping(path=...) cannot reach the parameters under {{}}: {remedy}"
            self.refuse_strategies(trainer, FLATTENING, message)
        load = partial(self._load_checkpoint, trainer, strategy.load_checkpoint)
        self._installed.enter_context(overriding(strategy, load_checkpoint=load))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Load the weights of `path`, unless the fit resumes or the Trainer has trained before."""
        if self.path is None or trainer.global_step > 0:
            return
        if trainer.ckpt_path is not None:
            self.say(f"{self.path} is not loaded: the fit resumes from {trainer.ckpt_path}")
            return
        if self.added_by_mixin and getattr(pl_module, "load_report", None) is not None:
            self.say(f"{self.path} is not loaded: the module comes from load_from_checkpoint")
            return
        module = self._submodule_of(pl_module)
        plan = plan_loading(module, self.path, **self.load_options())
        load_tensors(module, _sharded_as_in(module, plan.tensors))
        self.report = plan.report
        self.say(f"loaded {self.path}. {self.report}")

    def load_pretrained(self, trainer: Trainer, pl_module: LightningModule) -> bool:
        """Load the weights of `path` on this rank, if a checkpoint contains only what was trained since."""
        if self.path is None:
            return False
        report = load_weights(self._submodule_of(pl_module), self.path, **self.load_options())
        rank_zero_info(f"CheckpointRemapping: loaded {self.path}, as the checkpoint has only trained weights. {report}")
        return True

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Remove wrappers' parts from the names in a checkpoint before it is written, also after a fit."""
        if self.clean_on_save and not isinstance(trainer.strategy, SHARDING):  # these write files of their own
            own = checkpoint["state_dict"]
            checkpoint["state_dict"] = {new: own[old] for old, new in strip_wrappers(own).items() if new is not None}

    def _load_checkpoint(
        self, trainer: Trainer, load: Callable[..., Any], path: str | os.PathLike[str], *args: Any, **kwargs: Any
    ) -> Any:
        """Return what the Trainer restores of a file, with the names of its module; `load` is the strategy's own."""
        if not isinstance(trainer.strategy, SHARDING):
            options = {"fit": trainer.state.fn == TrainerFn.FITTING, **self.load_options()}
            loaded, self.report = _as_lightning_checkpoint(trainer.lightning_module, read_checkpoint(path), **options)
            return loaded
        if os.path.isfile(path) and read_checkpoint(path).kind != "lightning":  # noqa: PTH113
            raise CheckpointError(
                f"{path} is not a checkpoint of the Trainer, and {type(trainer.strategy).__name__} cannot load another "
                "file with ckpt_path=. Pass it as CheckpointRemapping(path=...) instead."
            )
        return load(path, *args, **kwargs)

    def load_options(self) -> dict[str, Any]:
        """Return the arguments for `load_weights` that this callback was given."""
        names = ("rules", "allow_missing", "allow_unexpected", "allow_mismatched", "interpolate", "accept")
        return {name: getattr(self, name) for name in names}

    def _submodule_of(self, pl_module: LightningModule) -> torch.nn.Module:
        try:
            return pl_module.get_submodule(self.submodule or "")
        except AttributeError as error:
            raise MisconfigurationException(f"CheckpointRemapping(submodule={self.submodule!r}): {error}.") from error


def _as_lightning_checkpoint(
    module: LightningModule, checkpoint: Checkpoint, *, fit: bool, **options: Any
) -> tuple[dict[str, Any], LoadReport | None]:
    """Return the dict that Lightning restores a module from, with the module's own names, and a report.

    A checkpoint of the Trainer keeps its training state if it has all tensors of the module and no others, and names
    differ only in prefixes; of any other file only the weights are used, and a fit starts at step 0. A checkpoint of
    only what trained has the module's names, stays as it is, and has no report: `TrainableCheckpoint` completes it.

    Args:
        module: The module that takes the weights.
        checkpoint: What `read_checkpoint` returned.
        fit: Whether the training state is restored.
        **options: As in `load_weights`.

    Raises:
        CheckpointError: If the weights do not fit, or the training state holds other than plain values.
    """
    rest = copy.deepcopy(checkpoint.metadata)  # so that the file, which is mapped, may be overwritten
    if RECORD_KEY in rest:
        if fit:
            _refuse_placeholders(checkpoint)
        return {**rest, "state_dict": copy.deepcopy(checkpoint.state_dict)}, None
    plan = plan_loading(module, checkpoint, **options)
    if fit and (plan.report.alignment.lacking or plan.report.unexpected):
        checkpoint = replace(checkpoint, kind="state_dict")  # its optimizers have states of other parameters
    own = module.state_dict()
    weights: Any = OrderedDict((name, plan.tensors.get(name, tensor)) for name, tensor in own.items())
    # Without their versions, modules would convert the weights from an old one
    set_state_dict_versions(weights, state_dict_versions(own) or {})
    found = plan.report.alignment
    same_model = found.by_prefix and not plan.report.mismatched and found.loaded == len(found.matches)
    if checkpoint.kind == "lightning" and (same_model or not fit):
        if fit:
            _refuse_placeholders(checkpoint)
        names = {**dict.fromkeys(checkpoint.state_dict), **found.renamed}
        return {**_renamed(rest, names), "state_dict": weights}, plan.report
    if fit:
        rank_zero_info(
            f"CheckpointRemapping: only the weights of {checkpoint.source} are loaded. The fit starts at step 0 with "
            f"new optimizers. {plan.report}"
        )
    fresh: dict[str, Any] = {"state_dict": weights, "pytorch-lightning_version": lightning_version()}
    return fresh | ({"optimizer_states": [], "lr_schedulers": []} if fit else {}), plan.report


def _renamed(values: Any, names: Mapping[str, str | None]) -> Any:
    """Rename the keys of nested dicts that have names of weights alone, as copies of the weights have.

    Args:
        values: The dicts.
        names: All names of the file -> that of the module, or None if it is the same.
    """
    if not isinstance(values, dict):
        return values
    own = names if values.keys() <= names.keys() else {}
    return type(values)((own.get(key) or key, _renamed(value, names)) for key, value in values.items())


def _refuse_placeholders(checkpoint: Checkpoint) -> None:
    inert = [part for part in checkpoint.placeholders if part.location.partition(".")[0] not in ARGUMENT_KEYS]
    if inert:
        raise CheckpointError(
            f"{checkpoint.source} cannot be resumed: {inert[0].location} is a {inert[0].name}, which is not restored, "
            "as that would run code of the file. Its weights load with load_weights, or in validate, test and predict."
        )


def _sharded_as_in(module: torch.nn.Module, tensors: dict[str, Any]) -> dict[str, Any]:
    """Return the tensors of a plan; for parameters that are sharded, the shards of this rank."""
    own = module.state_dict()
    return {name: shard_as(tensor, own.get(name, tensor)) for name, tensor in tensors.items()}
