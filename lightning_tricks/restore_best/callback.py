"""The callback `RestoreBest`."""

from __future__ import annotations

import math
from typing import Any, Literal

from torch import Tensor

from lightning_tricks._callback import FLATTENING, TrickCallback
from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.observers import observe_validation_ends
from lightning_tricks._lightning_compat.sharded import is_sharding
from lightning_tricks._shared.checks import check_choice, did_you_mean
from lightning_tricks._shared.host_copies import HostCopies
from lightning_tricks._shared.tensors import outside_inference_mode
from lightning_tricks._shared.text import list_names
from lightning_tricks.restore_best.functional import put_back_, weights_and_buffers


class RestoreBest(TrickCallback):
    """Restore the weights and buffers of the best validation when `fit` returns.

    It keeps the weights that were validated: with Lightning's `WeightAveraging`, or any callback that exchanges weights
    for a validation, the averaged ones. They are copied to host memory after the last batch of each validation, without
    waiting for a CUDA device, and put back in `on_fit_end`. The best value is the first of equal ones; NaN is never the
    best; the sanity check does not count. On multiple ranks the value of rank zero counts.

    Checkpoints contain the last weights, including those of the end of a fit, so that more epochs continue from the
    last weights and not from the best. They also contain a copy of the best, so that a run resumed by `AutoResume` or
    `ckpt_path` knows it. Under `ModelParallelStrategy` each rank keeps its shards, which only `AutoResume` restores.

    A fit that is interrupted by an exception or Ctrl+C leaves the module as it was then; `restore` puts the best
    weights into it. Each fit starts from the beginning. If layers were added or removed since the best validation, a
    warning names them, and the module stays as it is.

    Args:
        monitor: The name of one logged value, such as `"val/loss"`.
        mode: Whether the smallest or the largest value is the best.

    Attributes:
        best_value: The best value of the last fit; None before a validation has given one.
        best_epoch: The epoch of this validation, counted from 0, as in the names of checkpoints.
        best_step: The number of optimizer steps before this validation.

    Raises:
        TypeError: If `monitor` is not one name.
        ValueError: If `mode` is neither "min" nor "max".
        MisconfigurationException: In a fit under FSDP1 or DeepSpeed, or if the first validation does not log the value;
            the message lists the logged values.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[RestoreBest("val/acc", mode="max")], accelerator="cpu", logger=False)
    """

    def __init__(self, monitor: str, mode: Literal["min", "max"] = "min") -> None:
        if not isinstance(monitor, str) or not monitor:
            raise TypeError(f"monitor must be the name of one logged value, such as 'val/loss', got {monitor!r}.")
        self.monitor = monitor
        self.mode = check_choice("mode", mode, ("min", "max"))
        self._rank: list[int] = []  # of a sharded fit: the rank, and the number of ranks
        self._fits = True
        self._forget()

    def _forget(self) -> None:
        self.best_value: float | None = None
        self.best_epoch = self.best_step = -1
        self._num_validations = 0
        self._validated: dict[str, Tensor] | None = None  # between the last batch of a validation and its end
        self._kept: dict[str, Tensor] | None = None
        self._copies = [HostCopies(), HostCopies()]  # the memory of what is kept, and of what is validated

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Reset the state, and observe validations."""
        super().setup(trainer, pl_module, stage)
        self._fits = stage == "fit"
        if not self._fits:
            return
        message = "RestoreBest cannot read shards of {}: use ModelParallelStrategy, or DDP."
        self.refuse_strategies(trainer, FLATTENING, message)
        self._forget()
        self._rank = [trainer.global_rank, trainer.world_size] if is_sharding(trainer.strategy) else []

        @outside_inference_mode()
        def copy_validated(_: str) -> None:
            counts = not trainer.sanity_checking
            self._validated = self._copies[1].take(weights_and_buffers(pl_module), waits=False) if counts else None

        self._installed.enter_context(observe_validation_ends(trainer, copy_validated))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Keep the validated weights if they are the best."""
        validated, self._validated = self._validated, None
        if validated is None:  # no validation of a fit
            return
        self._num_validations += 1
        value, is_best = trainer.strategy.broadcast(self._judge(trainer.callback_metrics))
        if value is None:
            if self._num_validations == 1:
                raise MisconfigurationException(is_best)
            rank_zero_warn(is_best)  # before the run was resumed, a validation had it
        elif is_best:
            self.best_value, self.best_epoch, self.best_step = value, trainer.current_epoch, trainer.global_step
            self._kept = validated
            self._copies.reverse()

    def _judge(self, metrics: dict[str, Tensor]) -> tuple[float | None, Any]:
        """Return the value, and whether it is the best; or None, and what to say about it."""
        if self.monitor not in metrics:
            return None, (
                f"RestoreBest(monitor={self.monitor!r}): this validation did not log it. Log it, or name one of the "
                f"logged values: {list_names(metrics, 20)}.{did_you_mean(self.monitor, metrics)}"
            )
        value, sign = float(metrics[self.monitor]), 1 if self.mode == "min" else -1
        return value, not math.isnan(value) and (self.best_value is None or sign * value < sign * self.best_value)

    def restore(self, module: LightningModule) -> None:
        """Put the best weights and buffers into a module, and forget them.

        Raises:
            MisconfigurationException: If none are kept: no validation has had a value yet, or the fit has ended and put
                them into its module. Or if the layers of the module have changed.
        """
        if self._kept is None:
            raise MisconfigurationException("RestoreBest has no weights to restore.")
        for copies in self._copies:
            copies.wait()
        if differing := put_back_(module, self._kept):
            raise MisconfigurationException(
                f"RestoreBest: the module has other layers than in its best validation, in epoch {self.best_epoch}: "
                f"{list_names(differing)}. It was not modified. Load a checkpoint into a module built as it was then."
            )
        self._kept = None

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Restore the best weights, after the last checkpoint was written."""
        if trainer.strategy.reduce_boolean_decision(self._kept is not None):
            where = f"epoch {self.best_epoch}, step {self.best_step}"
            try:
                self.restore(pl_module)
                self.say(f"restored the weights of {where}: {self.monitor} {self.best_value:.6g}")
            except MisconfigurationException as error:
                rank_zero_warn(str(error))
        elif self._num_validations:
            rank_zero_warn(
                f"RestoreBest: the module keeps the last weights. {self.monitor} was NaN in {self._num_validations} "
                "validations, or the run was resumed from a checkpoint that has only the shards of rank zero."
            )
        else:
            self.say("no validation ran, so the module keeps the last weights")
        self._kept, self._copies = None, [HostCopies(), HostCopies()]  # gives the memory back
        super().on_fit_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and the weights and buffers of this rank that belong to it."""
        always = {"validations": self._num_validations, "monitor": [self.monitor, self.mode]}
        if self._kept is None:
            return always
        for copies in self._copies:
            copies.wait()
        best = {"value": self.best_value, "epoch": self.best_epoch, "step": self.best_step}
        return {**best, **always, "rank": self._rank, "weights": self._kept}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` returned in a fit, unless it has another monitor or the shards of another rank."""
        if not self._fits:  # a checkpoint is tested: what is known of the last fit stays
            return
        now = [self.monitor, self.mode]
        if (then := state_dict.get("monitor", now)) != now:
            rank_zero_warn(f"RestoreBest: the best of the checkpoint is by {then}, not by {now}: it is ignored.")
            return
        self._num_validations = state_dict.get("validations", 0)
        if state_dict.get("rank") == self._rank:
            self.best_value, self.best_epoch, self.best_step = (state_dict[name] for name in ("value", "epoch", "step"))
            self._kept = state_dict["weights"]
        elif "rank" in state_dict:  # of rank zero, if the number of ranks is another one
            rank_zero_warn(
                "RestoreBest: the best weights of the checkpoint are shards of another number of ranks. They are "
                "dropped: the best of the validations from now on counts."
            )

    def __getstate__(self) -> dict[str, Any]:
        # after an exception they are kept for `restore`, but not in a copy
        return {**super().__getstate__(), "_copies": [HostCopies(), HostCopies()], "_validated": None, "_kept": None}
