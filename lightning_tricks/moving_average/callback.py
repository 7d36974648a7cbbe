"""The callback `ExponentialMovingAverage`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from operator import is_
from typing import Any, Literal, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from lightning_tricks._callback import FLATTENING, TrickCallback
from lightning_tricks._lightning_compat.checkpoints import checkpoint_contents_changed
from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    Trainer,
    rank_zero_warn,
)
from lightning_tricks._lightning_compat.guards import overriding
from lightning_tricks._lightning_compat.observers import around_validations
from lightning_tricks._lightning_compat.sharded import move_shards, shards_beside_weights
from lightning_tricks._lightning_compat.trainer import callbacks_of, model_averager
from lightning_tricks._shared.checks import check_choice
from lightning_tricks._shared.patterns import name_as_in_
from lightning_tricks._shared.tensors import named_tensors, parameters_of, shard_as
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.optimizers import register_step_post_hook
from lightning_tricks._torch_compat.tensors import tensor_version
from lightning_tricks.moving_average.functional import MovingAverage, as_in, batch_statistics

_COPIES = ("state_dict", "current_model_state")  # of the weights in a checkpoint: the average, and those of training


class ExponentialMovingAverage(TrickCallback):
    """Average the weights over the steps of training, and evaluate, save and return the average.

    Validations of a fit see the average, with all of their hooks; the weights of training return afterwards, also after
    an error. When `fit` returns, the module has the average. The first update copies the weights, so that the initial
    ones are never a part of it.

    An average is updated after a step of the optimizer that owns the weights: not by batches that are accumulated, nor
    by steps that a GradScaler skips. Weights that are frozen are not averaged before they are trained; the average of
    those that are released or added later begins at their first step, with a warm-up of its own.

    The `state_dict` of a checkpoint is what was evaluated, as that of Lightning's `WeightAveraging`, so that
    `load_from_checkpoint` gives the weights to which its metric belongs. The weights of training are beside it, and a
    fit that resumes continues with them, bit for bit.

    Args:
        decay: How much of the average each update keeps, in [0, 1). It averages about the last `1 / (1 - decay)`
            updates; 0 switches it off.
        warmup: Whether the decay of update t (from 0) is `(1 + t) / (10 + t)` as long as that is less than `decay`.
            Without it, the average of a short run is nearly the weights after its first step.
        every_n_steps: The number of steps of an optimizer from one update to the next.
        buffers: What an evaluation takes for the running means and variances of batch normalization: with "average",
            averages as of the weights, which are close to the statistics of the averaged weights; with "copy", those of
            training. All other buffers are always those of training. Each rank has its own, as in training.
        evaluate: Whether validations, the end of the fit, and the `state_dict` of checkpoints use the average.
            Otherwise checkpoints alone contain it: load it with `load_weights(module, path, ema=True)`.

    Raises:
        TypeError: If `decay` or `every_n_steps` is not a number.
        ValueError: If `decay` or `every_n_steps` is out of range, or there is no such rule for buffers.
        MisconfigurationException: In a fit under FSDP1 or DeepSpeed, with another callback that averages, local SGD, or
            without an optimizer.

    Examples:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(callbacks=[ExponentialMovingAverage(0.999)], accelerator="cpu", logger=False)
    """

    training_arguments = ("decay", "warmup", "every_n_steps", "buffers", "evaluate")

    def __init__(
        self,
        decay: float = 0.9999,
        *,
        warmup: bool = True,
        every_n_steps: int = 1,
        buffers: Literal["average", "copy"] = "average",
        evaluate: bool = True,
    ) -> None:
        MovingAverage(decay, every_n_steps=every_n_steps)  # which checks them
        self.decay = decay
        self.warmup = warmup
        self.every_n_steps = every_n_steps
        self.buffers = check_choice("buffers", buffers, ("average", "copy"))
        self.evaluate = evaluate
        super().__init__()

    def _forget_run(self) -> None:
        self._average: Any = None  # a MovingAverage while a fit runs
        self._trained: dict[str, Any] = {}  # of a checkpoint, until training starts
        self._optimizers: dict[int, Optimizer] = {}  # that are followed
        self._stepped: dict[int, list[Tensor]] = {}  # what each of them is known to train

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuse what cannot be averaged, and let validations and checkpoints have the average."""
        super().setup(trainer, pl_module, stage)
        self._installed.enter_context(shards_beside_weights(trainer.strategy))
        if stage != "fit":
            return
        message = "ExponentialMovingAverage cannot read shards of {}: use ModelParallelStrategy, or DDP."
        self.refuse_strategies(trainer, FLATTENING, message)
        for kind in (kind.__name__ for callback in callbacks_of(trainer) for kind in type(callback).__mro__):
            if kind in ("StochasticWeightAveraging", "WeightAveraging"):  # the newest Lightning alone has both
                _refuse(f"{kind} would replace the weights as well: remove one of them")
        self._average = MovingAverage(self.decay, warmup=self.warmup, every_n_steps=self.every_n_steps)
        _AVERAGES[pl_module] = self._average
        self._installed.enter_context(around_validations(trainer, partial(self._run_validation, pl_module)))
        changes = partial(self._average_weights_only, trainer, pl_module), partial(self._check_hook, pl_module)
        self._installed.enter_context(checkpoint_contents_changed(trainer, *changes))

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Refuse a fit without optimizers, and replicas that differ, as in local SGD."""
        if not {*pl_module.parameters()} & {p for optimizer in trainer.optimizers for p in parameters_of(optimizer)}:
            _refuse("it follows the steps of optimizers: return those that the module steps from configure_optimizers")
        if model_averager(trainer) is not None:
            _refuse("ranks would have different averages: leave out the `model_averaging_period` of DDPStrategy")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Continue with the weights of training that a checkpoint has beside the average."""
        if self._trained:
            present = pl_module.state_dict()
            name_as_in_(self._trained, present)
            trained = {name: shard_as(value, present.get(name, value)) for name, value in self._trained.items()}
            pl_module.load_state_dict(trained, strict=False)
            self._trained = {}
        if self._average.counts()["steps"]:  # where Lightning resumes within an epoch, no hook of its start is called
            self.on_train_epoch_start(trainer, pl_module)
        super().on_train_start(trainer, pl_module)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Follow the steps of the optimizers, of which a hook may have made new ones."""
        for number, optimizer in enumerate(trainer.optimizers):
            if self._optimizers.get(number) is not optimizer:
                self._optimizers[number] = optimizer
                handle = register_step_post_hook(optimizer, partial(self._after_step, pl_module, number))
                self._installed.callback(handle.remove)
        for number in self._optimizers:
            self._follow(pl_module, number)

    def _follow(self, module: LightningModule, number: int) -> None:
        """Find out what an optimizer steps: weights that are trained or were so before, and batch statistics."""
        self._stepped[number] = [p for p in _trainable(self._optimizers[number]) if not is_lazy(p)]
        pairs = reversed(self._optimizers.items())  # of several that have a parameter, it belongs to the first
        owners = {id(parameter): n for n, one in pairs for parameter in parameters_of(one)}
        tensors, begun = named_tensors(module), self._average.averages()
        own = [name for name, tensor in tensors.items() if owners.get(id(tensor)) == number]
        names = [n for n in own if (tensors[n].requires_grad or n in begun) and not is_lazy(tensors[n])]
        if self.buffers == "average":
            names += [name for name, owner in batch_statistics(module, owners).items() if owner == number]
        self._average.follow(number, {name: tensors[name] for name in names})

    def _after_step(self, module: LightningModule, number: int, optimizer: Optimizer, *_: Any) -> None:
        """Update the averages of what an optimizer steps; a parameter may have been added or released."""
        now, known = _trainable(optimizer), self._stepped.get(number)
        if known is None or len(now) != len(known) or not all(map(is_, now, known)):
            self._follow(module, number)
        self._average.update(number, getattr(optimizer, "found_inf", None))

    def _run_validation(self, module: LightningModule, run: Callable[[], Any]) -> Any:
        """Validate with the average, which a module that resumes has until training starts."""
        with self._average.swapped_in(module) if self.evaluate and not self._trained else nullcontext():
            return run()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the average in the module."""
        if (share := self._average.share_of_first()) > 0.5:
            rank_zero_warn(
                f"ExponentialMovingAverage: {share:.0%} of the average are the weights of its first update. For such a "
                f"run, use warmup=True, or less than decay={self.decay:g} and every_n_steps={self.every_n_steps}."
            )
        steps = self._average.counts()["steps"]
        if unseen := [type(one).__name__ for number, one in self._optimizers.items() if not steps.get(number)]:
            rank_zero_warn(
                f"ExponentialMovingAverage: {list_names(unseen)} made no step(), so what it trains is not averaged."
            )
        if self.evaluate and any(steps.values()):
            self._average.swap_in(pl_module)
            self.say(f"the module has the average of the weights, with a decay of {self.decay:g}")

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Move what later checkpoints need to where the module is now."""
        average = self._average.to(pl_module.device)
        held = average.held or {n: value for n, value in self._trained.items() if n in average.averages()}
        average.held = {name: value.to(pl_module.device) for name, value in held.items()}
        super().on_fit_end(trainer, pl_module)

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of steps and averages while a fit runs; checkpoints have them after it as well."""
        return self._average.counts() if self._average is not None else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to what `state_dict` returned."""
        if self._average is not None and state_dict:
            self._average.load_counts(state_dict)
            self._stepped.clear()

    def _average_weights_only(self, trainer: Trainer, module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if "optimizer_states" not in checkpoint:  # or Lightning has called the hook below
            self.on_save_checkpoint(trainer, module, checkpoint)
            for key in ("current_model_state", "moving_average") if self.evaluate else ():
                checkpoint.pop(key, None)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Put the average into `state_dict`, and the weights of training and the counts beside it, also after a fit."""
        average = _AVERAGES.get(pl_module)
        if average is None or not average.averages():
            return
        counts = average.counts()
        if self.evaluate:
            averaged, trained = average.split(pl_module, checkpoint["state_dict"])
            trained = as_in(averaged, self._trained) if self._trained else trained
            checkpoint |= {"state_dict": averaged, "current_model_state": trained}
        updates = max(counts["steps"].values()) // self.every_n_steps
        checkpoint["averaging_state"] = {"n_averaged": torch.tensor(updates)}  # as Lightning's WeightAveraging
        checkpoint["moving_average"] = {
            "counts": counts,
            "averages": average.others(pl_module, checkpoint["state_dict"]),
        }
        if self._average is None:  # no fit runs, in which the strategy is told how to write them
            move_shards(trainer.strategy, checkpoint)

    def _check_hook(self, module: LightningModule, _: object) -> None:
        """Let the module's hook raise an error if it changes the average, and not the weights of training."""
        hook = module.on_load_checkpoint

        def checked(checkpoint: dict[str, Any]) -> None:
            vars(module).pop("on_load_checkpoint", None)
            before = _versions(checkpoint)
            hook(checkpoint)
            pairs = zip(before, _versions(checkpoint), strict=True)
            changed = [{name for name in module.state_dict() if _differ(was[name], now[name])} for was, now in pairs]
            if checkpoint.get(_COPIES[1]) and (names := sorted(changed[0] - changed[1])):
                _refuse(
                    f"on_load_checkpoint has changed {list_names(names, 5)} in state_dict, which has the average, and "
                    "not in current_model_state, the weights with which training goes on: change both"
                )

        self._installed.enter_context(overriding(module, on_load_checkpoint=checked))

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        """Take the average and the counts of a checkpoint that is resumed, and keep the weights of training."""
        if self._average is None:
            return
        self._trained = dict(checkpoint.get("current_model_state", {}))
        if (saved := checkpoint.get("moving_average")) is None:
            self.say("the checkpoint has no average of this callback: a new one begins")
            return
        present, starts = named_tensors(pl_module), dict(saved["counts"]["starts"])
        # a strategy that has loaded shards into the module itself leaves no weights in it
        averages = {**checkpoint.get("state_dict", present), **saved["averages"]}
        for values in (averages, starts):
            name_as_in_(values, present)
        if lost := [name for name in starts if name not in averages]:
            _refuse(
                f"the file counts steps of {list_names(lost, 5)}, which are not in it: rename them in moving_average"
            )
        self._average.load_averages({n: shard_as(averages[n], present.get(n, averages[n])) for n in starts})
        self.load_state_dict({**saved["counts"], "starts": starts})


def _trainable(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for parameter in parameters_of(optimizer) if parameter.requires_grad]


def _versions(checkpoint: Mapping[str, Any]) -> list[Mapping[str, tuple[Any, int]]]:
    parts = [checkpoint.get(entry, {}).items() for entry in _COPIES]
    found = [{name: (x, tensor_version(x)) for name, x in part if isinstance(x, Tensor)} for part in parts]
    return [defaultdict(lambda: (None, 0), part) for part in found]


def _differ(one: tuple[Any, int], other: tuple[Any, int]) -> bool:
    return one[0] is not other[0] or one[1] != other[1]


def _refuse(reason: str) -> NoReturn:
    raise MisconfigurationException(f"ExponentialMovingAverage: {reason}.")


# Of the module, as a checkpoint that is saved after the fit needs them, while a callback is pickled without them
_AVERAGES: WeakKeyDictionary[LightningModule, MovingAverage] = WeakKeyDictionary()
