"""The callback `GradientClipping`."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal, cast

from torch import Tensor
from torch.optim import Optimizer

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.fit import is_last_batch
from lightning_tricks._lightning_compat.flavor import (
    DeepSpeedStrategy,
    FSDPStrategy,
    LightningModule,
    MisconfigurationException,
    Trainer,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.logged_values import log_step_values, logs_at_this_step
from lightning_tricks._lightning_compat.trainer import active_scaler
from lightning_tricks._shared.checks import check_choice, check_count
from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks._shared.report_parts import ClippedSteps
from lightning_tricks._shared.text import list_names
from lightning_tricks.gradient_clipping import trainer_settings
from lightning_tricks.gradient_clipping.core.clip_state import (
    ClipGroup,
    ClipGroups,
    ClipState,
    load_states,
    norm_after,
    states_to_dict,
)
from lightning_tricks.gradient_clipping.core.clipping import (
    GradientNorms,
    check_bound,
    check_norm_type,
    gradient_norms,
    is_nonfinite,
)
from lightning_tricks.gradient_clipping.core.methods import ClipMethod, ClipNorm, ClipResult, check_groups, check_method


class GradientClipping(TrickCallback):
    """Clip the gradients of each optimizer right before its step, and skip the step if they are not finite.

    Gradients are clipped unscaled and accumulated, once per optimizer step, under automatic and manual optimization, in
    every precision, with fused optimizers, under DDP and ModelParallelStrategy (FSDP2). LBFGS is clipped at each
    evaluation of its closure. You do not need the Trainer's own `gradient_clip_val`. A module's own
    `on_before_optimizer_step` runs later and receives the clipped gradients.

    Logs `grad_norm/pre_clip`, `grad_norm/clipped_fraction` (the share of this fit's steps in which something was
    clipped), with `log_norm="all"` also `grad_norm/post_clip`, and with `on_nonfinite="skip"`
    `grad_norm/skipped_steps`; with several optimizers `grad_norm/0/pre_clip`, `grad_norm/1/pre_clip`, ... Counts are
    computed for the steps that are logged and at the end of an epoch and of the fit, norms in each step.

    Args:
        max_norm: The largest norm allowed, > 0; None means 1.0, unless `method` is given. `float("inf")` logs the norms
            without clipping.
        norm_type: The p of the p-norm, > 0; `float("inf")` for the maximum norm.
        method: Another way to clip, instead of `max_norm`: `ClipValue`, `AGC`, `PercentileClip` or `ZScoreClip`.
        groups: Pattern over qualified names -> how to clip the matching parameters as a separate group: a number (its
            `max_norm`) or a method. The first match counts; all other parameters are clipped by `max_norm` or `method`.
            A pattern is a glob (`backbone.*`) or, with the prefix `re:`, a regular expression.
        on_nonfinite: What to do if the gradients of an optimizer contain NaN or Inf. "ignore" clips as
            `torch.nn.utils.clip_grad_norm_` does: a NaN makes all gradients NaN. "skip" skips the optimizer's step: its
            weights and state stay bit-identical, on all ranks alike. "raise" raises an error that names the layers. A
            GradScaler skips such steps by itself; while its scale is above 1 they count as part of its search for a
            scale, and neither raise an error nor count as consecutive.
        max_consecutive_skips: With "skip": raise an error that names the layers after more than this many consecutive
            skips; at least 1. With fused optimizers and under a GradScaler this is checked only once in as many steps.
        hold_lr_on_skip: With "skip": do not step the learning rate schedulers of an optimizer when its step is skipped.
            Lightning's `global_step` and schedulers that count epochs advance anyway.
        log_norm: Whether to log the norm before clipping and the share of clipped steps, without host reads beyond
            those of the logger; "all" also logs the norm after clipping.
        log_layers: Whether to also log `grad_norm/<qualified name>` of each parameter tensor every `log_every_n_steps`;
            the norms come from the pass that clips.

    "skip" copies one value a step to the host, except with fused optimizers and under a GradScaler; `hold_lr_on_skip`
    and "raise" always do.

    In your own loop, use the functions in `lightning_tricks.gradient_clipping`.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range, or two contradict each other.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> clipping = GradientClipping(max_norm=1.0, groups={"embedding.*": 0.1}, on_nonfinite="skip")
        >>> trainer = Trainer(callbacks=[clipping], accelerator="cpu", logger=False)
    """

    training_arguments = ("max_norm", "norm_type", "method", "groups", "on_nonfinite", "hold_lr_on_skip")

    def __init__(
        self,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        *,
        method: ClipMethod | None = None,
        groups: dict[str, float | ClipMethod] | None = None,
        on_nonfinite: Literal["ignore", "skip", "raise"] = "ignore",
        max_consecutive_skips: int | None = None,
        hold_lr_on_skip: bool = False,
        log_norm: bool | Literal["all"] = True,
        log_layers: bool = False,
    ) -> None:
        self.max_norm = 1.0 if max_norm is None else check_bound("max_norm", max_norm)
        self.norm_type = check_norm_type(norm_type)
        self.method = check_method(method, max_norm)
        self.groups = groups
        self.on_nonfinite = check_choice("on_nonfinite", on_nonfinite, ("ignore", "skip", "raise"))
        self.max_consecutive_skips = max_consecutive_skips
        self.hold_lr_on_skip = hold_lr_on_skip
        self.log_norm = log_norm
        self.log_layers = log_layers

        if max_consecutive_skips is not None:
            check_count("max_consecutive_skips", max_consecutive_skips)
        for name in ("max_consecutive_skips", "hold_lr_on_skip"):
            if getattr(self, name) and on_nonfinite != "skip":
                raise ValueError(f'{name}={getattr(self, name)!r} needs on_nonfinite="skip", got {on_nonfinite!r}.')
        self._clip_groups = ClipGroups(check_groups(groups), self.method or ClipNorm(self.max_norm))
        self._states: defaultdict[int, ClipState] = defaultdict(ClipState)  # by the optimizer's index
        super().__init__()

    def _forget_run(self) -> None:
        self._names: dict[Tensor, str] = {}
        self._had_backward = False

    @property
    def _clips_nothing(self) -> bool:
        return self._clip_groups.is_single and self.method is None and self.max_norm == math.inf

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise an error for unsupported strategies, and reset the counts."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        problem = "GradientClipping cannot see the whole gradient under {}:"
        for kind, remedy in (
            (DeepSpeedStrategy, "set `gradient_clipping` in DeepSpeed's own configuration."),
            (FSDPStrategy, "use ModelParallelStrategy (FSDP2), whose sharded gradients it can see."),
        ):
            self.refuse_strategies(trainer, (kind,), f"{problem} {remedy}")
        self._states = defaultdict(ClipState)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Log what the patterns match, and start to look for steps without Lightning, and for others that clip."""
        self._names = _names(pl_module)
        if not self._clip_groups.is_single:
            sizes = {name: parameter.numel() for parameter, name in self._names.items()}
            try:
                self.say(f"clips by group: {self._clip_groups.report(sizes)}")
            except ValueError as error:
                raise MisconfigurationException(f"GradientClipping: {error}") from error
        elif self._clips_nothing:
            self.say("measures the norm of all gradients, and clips none")
        else:
            self.say(
                f"clips by {self.method}" if self.method else f"clips the norm of all gradients to {self.max_norm:g}"
            )
        if not self._clips_nothing:
            own = f"max_norm={self.max_norm}" if self.method is None else f"method={self.method}"
            self._installed.enter_context(trainer_settings.warn_of_other_clipping(trainer, own))
        self._installed.enter_context(
            trainer_settings.refuse_unseen_steps(
                trainer, lambda index: self._states[index].end_skip(), refuse_repeated=self.on_nonfinite == "skip"
            )
        )
        if active_scaler(trainer) is None:
            self.skip_hooks("on_train_batch_start", "on_after_backward")
        if not self.hold_lr_on_skip:
            self.skip_hooks("on_train_batch_end")

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Note that there are no new gradients yet."""
        self._had_backward = False

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that there are new gradients."""
        self._had_backward = True

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Clip the gradients of an optimizer, log their norms, and handle those that are not finite."""
        index = trainer.optimizers.index(optimizer)
        state = self._states[index]
        state.restore_schedulers()
        scaler = active_scaler(trainer)
        if scaler is not None and pl_module.automatic_optimization and not self._had_backward:
            return  # `training_step` returned None: Lightning has unscaled nothing and skips the step
        if scaler is not None and trainer_settings.unscales_in_step(scaler, optimizer):
            scaler.unscale_(optimizer)  # a fused optimizer would do it inside its step, so Lightning has not
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not parameters:
            return

        names_of = partial(self._names_of, pl_module)
        norms = gradient_norms(parameters, self.norm_type)
        clipped = state.clip_(self._clip_groups, parameters, norms, self.norm_type, names_of)
        results = [result for _, result in clipped if result is not None]
        nonfinite = truly_nonfinite = None  # whoever does not need it now counts it later
        if scaler is not None or trainer.world_size > 1 or self.on_nonfinite != "ignore":
            nonfinite = truly_nonfinite = trainer_settings.on_any_rank(trainer, parameters, is_nonfinite(norms.total))
        if scaler is not None and nonfinite is not None:
            truly_nonfinite = nonfinite & ~trainer_settings.scale_may_have_overflowed(scaler).to(nonfinite.device)
        state.counts.add(norms.total, results, nonfinite, truly_nonfinite)
        if self.log_norm and not trainer.barebones:
            self._log_norms(trainer, index, norms, clipped)
        if self.log_layers and logs_at_this_step(trainer):
            layers = zip(names_of(parameters), norms.per_parameter, strict=True)
            log_step_values(trainer, type(self).__name__, {f"grad_norm/{name}": norm for name, norm in layers})
        if nonfinite is None:
            return
        if self.on_nonfinite == "raise" and truly_nonfinite:
            finite = norms.per_parameter.isfinite()
            raise _nonfinite_error(trainer, names_of(parameters), finite, 'on_nonfinite="raise"')
        if self.on_nonfinite == "skip":
            held = _schedulers_to_hold(trainer, pl_module, optimizer) if self.hold_lr_on_skip else None
            is_known = state.skip_step_(optimizer, nonfinite, by_scaler=scaler is not None, schedulers=held)
            limit = self.max_consecutive_skips
            if limit is not None and state.has_too_many_skips(limit, norms, is_known=is_known):
                reason = f"more than max_consecutive_skips={limit} steps in a row were skipped"
                finite = cast(Tensor, state.finite_at_skip)
                raise _nonfinite_error(trainer, names_of(parameters), finite, reason)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Restore the schedulers of skipped steps."""
        for state in self._states.values():
            state.restore_schedulers()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Warn about optimizers of which no step was seen."""
        batches = trainer.fit_loop.total_batch_idx + 1
        unseen = [index for index in range(len(trainer.optimizers)) if not self._states[index].counts.steps]
        if batches and unseen:
            rank_zero_warn(
                f"GradientClipping saw no step of the optimizers {unseen} in {batches} batches, and clipped none of "
                "their gradients. Check that they are stepped, and that their parameters have gradients."
            )

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say how many steps were clipped."""
        has_several = len(self._states) > 1
        counts = [
            f"{part.clipped:,} of {part.steps:,} steps{f' of optimizer {part.optimizer}' if has_several else ''}"
            f" clipped{f', {part.skipped:,} skipped' if part.skipped else ''}"
            for part in self.report_parts(trainer)
        ]
        if counts:
            self.say("; ".join(counts))
        super().on_fit_end(trainer, pl_module)

    def _close(self) -> None:
        """End a run, and forget the optimizers and schedulers; the counts stay."""
        super()._close()
        for state in self._states.values():
            state.close()

    def report_parts(self, trainer: Trainer) -> list[ClippedSteps]:
        """Return how many steps of each optimizer were clipped and skipped."""
        max_norm = self.max_norm if self.method is None and math.isfinite(self.max_norm) else None
        return [
            ClippedSteps(
                optimizer=index,
                steps=state.counts.steps,
                clipped=int(state.counts.clipped),
                skipped=int(state.counts.skipped) if self.on_nonfinite == "skip" else 0,
                max_norm=max_norm if self._clip_groups.is_single else None,
            )
            for index, state in sorted(self._states.items())
            if state.counts.steps
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of each optimizer, and the state of the thresholds."""
        return states_to_dict(self._states)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore the counts and the state of the thresholds."""
        for key in load_states(self._states, state_dict, self._clip_groups):
            rank_zero_warn(
                f"GradientClipping has another method than the checkpoint, so the statistics of {key!r} in the "
                "checkpoint are not restored."
            )

    def _names_of(self, pl_module: LightningModule, parameters: Sequence[Tensor]) -> list[str]:
        if any(parameter not in self._names for parameter in parameters):
            self._names = _names(pl_module)  # some were added during the fit
        return [self._names.get(parameter, f"parameter {place}") for place, parameter in enumerate(parameters)]

    def _log_norms(
        self, trainer: Trainer, index: int, norms: GradientNorms, clipped: Sequence[tuple[ClipGroup, ClipResult | None]]
    ) -> None:
        # a batch size means nothing for the value of a step, and Lightning asks for it under `dataloader_iter`
        prefix = "grad_norm" if len(trainer.optimizers) == 1 else f"grad_norm/{index}"
        values = {f"{prefix}/pre_clip": norms.total}
        if self.log_norm == "all":
            values[f"{prefix}/post_clip"] = norm_after(clipped, norms, self.norm_type)
        counts = self._states[index].counts
        is_last = 0 <= trainer.max_steps <= trainer.global_step + len(trainer.optimizers)
        if counts.steps == 1 or is_last or logs_at_this_step(trainer) or is_last_batch(trainer):
            values[f"{prefix}/clipped_fraction"] = counts.clipped / counts.steps
            if self.on_nonfinite == "skip":
                values[f"{prefix}/skipped_steps"] = counts.skipped
        log_step_values(trainer, type(self).__name__, values)


def _schedulers_to_hold(trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> list[Any] | None:
    """Return the schedulers of an optimizer; None where they must step, as one counts the epochs and this one ends."""
    configs = trainer.lr_scheduler_configs
    own = [config for config in configs if getattr(config.scheduler, "optimizer", None) is optimizer]
    counts_epochs = any(config.interval == "epoch" for config in own)
    if counts_epochs and pl_module.automatic_optimization and is_last_batch(trainer):
        return None
    return [config.scheduler for config in own]


def _nonfinite_error(trainer: Trainer, names: Sequence[str], finite: Tensor, reason: str) -> RuntimeError:
    """Return an error that names the layers whose gradients are not finite.

    Args:
        trainer: The Trainer.
        names: The qualified names of all parameters that have a gradient.
        finite: Whether the gradient of each is finite; shape (n,).
        reason: The argument that asks for the error.
    """
    bad = [name for name, is_finite in zip(names, finite.tolist(), strict=True) if not is_finite]
    listed = list_names(bad, 10)
    if len(bad) == len(names):
        listed += "; as all of them are affected, look at the loss and its batch"
    return RuntimeError(
        f"GradientClipping({reason}): {len(bad)} of {len(names)} gradients are not finite at global step "
        f"{trainer.global_step} (epoch {trainer.current_epoch}): {listed}."
    )


def _names(pl_module: LightningModule) -> dict[Tensor, str]:
    return {parameter: strip_compile_prefix(name) for name, parameter in pl_module.named_parameters()}
