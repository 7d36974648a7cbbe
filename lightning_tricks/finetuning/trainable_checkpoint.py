"""The callback `TrainableCheckpoint`."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

from lightning_tricks._callback import FLATTENING, TrickCallback
from lightning_tricks._lightning_compat.checkpoints import checkpoint_contents_changed
from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    TrainerFn,
    rank_zero_info,
)
from lightning_tricks._lightning_compat.guards import overriding
from lightning_tricks._lightning_compat.sharded import partial_shards_loaded
from lightning_tricks._lightning_compat.trainer import callbacks_of_type
from lightning_tricks._shared.added_parameters import RECORD_KEY
from lightning_tricks._shared.patterns import as_patterns, strip_compile_prefix
from lightning_tricks._shared.tensors import is_sharded
from lightning_tricks._shared.text import format_bytes
from lightning_tricks.finetuning.core.trainable_weights import (
    BaseMismatchError,
    TensorRecord,
    base_fingerprints,
    complete_checkpoint,
    forget,
    leave_out_base,
    recorded_base,
    trainable_names,
    weights_of,
)


class TrainableCheckpoint(TrickCallback):
    """Save only what trained, and restore it exactly.

    Each checkpoint that the Trainer writes (by ModelCheckpoint, `AutoResume` or `trainer.save_checkpoint`) leaves out
    the tensors that training did not change, and contains a 64-bit fingerprint of each instead. It contains all
    parameters that are or were trainable, those that `GradualUnfreezing` will release, so that each checkpoint of a fit
    loads into its module, and everything else that differs from the base: BatchNorm statistics, averaged weights,
    values that you set yourself, new parameters such as those of `LoRA`.

    The base is the state of the module when its first training epoch with this callback begins, after
    CheckpointRemapping has loaded weights. It stays the base in later fits of the same module object, and in a resumed
    run. With Lightning's EMAWeightAveraging, frozen weights are saved as well, as it changes them by rounding. Such a
    checkpoint validates, tests and predicts with the averaged weights.

    `fit/validate/test/predict(ckpt_path=...)` need this callback and a module that is built as before: the tensors that
    were left out are compared with the module and taken from it, after CheckpointRemapping has loaded its weights.
    `load_from_checkpoint` of `TricksMixin` does the same, and `load_trainable` does it without a Trainer. Full
    checkpoints load as usual. Without this callback, Lightning refuses the weights as incomplete, and the error gives
    the remedy.

    After a fit, `trainer.save_checkpoint(path, weights_only=True)` writes a full checkpoint.

    Args:
        extra: Patterns (a glob, or `re:` and a regular expression) of names of parameters and buffers that are always
            saved, such as frozen layers that start from random weights; `"*"` leaves nothing out.

    Raises:
        TypeError: If a pattern is not a string.
        ValueError: If a pattern is empty or not a regular expression.
        MisconfigurationException: Under FSDP1 and DeepSpeed, which write their own files, or if a pattern matches
            nothing.
        BaseMismatchError: If a checkpoint is loaded into a module of another base; the message lists what differs.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[TrainableCheckpoint()], accelerator="cpu", logger=False)
    """

    def __init__(self, extra: str | list[str] = ()) -> None:  # type: ignore[assignment]
        as_patterns("extra", extra)
        self.extra = extra
        super().__init__()

    def _forget_run(self) -> None:
        self._is_installed = False  # between setup and teardown

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Install the hooks by which the Trainer saves and restores smaller checkpoints."""
        super().setup(trainer, pl_module, stage)
        remedy = "Train with one device or DDP, or remove TrainableCheckpoint."
        message = f"TrainableCheckpoint cannot leave anything out of the files that {{}} writes by itself. {remedy}"
        self.refuse_strategies(trainer, FLATTENING, message)
        changed = checkpoint_contents_changed(
            trainer,
            after_dump=lambda checkpoint: self._leave_out_base(trainer, checkpoint),
            before_restore=lambda checkpoint: _complete(trainer, checkpoint),
        )
        self._installed.enter_context(changed)
        self._installed.enter_context(partial_shards_loaded(trainer.strategy, _names_left_out))
        self._is_installed = True

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse patterns that match nothing."""
        names = [strip_compile_prefix(name) for name in pl_module.state_dict()]
        for pattern in as_patterns("extra", self.extra):
            if not any(map(pattern.matches, names)):
                raise MisconfigurationException(
                    f"TrainableCheckpoint(extra=...): pattern {pattern.text!r} matches none of the {len(names):,} "
                    "names in the module's state dict. Correct or remove it."
                )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note the base, before the first step and after whatever loads weights where a fit starts."""
        if pl_module not in _BASES:
            _BASES[pl_module] = _Base(base_fingerprints(pl_module))
        later = {name for trick in callbacks_of_type(trainer, TrickCallback) for name in trick.changes_later(pl_module)}
        forget(_BASES[pl_module].records, pl_module, later)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note which parameters were trainable in this epoch, as they may be frozen in the next."""
        forget(_BASES[pl_module].records, pl_module, trainable_names(pl_module))

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Make a checkpoint that is saved after a fit smaller, when the module's own hook has seen the whole."""
        if self._is_installed:
            return
        self._installed.close()
        save = trainer.strategy.save_checkpoint

        def save_smaller(checkpoint: dict[str, Any], *args: Any, **kwargs: Any) -> None:
            self._installed.close()
            self._leave_out_base(trainer, checkpoint)
            save(checkpoint, *args, **kwargs)

        self._installed.enter_context(overriding(trainer.strategy, save_checkpoint=save_smaller))

    def _leave_out_base(self, trainer: Trainer, checkpoint: dict[str, Any]) -> None:
        module = trainer.lightning_module
        base = _BASES.get(module)
        is_written = trainer.is_global_zero or any(map(is_sharded, checkpoint["state_dict"].values()))
        if base is None or not is_written:  # nothing has trained yet; or nobody writes it
            return
        extra = as_patterns("extra", self.extra)
        always = {name for name in base.records if any(pattern.matches(name) for pattern in extra)}
        # After a fit others may have restored requires_grad: which parameters trained was noted during the fit
        forget(base.records, module, always | (trainable_names(module) if self._is_installed else set()))
        whole = _sizes(checkpoint)
        leave_out_base(checkpoint, module, base.records)
        if not base.is_reported:
            base.is_reported = True
            line = _describe(whole, _sizes(checkpoint))
            if self._is_installed:
                self.say(line)
            else:  # the fit is over
                rank_zero_info(f"TrainableCheckpoint: {line}")


