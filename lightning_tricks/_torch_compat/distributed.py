"""What torch knows of other processes: the store by which ranks have found each other, and the one before a fork."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn

from lightning_tricks._torch_compat.guards import needs_private, set_private
from lightning_tricks._torch_compat.modules import communication_hooks

_ORDER = "_lightning_tricks_bucket_order"  # our attribute of a wrapper whose last order of buckets is known


@needs_private("RunFingerprint")
def store_of_ranks(prefix: str) -> Any:
    """Return the store of the default process group, for keys with a prefix; using it is no collective."""
    from torch.distributed import distributed_c10d

    untyped: Any = distributed_c10d
    # A collective would need all ranks at the same point: those that have diverged, which are looked for, may not come.
    return untyped.PrefixStore(prefix, untyped._get_default_store())


def allow_forked_ranks() -> None:
    """Let a fork start ranks by forks on a machine without a GPU, although the process before it has looked for one."""
    # `is_available` makes torch take each later fork for a bad one, in which Lightning (fabric,
    # strategies/launchers/multiprocessing.py) starts no ranks, not even for the CPU.
    if not torch.cuda.is_available():
        with needs_private("assert_resumable"):
            set_private(torch.cuda, _is_in_bad_fork=lambda: False)


def _reduced_parameters(ddp: Any) -> dict[str, tuple[nn.Parameter, bool]]:
    """Return the parameters that DDP averages, in its own order, and whether their gradients are sparse."""
    names = {parameter: name for name, parameter in ddp.module.named_parameters()}
    pairs = zip(*ddp._build_params_for_reducer(), strict=True)
    return {names[parameter]: (parameter, is_sparse) for parameter, is_sparse in pairs}


@needs_private("AutoResume")
def bucket_order(ddp: Any) -> list[str] | None:
    """Return the parameters in the order of a DDP's buckets in the next step; all ranks have to call it between steps.

    Returns:
        Their names; empty if these are the buckets of a new process; None if that is not known, as with a static graph
        after one step, or where a communication hook keeps a state by buckets.
    """
    from torch.distributed import ProcessGroup

    known: list[str] = vars(ddp).get(_ORDER, [])
    if known:  # buckets are made anew once: later saves need no collective
        return known
    if any(not isinstance(state, ProcessGroup | None) for _, state in communication_hooks(ddp)):
        return None
    with suppress(RuntimeError):  # a parameter had no gradient, which the next forward pass says
        # what that begins with (nn/parallel/distributed.py, `_pre_forward`): rank zero's order is sent to all
        set_private(ddp, _has_rebuilt_buckets=ddp._has_rebuilt_buckets | ddp.reducer._rebuild_buckets())
    ddp.logger.set_runtime_stats_and_log()  # else it notes them in one of the first ten steps, maybe after a save
    notes = ddp._get_ddp_logging_data()
    buckets = notes.get("rebuilt_per_bucket_param_indices")
    if not buckets:
        return None if notes.get("iteration") else []
    names = [*_reduced_parameters(ddp)]
    vars(ddp)[_ORDER] = known = [names[int(index)] for bucket in buckets.split(", ") for index in bucket.split()]
    return known


@needs_private("AutoResume")
def set_bucket_order(ddp: Any, order: Sequence[str]) -> bool:
    """Let a DDP's next step have the buckets of an order, before the first forward pass; all ranks have to call it.

    Returns:
        Whether that is possible: not with other parameters, nor where `DistributedDataParallel.__init__` alone sets up
        a reducer as this one is.
    """
    from torch import distributed

    untyped: Any = distributed
    present = _reduced_parameters(ddp)
    is_of_c = ddp._get_ddp_logging_data().get("comm_hook", "").startswith("BuiltinCommHookType")  # and not listed
    is_special = ddp._use_python_reducer or ddp.mixed_precision or ddp._delay_all_reduce_all_params or is_of_c
    in_backward = any(hasattr(parameter, "_in_backward_optimizers") for parameter in ddp.module.parameters())
    if {*order} != {*present} or is_special or in_backward:
        return False
    # A new reducer over the parameters in that order, as `DistributedDataParallel.__setstate__` makes one. Its buckets
    # are made once more of all parameters in its order, as after a first backward pass: no gradient is touched.
    parameters, is_sparse = zip(*(present[name] for name in order), strict=True)
    ddp.reducer._remove_autograd_hooks()
    names = ddp._build_debug_param_to_name_mapping([*parameters])
    del ddp.reducer, ddp.logger  # with its buckets, which are as large as the gradients
    ddp._ddp_init_helper([*parameters], [*is_sparse], names, ddp.static_graph)
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        ddp.logger._set_static_graph()
    for hook, state in communication_hooks(ddp):
        untyped._register_comm_hook(ddp.reducer, state, hook)
        ddp.logger._set_comm_hook_name(hook.__qualname__)
    ddp.reducer._push_all_rebuilt_params()
    set_private(ddp, _has_rebuilt_buckets=ddp.reducer._rebuild_buckets())
    vars(ddp)[_ORDER] = [*order]
    return True
