"""The callback `SpikeGuard`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from lightning_tricks._callback import FLATTENING, TrickCallback
from lightning_tricks._guards import overriding
from lightning_tricks._lightning_compat.fit import is_last_batch, num_batches_done
from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.left_out_steps import around_steps, ends_step, hook_setter, is_without_steps
from lightning_tricks._lightning_compat.logged_values import log_step_values
from lightning_tricks._lightning_compat.observers import observe_fetches
from lightning_tricks._lightning_compat.trainer import active_scaler
from lightning_tricks._shared.checks import check_choice, check_count, check_number
from lightning_tricks._shared.tensors import local_part, parameters_of, tensors_in
from lightning_tricks._shared.text import counted
from lightning_tricks._torch_compat.optimizers import is_unscaled, scale_of
from lightning_tricks.gradient_clipping.core.clipping import gradient_norms, gradients_of
from lightning_tricks.spike_guard.functional import RobustBand
from lightning_tricks.spike_guard.snapshot import Snapshots, plain


class _LeftOut(Exception):  # noqa: N818  # no error: it leaves the optimizer's step before weights change
    """The step of the present batch is left out."""


@dataclass
class _Window:
    """Optimizer steps that are kept or left out together.

    Attributes:
        snapshot: The state of the fit before them, as `Snapshots` takes it.
        values: The loss and the norm of the gradients of each step that is not judged yet, shape (2,); infinity for
            what is not finite, -infinity for what does not count.
        ends: The index of the last batch of each of these steps.
        batches: How many batches were trained.
    """

    snapshot: dict[str, Any]
    values: list[Tensor] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    batches: int = 0


class SpikeGuard(TrickCallback):
    """Skip or rewind the batches at which the loss, or the norm of the gradients, jumps out of its usual band.

    A value is a spike if its logarithm is more than `threshold` spreads above those of the last `window` values, by a
    robust and by the plain spread (see `RobustBand`), or if the loss or a gradient is NaN or infinite. The loss of a
    step is the largest of its accumulated batches and of all ranks, so all ranks decide alike. An epoch's last batch,
    if it has fewer rows than the others, and the epoch in which `StochasticWeightAveraging` recomputes batch
    statistics, which has no steps, are left out only if they are not finite.

    "skip" leaves out the batches of one optimizer step, all of them under accumulation. Weights, buffers, optimizer,
    schedules and `global_step` stay as they were, and `on_train_batch_end` gets an empty dict of outputs.

    "rewind" judges `every_n_train_steps` optimizer steps at once, fewer if an epoch or the fit ends or validation
    begins. If one of them is a spike, or a weight is not finite, it restores the state before them, which is kept on
    the device, and leaves out all their batches, also from the counts of `MetricsMonitor` and `ImageLogger`.

    Either way the run continues bit for bit as one whose dataloader leaves those batches out: with random states, batch
    statistics, optimizers, schedules, the GradScaler, metrics of the module and the values logged for the epoch.
    `batch_idx` and the loggers' step still count the left-out batches.

    Logs `spike_guard/left_out_batches`. Each spike is a warning with its value, and an entry of `spikes`.

    Args:
        mode: "skip" or "rewind".
        monitor: "loss" for the return value of `training_step`, or "grad_norm" for the 2-norm of the unscaled gradients
            of a step, before they are clipped.
        threshold: The usual number of spreads above the last values, > 0. `float("inf")` accepts all finite values.
        window: The number of last values for the spreads, at least 2.
        warmup_steps: The number of first steps in which only values that are not finite are spikes.
        every_n_train_steps: With "rewind": the number of optimizer steps (batches under manual optimization) to judge
            at once.
        max_consecutive: Raise an error after more than this many consecutive skips or rewinds; at least 1.

    Attributes:
        spikes: One entry per spike: `epoch`, `batch_idx`, `global_step` before it, `value`, `limit` and the number of
            batches `left_out`.
        has_left_out_batch: Whether the current batch was left out.

    "skip" reads one value from the device in each step, as a GradScaler does; "rewind" one in `every_n_train_steps`.

    Raises:
        TypeError: If an argument is of the wrong type.
        ValueError: If an argument is out of range.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[SpikeGuard("rewind", every_n_train_steps=50)], accelerator="cpu", logger=False)
    """

    training_arguments = ("mode", "monitor", "threshold", "window", "warmup_steps", "every_n_train_steps")

    def __init__(
        self,
        mode: Literal["skip", "rewind"] = "skip",
        *,
        monitor: Literal["loss", "grad_norm"] = "loss",
        threshold: float = 8.0,
        window: int = 128,
        warmup_steps: int = 128,
        every_n_train_steps: int = 100,
        max_consecutive: int = 10,
    ) -> None:
        self.mode = check_choice("mode", mode, ("skip", "rewind"))
        self.monitor = check_choice("monitor", monitor, ("loss", "grad_norm"))
        self.threshold = check_number("threshold", threshold, above=0)
        self.window = check_count("window", window, minimum=2)
        self.warmup_steps = check_count("warmup_steps", warmup_steps)
        self.every_n_train_steps = check_count("every_n_train_steps", every_n_train_steps)
        self.max_consecutive = check_count("max_consecutive", max_consecutive)
        self._forget()
        super().__init__()

    def _forget(self) -> None:
        self.spikes: list[dict[str, Any]] = []
        self._band = RobustBand(self.threshold, self.window, self.warmup_steps)
        self._counts = {"batches": 0, "left_out": 0, "in_a_row": 0}

    def _forget_run(self) -> None:
        self._snapshots: Any = None  # `Snapshots`, from the start of the fit on
        self._open: _Window | None = None
        self._loss: Tensor | None = None  # of the present step
        self._norm: Tensor | None = None
        # of the present batch; one that is alone is in the epoch that has no steps
        self._is_fresh = self.has_left_out_batch = self._is_within_step = self._is_short = self._is_alone = False
        self._left_out_in_epoch, self._rows = 0, list[int]()
        self._logged = dict[int, Tensor]()  # the number that is logged, as a tensor

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Raise an error for unsupported settings, and reset the counts."""
        super().setup(trainer, pl_module, stage)
        if stage != "fit":
            return
        self.refuse_strategies(trainer, FLATTENING, "SpikeGuard does not see the steps of {}: use DDP or FSDP2.")
        if self.mode == "skip" and not pl_module.automatic_optimization:
            raise _unskippable(
                "manual optimization, where an optimizer may step before another one sees the spike",
                ', and return the loss, or a dict with "loss", from training_step, or give monitor="grad_norm"',
            )
        self._forget()

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start to watch the steps."""
        if self.mode == "skip" and any(isinstance(optimizer, LBFGS) for optimizer in trainer.optimizers):
            raise _unskippable("LBFGS, which moves the weights between its losses")
        band = f"{self.threshold:g} spreads above the last {self.window}, after {self.warmup_steps} steps"
        above = f", or more than {band}" if math.isfinite(self.threshold) else ""
        self.say(f"a spike is a {self.monitor} that is not finite{above}")
        self._snapshots = Snapshots(trainer, self, with_steps=self.mode == "rewind")
        plain = trainer.strategy.optimizer_step

        def optimizer_step(optimizer: Optimizer, closure: Callable[[], Any], *args: Any, **kwargs: Any) -> Any:
            return plain(optimizer, partial(self._closure, trainer, optimizer, closure), *args, **kwargs)

        enter = self._installed.enter_context
        enter(observe_fetches(trainer, self._prepare, partial(self._fetched, trainer), "SpikeGuard"))
        enter(overriding(trainer.strategy, optimizer_step=optimizer_step))
        enter(
            around_steps(
                trainer,
                training_step=partial(self._note_loss, trainer),
                batch=partial(self._run_batch, trainer),
                epoch=partial(self._run_epoch, trainer),
                validation=partial(self._judge_before, trainer),
                batches_left_out=lambda: None if self.has_left_out_batch else self._left_out_in_epoch,
            )
        )

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Start again: no step of an epoch is judged with those of another."""
        self._open, self._loss, self._left_out_in_epoch = None, None, 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Look whether it is an epoch's last batch with fewer rows, whose values spread more than those of others."""
        self._is_fresh, self.has_left_out_batch, self._is_alone = True, False, is_without_steps(trainer)
        rows = [tensor.shape[0] for tensor in tensors_in(batch) if tensor.ndim]
        has_fewer = not rows or any(now < then for now, then in zip(rows, self._rows, strict=False))
        self._is_short, self._rows = has_fewer and is_last_batch(trainer), rows

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say how many batches were left out."""
        left_out, batches = self._counts["left_out"], self._counts["batches"]
        self.say(f"left out {left_out:,} of {batches:,} batches, for {counted(len(self.spikes), 'spike')}")
        super().on_fit_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the band, the spikes and the counts."""
        return {"band": self._band.state_dict(), "spikes": [*self.spikes], "counts": dict(self._counts)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._band.load_state_dict(state_dict["band"])
        self.spikes = [dict(spike) for spike in state_dict["spikes"]]
        self._counts = dict(state_dict["counts"])

    def mid_epoch_state(self) -> dict[str, Any]:
        """Return the steps not yet judged, with the snapshot before them."""
        window = vars(self._open) | {"snapshot": plain(self._open.snapshot)} if self._open is not None else {}
        return {"window": window, "loss": self._loss, "left_out": self._left_out_in_epoch, "rows": self._rows}

    def load_mid_epoch_state(self, state: dict[str, Any]) -> None:
        """Restore what `mid_epoch_state` returned."""
        self._open = _Window(**state["window"]) if state["window"] else None
        self._loss, self._left_out_in_epoch, self._rows = state["loss"], state["left_out"], state["rows"]

    def _prepare(self, stage: str) -> None:
        """Take a snapshot before a batch is fetched, unless there are steps that wait to be judged."""
        if stage == "train" and (self._open is None or not self._open.batches):
            self._open = None  # its memory is free for the next one
            self._open = _Window(self._snapshots.take())

    def _fetched(self, trainer: Trainer, stage: str) -> None:
        """Keep what the loader has drawn for a whole epoch, such as an order, with its first batch."""
        if stage == "train" and self._open is not None and not num_batches_done(trainer):
            self._open.snapshot["random"] = self._snapshots.random_state()

    def _note_loss(self, trainer: Trainer, run: Callable[[], Any]) -> Any:
        """Run a training step, and note its loss."""
        output = run()
        loss = output.get("loss") if isinstance(output, Mapping) else output
        if not isinstance(loss, Tensor):
            if self.monitor == "loss" and not trainer.lightning_module.automatic_optimization:
                raise MisconfigurationException(
                    'SpikeGuard(monitor="loss") needs the loss, and training_step returned '
                    f'{type(output).__name__}: return the loss, or a dict with "loss", or use monitor="grad_norm".'
                )
        elif self._is_fresh:  # not at a further evaluation of LBFGS
            loss = loss.detach().to(trainer.strategy.root_device, torch.float32)
            # a copy; ranks agree on infinity, and not on NaN
            loss = (loss.max() if loss.ndim else loss).nan_to_num(math.inf, math.inf, math.inf)
            if self._is_short:
                loss = torch.where(loss.isinf(), loss, -math.inf)
            self._loss = loss if self._loss is None else torch.maximum(self._loss, loss)
        return output

    def _closure(self, trainer: Trainer, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Call the closure of an optimizer's step, and leave it before weights change if "skip" finds a spike."""
        result = closure()
        if self._is_alone:
            return result
        if self._is_fresh and (self.mode == "skip" or self.monitor == "grad_norm"):
            norm = _unscaled_norm(trainer, optimizer, is_watched=self.monitor == "grad_norm")
            self._norm = norm if self._norm is None else torch.hypot(self._norm, norm)
        self._is_fresh = self._is_fresh and not trainer.lightning_module.automatic_optimization
        if self.mode == "skip":
            self._note_step(trainer)
            if (spike := self._judge(trainer)) is not None:
                raise _LeftOut(spike)
        return result

    def _run_batch(self, trainer: Trainer, run: Callable[[], Any]) -> Any:
        """Run a batch, judge the steps that are due, and log how many batches were left out."""
        if self._open is None:
            self._prepare("train")  # the batch was fetched in advance
        window = cast(_Window, self._open)
        window.batches += 1
        self._counts["batches"] += 1
        self._is_within_step = not ends_step(trainer)
        set_hook = hook_setter(trainer)
        try:
            output = run()
        except _LeftOut as left_out:
            set_hook()
            self._leave_out(trainer, *left_out.args)
        else:
            self._end_batch(trainer, window)
        if not trainer.barebones:
            number = self._counts["left_out"]
            if number not in self._logged:
                self._logged = {number: torch.tensor(float(number), device="cpu")}
            log_step_values(trainer, type(self).__name__, {"spike_guard/left_out_batches": self._logged[number]})
        return {} if self.has_left_out_batch else output

    def _end_batch(self, trainer: Trainer, window: _Window) -> None:
        """Judge the steps that are due after a batch."""
        if self._is_alone or not self._is_within_step:
            if self._is_fresh or self.mode == "rewind":  # or it was judged before the step
                self._note_step(trainer)
            # the module may have called the closure alone
            is_automatic = trainer.lightning_module.automatic_optimization
            self._is_within_step = self._is_fresh and is_automatic and not self._is_alone
            is_due = self.mode == "skip" or self._is_alone or len(window.ends) >= self.every_n_train_steps
            is_due = is_due and not self._is_within_step
            if is_due or is_last_batch(trainer) or 0 <= trainer.max_steps <= trainer.global_step:
                self._close_window(trainer)
        if self._open is not None:
            self._snapshots.add_before_next_batch(window.snapshot)

    def _run_epoch(self, trainer: Trainer, run: Callable[[], Any]) -> Any:
        """Run the batches of an epoch, and judge the open steps if it was stopped."""
        output = run()
        self._close_window(trainer)
        return output

    def _judge_before(self, trainer: Trainer, run: Callable[[], Any]) -> Any:
        """Judge the open steps before what follows, unless there are batches of an incomplete one."""
        if self.mode == "rewind" and not self._is_within_step:
            self._close_window(trainer)
        return run()

    def _note_step(self, trainer: Trainer) -> None:
        """Note the values of a step that is complete."""
        window, device = cast(_Window, self._open), trainer.strategy.root_device
        noted = (torch.full((), -math.inf, device=device) if v is None else v for v in (self._loss, self._norm))
        loss, norm = (value.to(device, torch.float32) for value in noted)
        self._loss = self._norm = None
        if self._is_short:
            norm = torch.where(norm.isfinite(), -math.inf, norm)
        window.values.append(torch.stack([loss, norm]))
        window.ends.append(num_batches_done(trainer) - 1)

    def _close_window(self, trainer: Trainer) -> None:
        """Keep the open steps, or go back to the state before them."""
        if (spike := self._judge(trainer)) is not None:
            self._leave_out(trainer, spike)
        self._open = None

    def _judge(self, trainer: Trainer) -> dict[str, Any] | None:
        """Return the first spike among the open steps; None if they are kept. All ranks have to call it."""
        window = self._open
        if window is None or not window.values:
            return None
        values, ends = torch.stack(window.values), window.ends
        window.values, window.ends = [], []
        if self.mode == "rewind":
            values[-1, 0] = values[-1, 0].maximum(_infinite_weights(trainer))
        if trainer.world_size > 1:
            values = trainer.strategy.reduce(values.nan_to_num(-math.inf, math.inf, -math.inf), reduce_op="max")
        place, rows = ("loss", "grad_norm").index(self.monitor), values.tolist()
        # a loss that is not finite is a spike of the norm as well, and a norm that a GradScaler skips is left to it
        judged = [math.inf if math.inf in row else -math.inf if self._is_alone else row[place] for row in rows]
        watched = [(end, value) for end, value in zip(ends, judged, strict=True) if value > -math.inf]  # NaN is not
        found = self._band.take([value for _, value in watched])
        if found is None:
            self._counts["in_a_row"] = 0
            return None
        number, limit = found
        return {"batch_idx": watched[number][0], "value": watched[number][1], "limit": limit}

    def _leave_out(self, trainer: Trainer, spike: dict[str, Any]) -> None:
        """Go back to the snapshot, and report the spike."""
        window, self._open, counts = cast(_Window, self._open), None, self._counts
        self._snapshots.go_back(window.snapshot)
        self.has_left_out_batch = True
        self._left_out_in_epoch += window.batches
        counts |= {"left_out": counts["left_out"] + window.batches, "in_a_row": counts["in_a_row"] + 1}
        spike |= {"epoch": trainer.current_epoch, "global_step": trainer.global_step, "left_out": window.batches}
        self.spikes.append(spike)
        value, limit = spike["value"], spike["limit"]
        what = f"a {self.monitor} of {value:.4g}, above {limit:.4g}" if math.isfinite(value) else "a value not finite"
        said = (
            f"SpikeGuard: {what}, at batch {spike['batch_idx']} of epoch {spike['epoch']}: "
            f"{window.batches} batches are left out, and the fit continues from global step {spike['global_step']}."
        )
        if counts["in_a_row"] > self.max_consecutive:
            raise RuntimeError(
                f"{said} These are {counts['in_a_row']} spikes in a row, more than max_consecutive="
                f"{self.max_consecutive}: the values have changed permanently, or a step has damaged the weights, "
                'which only "rewind" undoes. Look at these batches, lower the learning rate, or use "rewind", a longer '
                "every_n_train_steps or a larger threshold."
            )
        rank_zero_warn(said)


def _unskippable(what: str, needs: str = "") -> MisconfigurationException:
    return MisconfigurationException(f'SpikeGuard("skip") cannot leave out a step under {what}: use "rewind"{needs}.')


def _infinite_weights(trainer: Trainer) -> Tensor:
    """Return infinity if a weight that is trained is not finite, else -infinity; shape ()."""
    device = trainer.strategy.root_device
    weights = [local_part(p).isfinite().all() for p in trainer.lightning_module.parameters() if p.requires_grad]
    none = torch.ones((), dtype=torch.bool, device=device)  # a module may have no weights
    are_finite = torch.stack([none, *(finite.to(device) for finite in weights)]).all()
    return torch.full((), math.inf, device=device).where(~are_finite, -math.inf)


def _unscaled_norm(trainer: Trainer, optimizer: Optimizer, *, is_watched: bool) -> Tensor:
    """Return the norm of an optimizer's gradients, shape (); NaN where a GradScaler may have made them overflow.

    If it is not watched, any number does that is as finite as they are: on a CPU a sum takes half the time.
    """
    gradients = gradients_of(parameters_of(optimizer))
    if not is_watched and {(type(g), g.dtype, g.is_cpu) for g in gradients} == {(Tensor, torch.float32, True)}:
        norm = torch.stack([gradient.sum() for gradient in gradients]).sum().detach()
    else:
        norm = gradient_norms(parameters_of(optimizer)).total
    scaler = active_scaler(trainer)
    if scaler is None or (scale := scale_of(scaler)) is None:
        return norm.nan_to_num(math.inf, math.inf, math.inf)
    norm = norm if is_unscaled(scaler, optimizer) else norm / scale
    return torch.where(norm.isfinite(), norm, torch.where(scale > 1, math.nan, math.inf))