_AVERAGED = " The end of a fit with weight averaging may change frozen weights by rounding: resume with a new module."


@dataclass
class _Base:
    """The base of a module, without the tensors that are saved in any case.

    Attributes:
        records: A record of each tensor that may be left out.
        is_reported: Whether a line has said how much is left out.
    """

    records: dict[str, TensorRecord]
    is_reported: bool = False


# Of the module, not of a fit: the weights that a first fit has trained are not the base of a second fit
_BASES: WeakKeyDictionary[LightningModule, _Base] = WeakKeyDictionary()


def _names_left_out(checkpoint: Mapping[str, Any]) -> Collection[str]:
    return recorded_base(checkpoint) if RECORD_KEY in checkpoint else ()


def _complete(trainer: Trainer, checkpoint: dict[str, Any]) -> None:
    """Complete a checkpoint that was read, on all ranks; an error of one rank is raised on all."""
    module = trainer.lightning_module
    if RECORD_KEY not in checkpoint:
        # The weights of a full checkpoint are not the base: the module will be built without them
        if trainer.state.fn == TrainerFn.FITTING and module not in _BASES:
            _BASES[module] = _Base(base_fingerprints(module))
        return
    base, error, whole = recorded_base(checkpoint), None, {}
    try:
        whole = _completed_with_pretrained_weights(trainer, checkpoint)
    except BaseMismatchError as raised:
        error = BaseMismatchError(f"{raised}{_AVERAGED}") if "averaging_state" in checkpoint else raised
    if not trainer.strategy.reduce_boolean_decision(error is None):
        raise error or BaseMismatchError("The module of another rank is not the one that was trained: see its error.")
    del checkpoint[RECORD_KEY]
    checkpoint.update(whole)
    _BASES[module] = _Base(base)


def _completed_with_pretrained_weights(trainer: Trainer, checkpoint: dict[str, Any]) -> dict[str, Any]:
    module, resumes = trainer.lightning_module, trainer.state.fn == TrainerFn.FITTING
    try:
        return complete_checkpoint(module, checkpoint, strict=module.strict_loading, to_resume=resumes)
    except BaseMismatchError:
        # Callbacks that load weights where a fit starts do not do so in a fit that resumes, nor in a test
        if not sum(trick.load_pretrained(trainer, module) for trick in callbacks_of_type(trainer, TrickCallback)):
            raise
    return complete_checkpoint(module, checkpoint, strict=module.strict_loading, to_resume=resumes)


def _sizes(checkpoint: dict[str, Any]) -> list[int]:
    return [tensor.nbytes for _, _, tensor in weights_of(checkpoint)]


def _describe(whole: list[int], saved: list[int]) -> str:
    if len(saved) == len(whole):
        return f"saves all {len(whole):,} tensors, as none stays frozen and unchanged"
    return (
        f"saves {len(saved):,} of {len(whole):,} tensors, {format_bytes(sum(saved))} of {format_bytes(sum(whole))}; "
        "the others come from the module that loads it"
    )
