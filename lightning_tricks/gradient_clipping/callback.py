"""The Lightning shell of the gradient clipping room."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_info, rank_zero_warn
from torch import Tensor
from torch.optim import LBFGS, Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_tricks._callback import TrickCallback
from lightning_tricks._lightning_compat.logged_values import logs_at_this_step
from lightning_tricks._shared.checks import check_choice, check_count
from lightning_tricks._shared.patterns import strip_compile_prefix
from lightning_tricks.gradient_clipping.core.adaptive_thresholds import NoThreshold, Threshold
from lightning_tricks.gradient_clipping.core.clip_groups import ClipGroup, ClipGroups
from lightning_tricks.gradient_clipping.core.clipping import (
    GradientNorms,
    check_max_norm,
    check_norm_type,
    gradient_norms,
)
from lightning_tricks.gradient_clipping.core.methods import ClipMethod, ClipNorm, check_groups, check_method
from lightning_tricks.gradient_clipping.core.step_skipping import (
    HeldSchedulers,
    StepCounts,
    skip_step_,
    skip_step_on_device_,
    skips_on_device,
)
from lightning_tricks.gradient_clipping.trainer_settings import (
    active_scaler,
    on_any_rank,
    refuse_unsupported_strategies,
    scale_may_have_overflowed,
    unscales_in_step,
)


class GradientClipping(TrickCallback):
    """Clip the gradients of each optimizer right before its step, and skip the step where they are not finite.

    It sees the gradients unscaled and accumulated: once for each optimizer step, under automatic and manual
    optimization, in every precision, with fused optimizers, under DDP and ModelParallelStrategy (FSDP2). LBFGS is
    clipped at each evaluation of its closure. The Trainer's own `gradient_clip_val` is not needed beside it. A module's
    own `on_before_optimizer_step` comes later and sees the clipped gradients.

    Logs `grad_norm/pre_clip`, `grad_norm/post_clip`, `grad_norm/clipped_fraction` (the share of this fit's steps in
    which something was clipped) and, with `on_nonfinite="skip"`, `grad_norm/skipped_steps`; with several optimizers
    `grad_norm/0/pre_clip`, `grad_norm/1/pre_clip`, ...

    Args:
        max_norm: The largest norm allowed, > 0. Neutral: `float("inf")` clips nothing and goes on logging.
        norm_type: The p of the p-norm, > 0; `float("inf")` for the maximum norm.
        method: Another way to clip, instead of `max_norm`: `ClipValue`, `AGC`, `PercentileClip` or `ZScoreClip`.
        groups: Pattern over qualified names -> how to clip the parameters that it matches, by a norm of their own (a
            number is its `max_norm`) or a method. The first pattern that matches counts; `max_norm` or `method` is for
            the rest. A pattern is a glob (`backbone.*`) or, with `re:` in front, a regular expression.
        on_nonfinite: What to do with a NaN or Inf among the gradients of an optimizer. "ignore" clips as
            `torch.nn.utils.clip_grad_norm_` does: a NaN spoils all gradients. "skip" leaves the optimizer's step out:
            its weights and state stay bit-identical, on all ranks alike. "raise" stops and names the layers. A
            GradScaler leaves out such steps by itself; while its scale is above 1 they are taken for its search for a
            scale, and neither raise nor count as consecutive.
        max_consecutive_skips: With "skip": stop and name the layers once more steps than this are skipped in a row. For
            fused optimizers and under a GradScaler that is looked up only every so many steps.
        hold_lr_on_skip: With "skip": keep the learning rate schedulers of an optimizer where they are when its step is
            skipped. Lightning's `global_step` goes on.
        log: Whether to log the norms, without a host read beyond the logger's own.
        log_layers: Whether to log `grad_norm/<qualified name>` of each parameter tensor as well, every
            `log_every_n_steps`; the norms come from the pass that clips.

    "skip" reads one value a step back to the host, but for fused optimizers and under a GradScaler; `hold_lr_on_skip`
    and "raise" read it always.

    The clipping itself: `lightning_tricks.gradient_clipping.core.clipping`.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If one is out of range, or two contradict each other.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> clipping = GradientClipping(max_norm=1.0, groups={"embedding.*": 0.1}, on_nonfinite="skip")
        >>> trainer = Trainer(callbacks=[clipping], accelerator="cpu", logger=False)
    """

    def __init__(
        self,
        max_norm: float = 1.0,
        norm_type: float = 2.0,
        *,
        method: ClipMethod | None = None,
        groups: dict[str, float | ClipMethod] | None = None,
        on_nonfinite: Literal["ignore", "skip", "raise"] = "ignore",
        max_consecutive_skips: int | None = None,
        hold_lr_on_skip: bool = False,
        log: bool = True,
        log_layers: bool = False,
    ) -> None:
        self.max_norm = check_max_norm(max_norm)
        self.norm_type = check_norm_type(norm_type)
        self.method = check_method(method, max_norm)
        self.groups = groups
        self.on_nonfinite = check_choice("on_nonfinite", on_nonfinite, ("ignore", "skip", "raise"))
        self.max_consecutive_skips = max_consecutive_skips
        self.hold_lr_on_skip = hold_lr_on_skip
        self._log = log  # not `self.log`: Lightning binds the module's `log` method to that name
        self.log_layers = log_layers

        if max_consecutive_skips is not None:
            check_count("max_consecutive_skips", max_consecutive_skips)
        for name in ("max_consecutive_skips", "hold_lr_on_skip"):
            if getattr(self, name) and on_nonfinite != "skip":
                raise ValueError(f'{name}={getattr(self, name)!r} needs on_nonfinite="skip", got {on_nonfinite!r}.')
        self._clip_groups = ClipGroups(check_groups(groups), self.method or ClipNorm(self.max_norm))
        self._counts: dict[int, StepCounts] = {}
        self._thresholds: dict[str, Threshold] = {}
        self._close()

    def _close(self) -> None:
        """Let go of what belongs to one fit: parameters, optimizers, schedulers, hooks."""
        for handle in getattr(self, "_hooks", ()):
            handle.remove()
        self._hooks: list[RemovableHandle] = []
        self._names: dict[Tensor, str] = {}
        self._groups: dict[int, tuple[list[int], list[ClipGroup]]] = {}
        self._finite: dict[int, Tensor] = {}  # which gradients were, when a step was last left out
        self._held: dict[int, HeldSchedulers] = {}
        self._seen: set[int] = set()
        self._had_backward = False

    def __getstate__(self) -> dict[str, Any]:
        # in the middle of a fit, too, a copy takes neither parameters nor hooks along
        empty = {
            name: type(vars(self)[name])() for name in ("_hooks", "_names", "_groups", "_finite", "_held", "_seen")
        }
        return super().__getstate__() | empty

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot work, warn about a second clip, and count from zero."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        refuse_unsupported_strategies(trainer)
        if trainer.gradient_clip_val:
            own = f"max_norm={self.max_norm}" if self.method is None else f"method={self.method}"
            rank_zero_warn(
                f"GradientClipping({own}) and Trainer(gradient_clip_val={trainer.gradient_clip_val}) are both set: "
                "gradients are clipped twice. Remove one."
            )
        self._close()
        self._counts, self._thresholds = {}, {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Report what the patterns match, refuse what cannot be skipped, and watch for steps that go past Lightning."""
        self._names = _names(pl_module)
        if not self._clip_groups.is_single:
            sizes = {name: parameter.numel() for parameter, name in self._names.items()}
            try:
                rank_zero_info(f"GradientClipping, {self._clip_groups.report(sizes)}.")
            except ValueError as error:
                raise MisconfigurationException(f"GradientClipping: {error}") from error
        for index, optimizer in enumerate(trainer.optimizers):
            if self.on_nonfinite == "skip" and isinstance(optimizer, LBFGS):
                raise MisconfigurationException(
                    'GradientClipping(on_nonfinite="skip") cannot leave out a step of LBFGS: it has moved the weights '
                    'by the time it finds the gradient. Use "raise" or "ignore".'
                )
            self._hooks.append(optimizer.register_step_post_hook(self._refuse_unseen_step(index)))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Expect a backward."""
        self._had_backward = False

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Note that there are new gradients."""
        self._had_backward = True

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        """Clip the gradients of this optimizer, log their norms, and see to those that are not finite."""
        index = trainer.optimizers.index(optimizer)
        self._seen.add(index)
        self._restore_schedulers(index)
        scaler = active_scaler(trainer)
        if scaler is not None and pl_module.automatic_optimization and not self._had_backward:
            return  # `training_step` returned None: Lightning has unscaled nothing and leaves the step out
        if scaler is not None and unscales_in_step(scaler, optimizer):
            scaler.unscale_(optimizer)  # a fused optimizer would do it inside its step, so Lightning has not
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        if not parameters:
            return
        norms = gradient_norms(parameters, self.norm_type)
        after, was_clipped = self._clip(pl_module, index, parameters, norms)

        nonfinite = on_any_rank(trainer, parameters, ~norms.total.isfinite())
        truly_nonfinite = (
            nonfinite if scaler is None else nonfinite & ~scale_may_have_overflowed(scaler).to(nonfinite.device)
        )
        self._counts.setdefault(index, StepCounts()).add(was_clipped & ~nonfinite, nonfinite, truly_nonfinite)
        if self._log and not trainer.barebones:
            self._log_norms(trainer, pl_module, index, norms.total, after)
        if self.log_layers and logs_at_this_step(trainer):
            names = self._names_of(pl_module, parameters)
            layers = {f"grad_norm/{name}": norm for name, norm in zip(names, norms.per_parameter, strict=True)}
            pl_module.log_dict(layers, batch_size=1)
        if self.on_nonfinite == "raise" and truly_nonfinite:
            why, finite = 'on_nonfinite="raise"', norms.per_parameter.isfinite()
            raise _nonfinite_error(trainer, self._names_of(pl_module, parameters), finite, why)
        if self.on_nonfinite == "skip":
            known = self._skip(trainer, optimizer, index, nonfinite, by_scaler=scaler is not None)
            if self._too_many_skips(index, norms, known):
                why = f"more than max_consecutive_skips={self.max_consecutive_skips} steps in a row were skipped"
                raise _nonfinite_error(trainer, self._names_of(pl_module, parameters), self._finite[index], why)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Put the schedulers of skipped steps back."""
        for index in list(self._held):
            self._restore_schedulers(index)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say so when there was nothing to clip."""
        batches = trainer.fit_loop.total_batch_idx + 1
        unseen = [index for index in range(len(trainer.optimizers)) if index not in self._counts]
        if batches and unseen:
            rank_zero_warn(f"GradientClipping saw 0 steps of optimizers {unseen} in {batches} batches.")

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave nothing behind."""
        self._close()

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Leave nothing behind."""
        self._close()

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of each optimizer, and what the thresholds have learnt."""
        return {
            "counts": {index: counts.state_dict() for index, counts in self._counts.items()},
            "thresholds": {key: state for key, t in self._thresholds.items() if (state := t.state_dict())},
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on counting and learning where the checkpoint stopped."""
        for index, counts in state_dict["counts"].items():
            self._counts[index] = StepCounts()
            self._counts[index].load_state_dict(counts)
        for key, state in state_dict["thresholds"].items():
            threshold = self._clip_groups.new_threshold(key.partition(":")[2])
            if threshold.state_dict().keys() <= state.keys() and not isinstance(threshold, NoThreshold):
                threshold.load_state_dict(state)
                self._thresholds[key] = threshold
            else:
                rank_zero_warn(f"GradientClipping has another method now: what it had learnt for {key!r} is dropped.")

    def _clip(
        self, pl_module: LightningModule, index: int, parameters: list[Tensor], norms: GradientNorms
    ) -> tuple[Tensor, Tensor]:
        """Clip each part; return the norm of all gradients after it and whether anything was clipped."""
        after, was_clipped = [], []
        for group in self._groups_of(pl_module, index, parameters):
            total = group.norm(norms, self.norm_type)
            if group.method is None:
                after.append(total)
                continue
            threshold = self._thresholds.setdefault(f"{index}:{group.label}", group.method.new_threshold())
            clipped = group.method.clip_(group.parameters, total, self.norm_type, threshold)
            measured = (
                gradient_norms(group.parameters, self.norm_type).total
                if clipped.norm_after is None
                else clipped.norm_after
            )
            after.append(measured)
            was_clipped.append(clipped.was_clipped)
        if len(after) == 1:
            return after[0], was_clipped[0] if was_clipped else torch.zeros_like(norms.total, dtype=torch.bool)
        return torch.linalg.vector_norm(torch.stack(after), self.norm_type), torch.stack(was_clipped).any()

    def _groups_of(self, pl_module: LightningModule, index: int, parameters: list[Tensor]) -> list[ClipGroup]:
        """Divide the parameters of an optimizer, anew only when others than before have a gradient."""
        identities = [id(parameter) for parameter in parameters]
        known, groups = self._groups.get(index, ([], []))
        if identities != known:
            names = [] if self._clip_groups.is_single else self._names_of(pl_module, parameters)
            groups = self._clip_groups.split(parameters, names)
            self._groups[index] = identities, groups
        return groups

    def _names_of(self, pl_module: LightningModule, parameters: list[Tensor]) -> list[str]:
        if any(parameter not in self._names for parameter in parameters):
            self._names = _names(pl_module)  # some were added since
        return [self._names.get(parameter, f"parameter {place}") for place, parameter in enumerate(parameters)]

    def _skip(self, trainer: Trainer, optimizer: Optimizer, index: int, nonfinite: Tensor, by_scaler: bool) -> bool:
        """Leave the step out where the gradients are not finite; return whether the host knows that it is left out."""
        on_device = by_scaler or skips_on_device(optimizer)
        if on_device and not self.hold_lr_on_skip:
            if not by_scaler:  # which does it by itself
                skip_step_on_device_(optimizer, nonfinite)
            return False
        if not nonfinite:
            return False
        if self.hold_lr_on_skip:
            schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
            own = [scheduler for scheduler in schedulers if getattr(scheduler, "optimizer", None) is optimizer]
            self._held[index] = HeldSchedulers(optimizer, own)
        if not by_scaler:
            skip_step_(optimizer)
        return True

    def _too_many_skips(self, index: int, norms: GradientNorms, known_to_be_skipped: bool) -> bool:
        """Whether too many steps in a row were left out; read from the device only every so many steps."""
        limit, counts = self.max_consecutive_skips, self._counts[index]
        if limit is None:
            return False
        finite = norms.per_parameter.isfinite()
        before = self._finite.get(index, finite)
        # a step that was not left out says nothing about the layers
        self._finite[index] = (
            torch.where(counts.consecutive > 0, finite, before) if before.shape == finite.shape else finite
        )
        return (known_to_be_skipped or counts.steps % limit == 0) and bool(counts.most_consecutive > limit)

    def _restore_schedulers(self, index: int) -> None:
        if index in self._held:
            self._held.pop(index).restore()

    def _refuse_unseen_step(self, index: int) -> Callable[..., None]:
        """Make the hook that stops training after a step of an optimizer of which Lightning has said nothing."""

        def refuse(*_: Any) -> None:
            if index not in self._seen:
                raise MisconfigurationException(
                    f"GradientClipping cannot clip optimizer {index}: it was stepped past Lightning, which calls no "
                    "hook then. Step what `self.optimizers()` gives (use_pl_optimizer=True), and the `optimizer` that "
                    "`optimizer_step` is given."
                )
            self._seen.discard(index)

        return refuse

    def _log_norms(
        self, trainer: Trainer, pl_module: LightningModule, index: int, before: Tensor, after: Tensor
    ) -> None:
        prefix = "grad_norm" if len(trainer.optimizers) == 1 else f"grad_norm/{index}"
        counts = self._counts[index]
        values = {"pre_clip": before, "post_clip": after, "clipped_fraction": counts.clipped / counts.steps}
        if self.on_nonfinite == "skip":
            values["skipped_steps"] = counts.skipped
        # a batch size is of no meaning for a step's value, and Lightning asks for it under `dataloader_iter`
        pl_module.log_dict({f"{prefix}/{name}": value for name, value in values.items()}, batch_size=1)


def _names(pl_module: LightningModule) -> dict[Tensor, str]:
    return {parameter: strip_compile_prefix(name) for name, parameter in pl_module.named_parameters()}


def _nonfinite_error(trainer: Trainer, names: list[str], finite: Tensor, why: str) -> RuntimeError:
    """Name the layers whose gradients are not finite."""
    bad = [name for name, is_finite in zip(names, finite.tolist(), strict=True) if not is_finite]
    listed = ", ".join(bad[:10]) + ", ..." * (len(bad) > 10)
    if len(bad) == len(names):
        listed += "; that all are points to the loss itself or to its batch"
    return RuntimeError(
        f"GradientClipping({why}): {len(bad)} of {len(names)} gradients are not finite at global step "
        f"{trainer.global_step} (epoch {trainer.current_epoch}): {listed}."
    )
