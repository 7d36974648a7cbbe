"""Checkpoints in the form that Lightning expects, made of those that `read_checkpoint` read."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch import __version__ as lightning_version
from lightning.pytorch.utilities.rank_zero import rank_zero_info

from lightning_tricks._shared.partial_checkpoints import RECORD_KEY
from lightning_tricks._torch_compat.modules import set_state_dict_versions, state_dict_versions
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError
from lightning_tricks.checkpoint_remapping.core.files.reading import Checkpoint
from lightning_tricks.checkpoint_remapping.core.load_plan import LoadReport, plan_loading

# Entries that the Trainer does not restore, and which may hold placeholders
ARGUMENT_KEYS = ("hyper_parameters", "datamodule_hyper_parameters", "hparams_type", "hparams", "module_arguments")


def as_lightning_checkpoint(
    module: LightningModule, checkpoint: Checkpoint, *, fit: bool, **options: Any
) -> tuple[dict[str, Any], LoadReport | None]:
    """Return the dict that Lightning restores a module from, with the module's own names, and a report.

    A checkpoint of the Trainer keeps its training state if its names differ from the module's only in prefixes; of any
    other file only the weights are used, and a fit starts at step 0. A checkpoint of only what trained has the module's
    names, stays as it is, and has no report: `TrainableCheckpoint` completes it.

    Args:
        module: The module that takes the weights.
        checkpoint: What `read_checkpoint` returned.
        fit: Whether the training state is restored.
        **options: As in `load_weights`.

    Raises:
        CheckpointError: If the weights do not fit, or the training state holds other than plain values.
    """
    rest = {name: clone_mapped_tensors(value) for name, value in checkpoint.metadata.items()}
    if RECORD_KEY in rest:
        if fit:
            _refuse_placeholders(checkpoint)
        return {**rest, "state_dict": clone_mapped_tensors(checkpoint.state_dict)}, None
    plan = plan_loading(module, checkpoint, **options)
    own = module.state_dict()
    weights: Any = OrderedDict((name, plan.tensors.get(name, tensor)) for name, tensor in own.items())
    # Without their versions, modules would convert the weights from an old one
    set_state_dict_versions(weights, state_dict_versions(own) or {})
    found = plan.report.alignment
    same_model = found.by_prefix and not plan.report.mismatched and found.loaded == len(found.matches)
    if checkpoint.kind == "lightning" and (same_model or not fit):
        if fit:
            _refuse_placeholders(checkpoint)
        return {**rest, "state_dict": weights}, plan.report
    if fit:
        rank_zero_info(
            f"CheckpointRemapping: only the weights of {checkpoint.source} are loaded. The fit starts at step 0 with "
            f"new optimizers. {plan.report}"
        )
    fresh: dict[str, Any] = {"state_dict": weights, "pytorch-lightning_version": lightning_version}
    return fresh | ({"optimizer_states": [], "lr_schedulers": []} if fit else {}), plan.report


class SafeStateDict(dict[str, Any]):
    """The weights of a checkpoint that was read safely; the type distinguishes them from other state dicts."""

    def __init__(self, origin: Checkpoint, weights: Mapping[str, Any]) -> None:
        super().__init__(weights)
        self.origin = origin

    def as_checkpoint(self) -> Checkpoint:
        """Return the checkpoint with these weights, as hooks of the module may have changed them."""
        return replace(self.origin, state_dict=dict(self))


class SafeCheckpoint(dict[str, Any]):
    """A checkpoint that was read safely, for Lightning: its `state_dict` is always a `SafeStateDict`."""

    def __init__(self, origin: Checkpoint, values: Mapping[str, Any]) -> None:
        super().__init__(values)
        self.origin = origin

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        if name == "state_dict" and not isinstance(value, SafeStateDict):
            value = self[name] = SafeStateDict(self.origin, value)
        return value


def original_device(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage:
    """Move a storage to the device that it was saved from; it stays on the CPU if there is no such device."""
    try:
        there: torch.UntypedStorage = torch.serialization.default_restore_location(storage, location)
        return there
    except (AssertionError, RuntimeError):
        return storage


def _refuse_placeholders(checkpoint: Checkpoint) -> None:
    inert = [part for part in checkpoint.placeholders if part.location.partition(".")[0] not in ARGUMENT_KEYS]
    if inert:
        raise CheckpointError(
            f"{checkpoint.source} cannot be resumed: {inert[0].location} is a {inert[0].name}, which is not restored, "
            "as that would run code of the file. Its weights load with load_weights, or in validate, test and predict."
        )


def clone_mapped_tensors(value: Any) -> Any:
    """Copy mapped tensors, so that the file may be overwritten while they are in use."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return type(value)({name: clone_mapped_tensors(part) for name, part in value.items()})
    if isinstance(value, list | tuple) and type(value) in (list, tuple):
        return type(value)(clone_mapped_tensors(part) for part in value)
    return value
