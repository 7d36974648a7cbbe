"""What automatic optimization does with a batch, step by step, and what is logged meanwhile."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_tricks._lightning_compat.ddp import backward_of_zeros, ddp_wrapper
from lightning_tricks._lightning_compat.guards import needs_private, overriding, set_private

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

    from lightning_tricks._lightning_compat.flavor import Trainer

_TRICK = "Microbatching"


class BatchStep:
    """The parts of which Lightning makes the closure of an optimizer step, for one batch.

    Attributes:
        batch: The batch; None where `training_step` takes the iterator of the loader instead.
        trains: Whether there is a backward pass.
        begins_window: Whether the batch is the first of those that are accumulated.
        is_cut: For the one that cuts it, to remember that it did.
    """

    def __init__(self, trainer: Trainer, loop: Any, arguments: Mapping[str, Any], closure: Any) -> None:
        self._trainer, self._loop, self._arguments = trainer, loop, arguments
        with needs_private(_TRICK):
            # None where StochasticWeightAveraging only runs forward, and in batches that add to earlier gradients
            # (loops/optimization/automatic.py, `_make_backward_fn`, `_make_zero_grad_fn`).
            self._backward, self._zero_grad = closure._backward_fn, closure._zero_grad_fn
            self.run_whole: Callable[[], Any] = closure.closure
            # Lightning puts the name back after a hook, but not where one raises, as a part does that does not fit into
            # memory.
            self._hook: Any = trainer.lightning_module._current_fx_name
        self.batch = arguments.get("batch")
        self.trains = self._backward is not None
        self.begins_window = self._zero_grad is not None
        self.is_cut = False
        self._wrapper = ddp_wrapper(trainer)

    def training_step(self, part: Any) -> tuple[Tensor | None, dict[str, Any]]:
        """Return the loss of a part of the batch, divided by the batches that are accumulated, and what else came."""
        result = self._loop._training_step(OrderedDict(self._arguments, batch=part))
        return result.closure_loss, result.extra

    def training_step_alone(self, part: Any) -> tuple[Tensor | None, Any]:
        """Return the loss of a part, and all that came, past the strategy, which does not hear of it."""
        module: Any = self._trainer.lightning_module
        set_private(module, _current_fx_name="training_step")
        try:
            # Autocast; `Strategy.training_step`, which others wrap to count or judge steps, enters it otherwise.
            with self._trainer.precision_plugin.train_step_context():
                out = module.training_step(*OrderedDict(self._arguments, batch=part).values())
        finally:
            set_private(module, _current_fx_name=self._hook)
        return out if isinstance(out, Tensor) or out is None else out["loss"], out

    def zero_grad(self) -> None:
        """Set the gradients to zero if the batch is the first of those that are accumulated."""
        if self._zero_grad is not None:
            self._zero_grad()

    def backward(self, loss: Tensor) -> None:
        """Run the backward pass of a part, without the hooks around it."""
        precision: Any = self._trainer.precision_plugin
        scaler = getattr(precision, "scaler", None)
        # `Strategy.backward` would call `on_before_backward` and `on_after_backward` for each part; in place of them,
        # what `MixedPrecision.pre_backward` does beside the hooks.
        scaled = loss if scaler is None else scaler.scale(loss)
        precision.backward(scaled, self._trainer.lightning_module, self._trainer.optimizers[0])

    def backward_with_hooks(self, loss: Tensor) -> None:
        """Run the backward pass of the last part, with the hooks before and after it."""
        self._backward(loss)

    def end_unsynchronised(self, loss: Tensor) -> None:
        """Average the gradients of all ranks where that is due, and call the hooks of a backward pass with a loss."""
        # DDP averages gradients when its hooks see them come; after parts that were kept apart, zeros let it do that
        # once.
        self._backward(loss + backward_of_zeros(self._trainer))

    def without_sync(self) -> AbstractContextManager[Any]:
        """Let backward passes leave the gradients of this rank as they are, until the context is left."""
        strategy: Any = self._trainer.strategy
        return nullcontext() if self._wrapper is None else strategy.block_backward_sync()

    def rewind(self) -> None:
        """Forget which hook an error has left."""
        set_private(self._trainer.lightning_module, _current_fx_name=self._hook)

    def result(self, loss: Tensor | None, extra: dict[str, Any]) -> Any:
        """Return what a closure returns."""
        return self._loop.output_result_cls(loss, extra=extra)


@contextmanager
def losses_changed_by(trainer: Trainer, change: Callable[[Tensor], Tensor]) -> Iterator[None]:
    """Let a function change the loss of each training step, until the context is left.

    Entered in `setup`, it comes before what others put around training steps when the fit starts.
    """
    plain = trainer.strategy.training_step

    def training_step(*args: Any, **kwargs: Any) -> Any:
        output = plain(*args, **kwargs)
        # Both are allowed (automatic.py, `from_training_step_output`); anything else is left for Lightning to refuse.
        if isinstance(output, Mapping) and "loss" in output:
            return {**output, "loss": change(output["loss"])}
        return change(output) if isinstance(output, Tensor) else output

    with overriding(trainer.strategy, training_step=training_step):
        yield


@contextmanager
def batches_run_by(trainer: Trainer, run: Callable[[BatchStep], Any]) -> Iterator[None]:
    """Let a function do the work of each closure of automatic optimization, until the context is left."""
    with needs_private(_TRICK):
        loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        # The closure alone has the forward and the backward pass of a batch in one; an optimizer such as LBFGS calls it
        # several times.
        make_closure = loop._make_closure

    def make(arguments: Mapping[str, Any], *others: Any) -> Any:
        plain = make_closure(arguments, *others)
        step = BatchStep(trainer, loop, arguments, plain)

        # As `Closure.closure` is: `step` of an optimizer runs without gradients, and those that are not torch's may not
        # turn them on.
        @torch.enable_grad()
        def closure(*_: Any, **__: Any) -> Any:
            return run(step)

        made = copy(plain)  # one that referred to itself would keep the batch until Python looks for cycles
        set_private(made, closure=closure)
        return made

    with overriding(loop, _make_closure=make):
        yield


class LogQueue:
    """Keeps what is logged in a training batch, until it is known what is to be logged for the whole of it.

    Args:
        trainer: The Trainer.
        merge: Takes the key, the values, the rows and the batch sizes of the parts of a batch and the name of the
            reduction, and returns the value and the batch size of the whole.

    Attributes:
        rows: The rows of the part whose values are kept now.
    """

    def __init__(self, trainer: Trainer, merge: Callable[..., tuple[Any, Any]]) -> None:
        with needs_private(_TRICK):
            # `LightningModule.log` ends in this collection, after it has checked its arguments.
            self._results: Any = trainer.fit_loop.epoch_loop._results
            self._log = self._results.log
        self._merge = merge
        self.rows = 0
        self._waiting: dict[tuple[str, str], list[tuple[int, Any, dict[str, Any]]]] | None = None

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take what is logged in training, until the context is left."""
        # As Lightning's own `log` is decorated (result.py): a compiled step would else be traced into the dict.
        with overriding(self._results, log=torch.compiler.disable(self._take)):
            yield

    def _take(self, hook: str, name: str, value: Any, **options: Any) -> None:
        if self._waiting is None:
            self._log(hook, name, value, **options)
            return
        # A graph that is kept until the batch's end would hold the activations of all parts, the memory that is to be
        # saved. A metric's `_forward_cache` is overwritten by the next part.
        kept = value.detach() if isinstance(value, Tensor) else (value, value._forward_cache)
        self._waiting.setdefault((hook, name), []).append((self.rows, kept, options))

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep what is logged, until `flush` is called; what is left when the context is left is dropped."""
        # A batch that does not fit is tried again in smaller parts, and a comparison runs beside the training: what
        # these log is dropped, and the values of the batch are logged once.
        outer, self._waiting = self._waiting, {}
        try:
            yield
        finally:
            self._waiting = outer

    def batch_sizes(self) -> dict[str, int]:
        """Return the batch sizes that were given last with what is kept, by key."""
        last = {name: entries[-1][2].get("batch_size") for (_, name), entries in (self._waiting or {}).items()}
        return {name: size for name, size in last.items() if size is not None}

    def flush(self) -> None:
        """Log what was kept, the values of each key as one."""
        waiting, self._waiting = self._waiting or {}, None
        for (hook, name), entries in waiting.items():
            rows, values, options = (list(column) for column in zip(*entries, strict=True))
            sizes = [given.get("batch_size") for given in options]
            reduction = options[-1].get("reduce_fx", "mean")
            how = getattr(reduction, "__name__", str(reduction)).lower()
            if isinstance(values[-1], Tensor):
                value, size = self._merge(name, values, rows, sizes, how)
            else:  # a metric, whose state is that of the whole batch already
                value, size = values[-1][0], sizes[-1]
                caches = [cache for _, cache in values]
                if all(isinstance(cache, Tensor) for cache in caches):
                    set_private(value, _forward_cache=self._merge(name, caches, rows, [None] * len(rows), "mean")[0])
            self._log(hook, name, value, **{**options[-1], "batch_size": size})
