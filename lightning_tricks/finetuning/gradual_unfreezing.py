"""The callback `GradualUnfreezing`."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import Tensor

from lightning_tricks._lightning_compat.checkpoints import value_in_checkpoint
from lightning_tricks._lightning_compat.ddp import rewrap_ddp
from lightning_tricks._lightning_compat.flavor import (
    FSDPStrategy,
    LightningModule,
    MisconfigurationException,
    StochasticWeightAveraging,
    Trainer,
    rank_zero_info,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.guards import overriding
from lightning_tricks._lightning_compat.trainer import callbacks_of_type, is_compiled_by_lightning, is_fast_dev_run
from lightning_tricks._shared.checks import check_choice
from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.tensors import reshard_fsdp2
from lightning_tricks._shared.text import list_names
from lightning_tricks.finetuning.adaptation import GradientCheckingCallback
from lightning_tricks.finetuning.core import freezing
from lightning_tricks.finetuning.core.adapter_coverage import is_compiled
from lightning_tricks.finetuning.core.group_splitting import split_groups_

_SAVED_KEY = "gradual_unfreezing"  # in checkpoints of FSDP


class GradualUnfreezing(GradientCheckingCallback):
    """Freeze a module, and train its parameters from chosen epochs or steps on.

    Give the optimizer all parameters that will ever train, including the frozen ones: no `filter(requires_grad)`.
    Frozen parameters have no gradient, so the optimizer leaves them bit-identical, even with momentum and weight decay.
    What is frozen depends only on the epoch or step, so a run that resumes anywhere equals an uninterrupted one. After
    the fit, `requires_grad` and the modes of normalization layers are restored.

    Works with any scheduler, multiple optimizers, manual optimization, `torch.compile`, DDP (which is wrapped again
    whenever parameters are released) and ModelParallelStrategy (FSDP2).

    Args:
        schedule: Epoch or step, counted from 0 -> a pattern, or a list of patterns, of the parameters that train from
            then on. A pattern is a glob over qualified names (`backbone.layer4.*`) or, with the prefix `re:`, a regular
            expression. If multiple keys match a parameter, the earliest applies. Parameters without a match stay frozen
            for the whole run. Keys that are strings of digits, as in JSON, are read as numbers; the key 0 is required.
        lr_multipliers: Pattern -> the factor of the learning rate of its parameters, > 0: parameter groups, and the
            state of schedulers for each group, are split. No parameter may match two patterns. An `eta_min` of a
            scheduler, which all groups share, is not multiplied.
        freeze_norm: Whether normalization with running statistics (BatchNorm, SyncBatchNorm, InstanceNorm that tracks
            them) stays in evaluation mode while its parameters are frozen, with its statistics unchanged.
        unit: The unit of the keys: "epoch" or "step". Steps are those of `trainer.global_step`, which counts the steps
            of each optimizer under manual optimization.

    For other training loops: `freeze_`, `unfreeze_` and `trainable_summary`.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range, or `schedule` has no key 0.
        MisconfigurationException: At the start of a fit, if a pattern matches nothing, a key releases nothing new,
            two multipliers match one parameter, or a parameter of the schedule is in no optimizer. A key beyond the run
            is a warning.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> unfreezing = GradualUnfreezing({0: "head.*", 5: "layer4.*", 10: "*"}, lr_multipliers={"head.*": 10})
        >>> trainer = Trainer(callbacks=[unfreezing], accelerator="cpu", logger=False)
    """

    training_arguments = ("schedule", "lr_multipliers", "freeze_norm", "unit")

    def __init__(
        self,
        schedule: dict[int, str | list[str]],
        *,
        lr_multipliers: dict[str, float] | None = None,
        freeze_norm: bool = True,
        unit: Literal["epoch", "step"] = "epoch",
    ) -> None:
        super().__init__()
        self.schedule = schedule
        self.lr_multipliers = lr_multipliers
        self.freeze_norm = freeze_norm
        self.unit = check_choice("unit", unit, ("epoch", "step"))
        if not isinstance(freeze_norm, bool):
            raise TypeError(f"freeze_norm must be True or False, got {freeze_norm!r} ({type(freeze_norm).__name__}).")
        self._patterns = freezing.check_schedule(schedule)
        self._multipliers = freezing.check_multipliers(lr_multipliers)
        self._key: int | None = None  # the last that was applied
        self._held: set[str] = set()  # the normalisation that this fit has held

    def _forget_run(self) -> None:
        super()._forget_run()
        self._plan: freezing.UnfreezingPlan | None = None

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse a strategy that hides the parameters."""
        super().setup(trainer, pl_module, stage)
        strategy = trainer.strategy
        if stage == "fit" and isinstance(strategy, FSDPStrategy) and strategy.kwargs.get("use_orig_params") is False:
            raise MisconfigurationException(
                "GradualUnfreezing needs FSDPStrategy(use_orig_params=True) or ModelParallelStrategy: flattened "
                'parameters train all or none, and torch raises "Must flatten tensors with uniform `requires_grad` '
                'when `use_orig_params=False`".'
            )

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Plan what trains when, check it against the optimizers and the length of the run, and report it."""
        try:
            plan = freezing.plan_unfreezing(pl_module, self._patterns)
            multipliers: dict[Tensor, float] = freezing.multipliers_of(pl_module, self._multipliers)
        except ValueError as error:
            raise MisconfigurationException(f"GradualUnfreezing: {error}") from error
        self._check_optimizers(trainer, plan)
        self._check_length(trainer, pl_module, plan)
        if self.freeze_norm:
            self._refuse_reset_of_norms(trainer, pl_module, plan)
        self._split_groups(trainer, multipliers)
        self._plan = plan
        self._installed.enter_context(_as_it_was(pl_module, self._held))
        self._key = None
        if trainer.strategy.restore_checkpoint_after_setup:
            load = self._freezing_before(trainer.strategy.load_checkpoint, pl_module, plan)
            self._installed.enter_context(overriding(trainer.strategy, load_checkpoint=load))
        self.say("; ".join(plan.lines(self._patterns, self.unit)))

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Freeze the parameters that do not train yet, now that a resumed run knows its epoch and step."""
        self._key = None
        self._apply(trainer, pl_module)
        super().on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Release the parameters that train from this epoch on."""
        self._apply(trainer, pl_module)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Release the parameters that train from this step on."""
        self._apply(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log which parameters the run was too short to release."""
        if self._plan is not None and self._key is not None and (late := self._plan.released_after(self._key)):
            start = min(self._plan.starts[parameter] for parameter in late)
            self.say(f"the run ended before {self.unit} {start}, so {freezing.ParameterCount.of(late)} never trained")

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Save under FSDP which parameters train, so that a resumed run knows whose optimizer state to load."""
        if trainer.strategy.restore_checkpoint_after_setup:
            checkpoint[_SAVED_KEY] = self._key

    def changes_later(self, pl_module: LightningModule) -> Collection[str]:
        """Return the names of the parameters that the schedule releases, and of their statistics, frozen until then."""
        plan = self._plan
        if plan is None:
            return ()
        to_the_end = freezing.frozen_norms(pl_module, lambda parameter: plan.trains(parameter, plan.keys[-1]))
        released = set(freezing.frozen_norms(pl_module)) - set(to_the_end)
        buffers = {f"{name}.{key}" for name in released for key, _ in pl_module.get_submodule(name).named_buffers()}
        return {plan.names[parameter] for parameter in plan.starts} | set(map(strip_compile_prefix, buffers))

    def resumed(self, trainer: Trainer, not_restored: Sequence[str]) -> None:
        """Set again which parameters train: `AutoResume` has restored those that trained when it saved."""
        if self._plan is not None and self.freeze_norm:
            module = trainer.lightning_module
            self._held.update(freezing.hold_norms_(module, freezing.frozen_norms(module)))
        self._key = None
        self._apply(trainer, trainer.lightning_module)

    def _apply(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Set which parameters train at the present epoch or step, if that has changed."""
        plan = self._plan
        if plan is None:
            return
        key = plan.key_at(trainer.current_epoch if self.unit == "epoch" else trainer.global_step)
        if key == self._key:
            return
        self._key = key
        changed = self._set_trainable(pl_module, plan, key)
        if self.freeze_norm:
            frozen = freezing.frozen_norms(pl_module)
            freezing.release_norms_(pl_module, set(freezing.held_norms(pl_module)) - set(frozen))
            self._held.update(freezing.hold_norms_(pl_module, frozen))
        if changed:
            rewrap_ddp(trainer)
            if is_compiled_by_lightning(pl_module) or is_compiled(pl_module):
                torch.compiler.reset()  # torch 2.6 goes on with the code for the frozen parameters
        self._expect_gradients({name: parameter for parameter, name in plan.names.items()})

    def _freezing_before(
        self, load: Callable[..., Any], pl_module: LightningModule, plan: freezing.UnfreezingPlan
    ) -> Callable[..., Any]:
        """Return a function that freezes the parameters that a checkpoint's run had frozen, and then loads it.

        FSDP loads the optimizer's state of exactly those parameters that require gradients.
        """

        def load_checkpoint(checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
            key = value_in_checkpoint(checkpoint_path, _SAVED_KEY)
            if key is not None:
                self._set_trainable(pl_module, plan, key)
            return load(checkpoint_path, *args, **kwargs)

        return load_checkpoint

    def _set_trainable(self, pl_module: LightningModule, plan: freezing.UnfreezingPlan, key: int) -> bool:
        """Set which parameters require gradients, and return whether that is a change."""
        reshard_fsdp2(pl_module)
        before = [parameter.requires_grad for parameter in plan.names]
        for parameter in plan.names:
            parameter.requires_grad_(plan.trains(parameter, key))
            if not parameter.requires_grad:
                parameter.grad = None
        return before != [parameter.requires_grad for parameter in plan.names]

    def _check_optimizers(self, trainer: Trainer, plan: freezing.UnfreezingPlan) -> None:
        """Raise an error if a parameter that shall train is in no optimizer, or an optimizer trains nothing in fp16."""
        optimized = [{p for group in o.param_groups for p in group["params"]} for o in trainer.optimizers]
        missing = [plan.names[p] for p in plan.starts if not any(p in owned for owned in optimized)]
        if missing:
            raise MisconfigurationException(
                f"GradualUnfreezing: {len(missing):,} parameters that the schedule matches are in no optimizer and "
                f"would never train: {list_names(missing)}. Give all of them to the optimizer in configure_optimizers, "
                "also those that are frozen at first, without filter(lambda p: p.requires_grad, ...). OptimizerSpec "
                "leaves out what is frozen before the fit: do not freeze it by hand."
            )
        scaler = getattr(trainer.precision_plugin, "scaler", None)
        for index, owned in enumerate(optimized):
            first = min((plan.starts[p] for p in owned if p in plan.starts), default=math.inf)
            if first > 0 and scaler is not None and scaler.is_enabled():
                raise MisconfigurationException(
                    f"GradualUnfreezing: all parameters of optimizer {index} are frozen at {self.unit} 0, for which a "
                    'GradScaler raises "No inf checks were recorded for this optimizer". Release one of them at 0, or '
                    "use bf16-mixed."
                )

    def _check_length(self, trainer: Trainer, pl_module: LightningModule, plan: freezing.UnfreezingPlan) -> None:
        """Warn of keys that the run does not reach, as in a short run that only tries the code."""
        later = [key for key in plan.keys if key > 0]
        length = self._length(trainer, pl_module) if later else math.inf  # which may load the data
        late = [key for key in later if key >= length]
        if not late:
            return
        tell = rank_zero_info if is_fast_dev_run(trainer) else rank_zero_warn
        tell(
            f"GradualUnfreezing: schedule has the keys {late}, but the run has {length:g} {self.unit}s, counted from "
            "0: what they release stays frozen."
        )

    def _length(self, trainer: Trainer, pl_module: LightningModule) -> float:
        """Return the number of epochs or steps of the run; infinity if it is not known."""
        if self.unit == "epoch":
            return math.inf if trainer.max_epochs in (None, -1) else float(trainer.max_epochs)
        if trainer.max_steps != -1:
            return trainer.max_steps
        if not pl_module.automatic_optimization:
            return math.inf  # the module steps as it likes
        try:
            return float(trainer.estimated_stepping_batches)
        except MisconfigurationException:  # Lightning cannot tell, as under GradientAccumulationScheduler
            return math.inf

    def _split_groups(self, trainer: Trainer, multipliers: Mapping[Tensor, float]) -> None:
        for optimizer in trainer.optimizers if multipliers else ():
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            own = [scheduler for scheduler in schedulers if getattr(scheduler, "optimizer", None) is optimizer]
            try:
                split_groups_(optimizer, multipliers, own)
            except ValueError as error:
                raise MisconfigurationException(f"GradualUnfreezing(lr_multipliers=...): {error}") from error

    def _refuse_reset_of_norms(
        self, trainer: Trainer, pl_module: LightningModule, plan: freezing.UnfreezingPlan
    ) -> None:
        """Raise an error if a callback sets statistics to zero that nothing would compute again."""
        frozen = freezing.frozen_norms(pl_module, lambda parameter: plan.trains(parameter, plan.keys[-1]))
        if frozen and callbacks_of_type(trainer, StochasticWeightAveraging):
            raise MisconfigurationException(
                "GradualUnfreezing: StochasticWeightAveraging sets the statistics of all BatchNorm to zero, and those "
                f"that stay frozen to the end would not recover: {list_names(frozen)}. Use freeze_norm=False, or "
                "WeightAveraging."
            )


@contextmanager
def _as_it_was(pl_module: LightningModule, held_since: set[str]) -> Iterator[None]:
    """Put back, on leaving, which parameters require gradients, and the modes of normalisation that was held since.

    Names tell which that is: at the end of a fit Lightning replaces SyncBatchNorm by new modules.
    """
    flags = {parameter: parameter.requires_grad for parameter in pl_module.parameters()}
    held, modes = freezing.held_norms(pl_module), freezing.norm_modes(pl_module)
    yield
    for parameter, requires_grad in flags.items():
        parameter.requires_grad_(requires_grad)
    freezing.release_norms_(pl_module, held_since)
    held_since.clear()
    freezing.set_norm_modes_(pl_module, modes)
    freezing.hold_norms_(pl_module, held)
