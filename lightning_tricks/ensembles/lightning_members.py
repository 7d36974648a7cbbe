"""Members that are LightningModules and bring a `training_step`, a `log` and optimizers of their own."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_tricks._lightning_compat.flavor import (
    LightningModule,
    MisconfigurationException,
    is_overridden,
    other_flavor,
)
from lightning_tricks._lightning_compat.guards import overriding
from lightning_tricks._shared.modules import step_arguments
from lightning_tricks.ensembles.core.combination import mean_with_gradient_of_sum
from lightning_tricks.ensembles.core.members import Members
from lightning_tricks.ensembles.optimizers import merge_optimizers


def has_training_step(member: nn.Module) -> bool:
    """Whether a member is a LightningModule with a `training_step`."""
    return isinstance(member, LightningModule) and is_overridden("training_step", member)


def check_flavor(ensemble: object, members: Sequence[nn.Module]) -> None:
    """Refuse LightningModules of the other Lightning, whose steps would be left out.

    Raises:
        TypeError: If there is one, with the remedy.
    """
    remedy = next(filter(None, map(other_flavor, map(type, members))), "")
    if remedy:
        raise TypeError(f"{type(ensemble).__name__} would not call the training_step of its members: {remedy}")


def refuse_manual_optimization(ensemble: object, members: Members) -> None:
    """Refuse members that step optimizers themselves: the ensemble has one for all of them.

    Raises:
        MisconfigurationException: If there is one, with the remedy.
    """
    for member in _modules(members):
        if not member.automatic_optimization:
            raise MisconfigurationException(
                f"{type(ensemble).__name__} steps the optimizer of its members, and {type(member).__name__} has "
                "automatic_optimization=False: train the models one by one, and give them as a list to combine them."
            )


@contextmanager
def attached_members(members: Members, ensemble: Any, stage: str) -> Iterator[None]:
    """Give members the Trainer of the ensemble and, until the context is left, a `log` with keys `member_<i>/...`."""
    with ExitStack() as stack:
        for index, member in enumerate(members.children()):
            if isinstance(member, LightningModule):
                member.trainer = ensemble.trainer
                stack.enter_context(overriding(member, log=partial(ensemble.log_of_member, index)))
                member.setup(stage)
        yield


def run_training_steps(members: Members, batches: Sequence[Any], batch_idx: int) -> dict[str, Tensor]:
    """Run the `training_step` of each member.

    Args:
        members: The LightningModules.
        batches: One batch for each member.
        batch_idx: Index of the batch in the epoch.

    Returns:
        `loss`, whose gradient is the sum of the members' gradients, and the members' `preds` and `target` one after
        another, where all of them return these.

    Raises:
        ValueError: If a member returns None.
    """
    modules = _modules(members)
    one_of_each = {type(module): module for module in modules}
    rest = {kind: step_arguments(m.training_step, batches[0], batch_idx)[1:] for kind, m in one_of_each.items()}
    results = [module.training_step(batch, *rest[type(module)]) for module, batch in zip(modules, batches, strict=True)]
    if any(result is None for result in results):
        raise ValueError("training_step of a member returned None: a member cannot skip a step.")
    parts: list[Mapping[str, Any]] = [r if isinstance(r, Mapping) else {"loss": r} for r in results]
    loss = mean_with_gradient_of_sum(torch.stack([part["loss"] for part in parts]))
    returned = [name for name in ("preds", "target") if all(isinstance(p.get(name), Tensor) for p in parts)]
    return {"loss": loss, **{name: torch.cat([part[name].detach() for part in parts]) for name in returned}}


def _modules(members: Members) -> list[LightningModule]:
    return cast(list[LightningModule], list(members.children()))


def have_optimizers(members: Members) -> bool:
    """Whether the members have a `configure_optimizers`."""
    return is_overridden("configure_optimizers", _modules(members)[0])


def merge_member_optimizers(members: Members) -> Optimizer:
    """Merge the optimizers of the members' `configure_optimizers` into one.

    Raises:
        MisconfigurationException: If they have none, more than one each, of different types, or schedulers, or LBFGS.
    """
    modules = _modules(members)
    made = [one.configure_optimizers() if is_overridden("configure_optimizers", one) else None for one in modules]
    if not all(type(optimizer) is type(made[0]) and isinstance(optimizer, Optimizer) for optimizer in made):
        raise MisconfigurationException(
            f"{type(modules[0]).__name__}.configure_optimizers must return one optimizer of the same type for each "
            f"member, got {type(made[0]).__name__}: give the ensemble optimizer= and lr_scheduler=."
        )
    if len(made) > 1 and isinstance(made[0], LBFGS):
        raise MisconfigurationException(
            f"{type(modules[0]).__name__}.configure_optimizers returns LBFGS, which cannot step several members by one "
            "loss: give the ensemble another optimizer=."
        )
    return merge_optimizers(cast(Sequence[Optimizer], made))
