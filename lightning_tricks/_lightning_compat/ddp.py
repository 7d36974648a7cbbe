"""The wrapper that torch's DDP puts around a module."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_tricks._lightning_compat.guards import needs_private, overriding
from lightning_tricks._lightning_compat.trainer import model_averager
from lightning_tricks._torch_compat.modules import communication_hooks

if TYPE_CHECKING:
    from torch.nn.parallel import DistributedDataParallel

    from lightning_tricks._lightning_compat.flavor import Trainer


_OfState = Callable[[dict[str, Any]], dict[str, Any]]
_USERS = "a callback or an ensemble that changes which parameters train"


def ddp_wrapper(trainer: Trainer) -> DistributedDataParallel | None:
    """Return the wrapper around the module of the Trainer, or None where DDP does not wrap it."""
    from torch.nn.parallel import DistributedDataParallel

    model = trainer.strategy.model
    return model if isinstance(model, DistributedDataParallel) else None


def equal_on_ranks(trainer: Trainer) -> Callable[[str], bool] | None:
    """Return what tells by its name whether a parameter is equal on all ranks after each step.

    None where ranks need not be equal in anything: they share no gradients, or several of them train on the same batch.
    """
    from lightning_tricks._lightning_compat.flavor import DDPStrategy

    # With tensor parallelism `num_replicas` counts groups of ranks, each of which trains on one batch.
    wrapper, sampled = ddp_wrapper(trainer), getattr(trainer.strategy, "distributed_sampler_kwargs", None) or {}
    share_gradients = wrapper is not None or not isinstance(trainer.strategy, DDPStrategy)
    if not (share_gradients and sampled.get("num_replicas") == trainer.world_size > 1):
        return None
    if wrapper is None or model_averager(trainer) is not None:
        return lambda name: False
    # Those of `_ddp_params_and_buffers_to_ignore`, which torch's DDP neither broadcasts nor averages.
    return lambda name: name not in wrapper.parameters_to_ignore


def rebuilding_ddp(trainer: Trainer) -> DistributedDataParallel | None:
    """Return the wrapper if DDP adds the first gradients of a process in another order than those of later steps."""
    model = ddp_wrapper(trainer)
    # torch 2.15 (c10d/reducer.hpp, `should_rebuild_buckets`): once, after the first backward pass, buckets are filled
    # anew in the order in which gradients became ready, unless unused parameters are looked for.
    if model is None or (model.find_unused_parameters and not model.static_graph):
        return None
    # the sum of two does not depend on their order, but a hook may compress a bucket by what is in it
    return model if trainer.world_size > 2 or communication_hooks(model) else None


def stops_at_unused_parameters(trainer: Trainer) -> bool:
    """Whether DDP averages the gradients of this backward pass, and fails if a parameter has none."""
    model = ddp_wrapper(trainer)
    if model is None:
        return False
    with needs_private(_USERS):
        # torch: "Expected to have finished reduction in the prior iteration", in the next forward pass.
        return bool(model.require_backward_grad_sync and not model.find_unused_parameters and not model.static_graph)


@needs_private(_USERS)
def rewrap_ddp(trainer: Trainer) -> None:
    """Wrap the module of the Trainer anew, after other parameters than before have gradients; all ranks call it.

    DDP waits for the gradients of the parameters that had them when it was made. Nothing happens without DDP.
    """
    from lightning_tricks._lightning_compat.flavor import DDPStrategy

    strategy = trainer.strategy
    if isinstance(strategy, DDPStrategy) and ddp_wrapper(trainer) is not None:
        # The reducer lists parameters in its constructor: one that is unfrozen later is averaged by nobody, and ranks
        # drift apart in silence (Lightning #20340). `configure_ddp` takes an unwrapped module alone.
        strategy.model = trainer.lightning_module
        strategy.configure_ddp()


@contextmanager
def gradients_kept_apart(
    trainer: Trainer, before_reading: Callable[[], None], whole_state: _OfState, own_state: _OfState
) -> Iterator[None]:
    """Let DDP neither wrap the module nor average gradients, until the context is left; entered in `setup`.

    Args:
        trainer: The Trainer, with a DDPStrategy.
        before_reading: Called on all ranks before a checkpoint reads the weights of the module.
        whole_state: Makes the state dict of an optimizer on this rank that of all ranks; called on all ranks.
        own_state: The reverse, for a checkpoint that is loaded.
    """
    # For an ensemble whose members the ranks share out: averages would mix members that are not each other's, and rank
    # zero, which writes a checkpoint, has some of them only.
    strategy: Any = trainer.strategy
    module_state, state = strategy.lightning_module_state_dict, strategy.optimizer_state
    load = strategy.load_optimizer_state_dict

    def lightning_module_state_dict() -> dict[str, Any]:
        before_reading()
        return module_state()  # type: ignore[no-any-return]

    def load_optimizer_state_dict(checkpoint: Mapping[str, Any]) -> None:
        load({**checkpoint, "optimizer_states": [own_state(one) for one in checkpoint["optimizer_states"]]})

    with overriding(
        strategy,
        # `DDPStrategy.setup` calls it in each fit; without the wrapper, no gradient is sent.
        configure_ddp=lambda: None,
        lightning_module_state_dict=lightning_module_state_dict,
        optimizer_state=lambda optimizer: whole_state(state(optimizer)),
        load_optimizer_state_dict=load_optimizer_state_dict,
    ):
        yield


class _Zeros(torch.autograd.Function):
    """Zero, whose gradients are zeros without memory of their own."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.like = [(parameter.shape, parameter.dtype, parameter.device) for parameter in parameters]
        return torch.zeros((), device=parameters[0].device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        # One number for a whole parameter: hooks of the reducer need a gradient to come, not its memory.
        return tuple(torch.zeros((), dtype=dtype, device=device).expand(shape) for shape, dtype, device in ctx.like)


def backward_of_zeros(trainer: Trainer) -> Tensor:
    """Return a zero whose backward pass adds nothing to the gradients, which DDP then averages where that is due."""
    module = trainer.lightning_module

    def zero() -> Tensor:
        # A backward pass through the others would make gradients of zeros, by which an optimizer would decay weights.
        parameters = [parameter for parameter in module.parameters() if parameter.grad is not None]
        result: Tensor = _Zeros.apply(*parameters)
        return result

    return _in_forward_of_ddp(trainer, zero)


def synchronize_buffers(trainer: Trainer) -> None:
    """Let all ranks have the buffers of rank zero, where DDP would see to it in the next forward pass."""
    wrapper = ddp_wrapper(trainer)
    if wrapper is not None and wrapper.require_forward_param_sync:
        # Else torch (`_post_forward`) prepares for a backward pass that does not come, and the next forward pass fails.
        with wrapper.no_sync():
            _in_forward_of_ddp(trainer, lambda: torch.zeros(()))


def _in_forward_of_ddp(trainer: Trainer, function: Callable[[], Tensor]) -> Tensor:
    module, wrapper = trainer.lightning_module, ddp_wrapper(trainer)
    if wrapper is None:
        return function()
    # `_ForwardRedirection` (strategies/strategy.py) leaves `forward` in the module itself after a step, and
    # `overriding` takes it away.
    left_by_lightning = {name: value for name, value in vars(module).items() if name == "forward"}
    with overriding(module, forward=function):
        result: Tensor = wrapper()
    vars(module).update(left_by_lightning)
    return result


@needs_private("an ensemble with stacked BatchNorm layers")
def syncs_batchnorm(trainer: Trainer) -> bool:
    """Whether the strategy puts layers with statistics of all ranks in place of BatchNorm (`sync_batchnorm=True`)."""
    from lightning_tricks._lightning_compat.flavor import ParallelStrategy

    strategy = trainer.strategy
    return isinstance(strategy, ParallelStrategy) and strategy._layer_sync is not None
