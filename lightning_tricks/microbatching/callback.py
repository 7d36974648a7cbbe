"""The callback `Microbatching`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from torch import nn

from lightning_tricks._callback import SHARDING, TrickCallback
from lightning_tricks._lightning_compat.ddp import ddp_wrapper
from lightning_tricks._lightning_compat.flavor import LightningModule, MisconfigurationException, Trainer
from lightning_tricks._lightning_compat.microbatches import batches_run_by, losses_changed_by
from lightning_tricks._lightning_compat.trainer import model_averager
from lightning_tricks._shared.checks import check_choice, check_optional_count
from lightning_tricks._shared.report_parts import Facts
from lightning_tricks.microbatching.batch_runner import WHOLE, BatchRunner, Found
from lightning_tricks.microbatching.core.batches import Count, TargetMean


class Microbatching(TrickCallback):
    """Split batches into microbatches that fit in memory, with the loss and the gradient of the whole batch.

    `training_step` is called once per microbatch; everything else happens once per batch: hooks, the optimizer step,
    progress and logging. Microbatches count by their rows. A loss that is neither a mean nor a sum over the rows is an
    error. A cross-entropy with class weights or ignored targets is recognized by the calls in `training_step`. For any
    other loss, such as a contrastive one, the gradient of as many rows as fit is compared with that of two parts of
    them, before the first batch is split and occasionally later. With dropout, this is done with the modules in
    evaluation mode; each microbatch draws its own random numbers later.

    With `size=None` nothing changes until memory runs out in a training batch. The changes of that attempt are then
    undone (gradients, random state, buffers, metrics, logged values), and the batch is tried again in microbatches of
    half the rows, and so on. All ranks agree on the size, which is kept for the run and saved in checkpoints. DDP then
    averages gradients after the backward passes, not during them. A fixed number of rows is cheaper: DDP averages
    during the backward pass of the last microbatch.

    With `count`, the gradient of an optimizer step is that of the mean over all targets of the batches that
    `accumulate_grad_batches` accumulates, in their microbatches and on all ranks, however unequal their numbers of
    targets are. The loss has to be the mean over the targets of the batch that `training_step` gets. A logged value
    that equals it is logged as the mean over the targets, of an epoch too unless a batch size is logged with it.
    Whatever has no targets counts nothing: the NaN of `cross_entropy` is replaced by zero; a loss that divides by a
    number of targets of its own has to keep its gradient finite, as by `mask.sum().clamp(min=1)`.

    Args:
        size: The largest number of rows of a microbatch, at least 1; None finds it when memory runs out. "whole" cuts
            no batch, as a number that is at least the batch size does: for `count` alone.
        on_mismatch: "raise" raises an error if microbatches change the loss, as with BatchNorm in training mode; "warn"
            warns, and trains with the mean over the rows, or over what `count` counts.
        count: Returns the number of targets of a batch, an int or a tensor of shape (), or with class weights the sum
            of the weights of the targets; "labels" counts `batch["labels"] != -100`. The number is compared with the
            targets of `cross_entropy` and `nll_loss` in the first batch, and after 32, 64, 128, ... batches. None for
            losses that are means or sums over the rows.

    Raises:
        TypeError: If `size` is neither a whole number nor "whole", or `count` is neither "labels" nor a callable.
        ValueError: If `size` is less than 1, or `on_mismatch` is unknown.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[Microbatching()], accelerator="cpu", logger=False)
    """

    training_arguments = ("size", "on_mismatch", "count")

    def __init__(
        self,
        size: int | Literal["whole"] | None = None,
        *,
        on_mismatch: Literal["raise", "warn"] = "raise",
        count: Count | None = None,
    ) -> None:
        self.size: Any = size if size == "whole" else check_optional_count("size", size)
        self.on_mismatch = check_choice("on_mismatch", on_mismatch, ("raise", "warn"))
        if count not in (None, "labels") and not callable(count):
            raise TypeError(f'count must be "labels", a callable of the batch or None, got {count!r}.')
        self.count = count
        self._found = Found()
        super().__init__()

    def _forget_run(self) -> None:
        self._mean: TargetMean | None = None

    @property
    def current_size(self) -> int | None:
        """The current largest number of rows of a microbatch; None while batches are whole."""
        return self._found.found if self.size is None else None if self.size == "whole" else self.size

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise an error for unsupported optimization or strategies, and forget the last fit."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self._found = Found(reduction=None if self.count is None else "mean")
        if not pl_module.automatic_optimization:
            raise MisconfigurationException(
                "Microbatching needs automatic optimization, to know which backward passes belong to a batch: remove "
                "`self.automatic_optimization = False`, or cut the batch in `training_step`."
            )
        remedy = "use DDP, or the `train_micro_batch_size_per_gpu` of DeepSpeed's own configuration."
        self.refuse_strategies(trainer, SHARDING, f"Microbatching does not work under {{}}: {remedy}")
        if self.count is not None:
            self._mean = TargetMean(self.count, trainer.strategy.root_device)
            self._installed.enter_context(losses_changed_by(trainer, self._mean.changed_loss))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Take over what automatic optimization does with a batch."""
        if self.size is None and trainer.world_size > 1 and waits_in_forward(pl_module):
            raise MisconfigurationException(
                "Microbatching(size=None): ranks cannot agree on a size with SyncBatchNorm layers: if one rank ran "
                "out of memory, the others would wait forever. Give a number of rows, such as Microbatching(size=8)."
            )
        if (wrapper := ddp_wrapper(trainer)) is not None and wrapper.static_graph:
            raise MisconfigurationException(
                "Microbatching does not work with DDPStrategy(static_graph=True), whose first backward pass has to "
                "average gradients. Leave static_graph out."
            )
        if self._mean is not None and model_averager(trainer) is not None:
            raise MisconfigurationException(
                "Microbatching(count=...) needs ranks that average gradients in each step: leave out the "
                "`model_averaging_period` of DDPStrategy."
            )
        size = WHOLE if self.size == "whole" else self.size
        runner = BatchRunner(trainer, size, self.on_mismatch, self._found, self._mean)
        self._installed.enter_context(runner.logs.installed())
        self._installed.enter_context(batches_run_by(trainer, runner.run))
        cuts = "leaves batches whole" if self.size == "whole" else "cuts batches that run out of memory"
        if self.size not in (None, "whole"):
            cuts = f"cuts batches into microbatches of at most {self.size:,} rows"
        self.say(f"{cuts}{'' if self.count is None else ', weights losses by targets'}")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say how many batches were cut."""
        size = "" if self.current_size is None else f" into microbatches of at most {self.current_size:,} rows"
        said = [] if self.size == "whole" else [f"{self._count(trainer)} batches cut{size}"]
        if self._mean is not None:
            said.append(f"count compared with the loss in {self._mean.checks:,} batches")
        self.say("; ".join(said) or "no batch was cut")
        super().on_fit_end(trainer, pl_module)

    def report_parts(self, trainer: Trainer) -> list[Facts]:
        """Return the size and the number of split batches."""
        size = "whole batches" if self.current_size is None else f"{self.current_size:,}"
        return [Facts(title="Microbatches", facts=[("rows at most", size), ("batches cut", self._count(trainer))])]

    def _count(self, trainer: Trainer) -> str:
        return f"{self._found.cut_batches:,} of {trainer.fit_loop.total_batch_idx + 1:,}"

    def state_dict(self) -> dict[str, Any]:
        """Return the findings about size, loss and logged values, and the number of split batches."""
        return asdict(self._found)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        vars(self._found).update(state_dict)

    def mid_epoch_state(self) -> dict[str, Any]:
        """Return the number of targets whose gradients are accumulated on this rank."""
        return {} if self._mean is None else {"targets": self._mean.targets}

    def load_mid_epoch_state(self, state: dict[str, Any]) -> None:
        """Restore what `mid_epoch_state` returned."""
        if self._mean is not None:
            self._mean.targets = state.get("targets")


def waits_in_forward(module: nn.Module) -> bool:
    """Whether a forward pass exchanges values with other ranks, so that one that fails leaves them waiting."""
    return any(isinstance(part, nn.SyncBatchNorm) for part in module.modules())
