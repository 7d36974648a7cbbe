"""The hooks of an epoch's start, called again in a process that resumes in the middle of that epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.loggers import Logger
from torch import Tensor

from lightning_tricks._lightning_compat.fit import repeat_epoch_start_hooks
from lightning_tricks._torch_compat.tensors import tensor_version
from lightning_tricks.auto_resume.core.attributes.model_structure import restore_param_groups
from lightning_tricks.auto_resume.core.temporary_attributes import patched

ParamGroupNames = Sequence[Sequence[Sequence[str]]]


def replay_epoch_start(
    trainer: Trainer, module: LightningModule, saved_groups: ParamGroupNames, reload_weights: Callable[[], None]
) -> None:
    """Call `on_train_epoch_start` of callbacks and module, and undo its changes to state that was restored already.

    The calls are for what the hooks set outside the model: the epoch of a dataset, the number of accumulated batches, a
    part of the Trainer. Learning rates, momenta and schedulers are restored afterwards, and so are the weights and the
    states of the optimizers if the hooks change them.

    Args:
        trainer: The Trainer of the fit; the random state must be that of the epoch's start.
        module: The module that is trained.
        saved_groups: What `param_group_names` returned before the hooks were first called.
        reload_weights: Loads weights and optimizer states from the checkpoint once more.
    """
    optimizers = trainer.optimizers
    groups = [[(group, dict(group)) for group in optimizer.param_groups] for optimizer in optimizers]
    schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
    states = [deepcopy(scheduler.state_dict()) for scheduler in schedulers]
    before = [(value, tensor_version(value)) for value in _tensors(trainer, module)]
    restore_param_groups(module, optimizers, saved_groups)
    with _muted_loggers(trainer.loggers):  # the values of the epoch's start were logged already
        repeat_epoch_start_hooks(trainer)
    for optimizer, initial_groups in zip(optimizers, groups, strict=True):
        optimizer.param_groups[:] = [group for group, _ in initial_groups]
        for group, values in initial_groups:
            group.clear()
            group.update(values)
    for scheduler, state in zip(schedulers, states, strict=True):
        scheduler.load_state_dict(state)
    now = list(_tensors(trainer, module))
    unchanged = len(now) == len(before) and all(
        value is old and tensor_version(value) == version for value, (old, version) in zip(now, before, strict=True)
    )
    if not unchanged:
        reload_weights()


@contextmanager
def _muted_loggers(loggers: Sequence[Logger]) -> Iterator[None]:
    with ExitStack() as stack:
        for logger in loggers:
            stack.enter_context(patched(logger, {"log_metrics": lambda *_, **__: None}))
        yield


def _tensors(trainer: Trainer, module: LightningModule) -> Iterator[Tensor]:
    """Yield parameters, buffers and the tensors of the optimizers' states."""
    yield from module.parameters()
    yield from module.buffers()
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            values: Any = state.values() if isinstance(state, dict) else ()
            yield from (value for value in values if isinstance(value, Tensor))
