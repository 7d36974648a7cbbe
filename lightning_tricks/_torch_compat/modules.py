"""What modules register, the hooks that are called, how torch compiles and prunes them, and what layers compute by."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.prune import BasePruningMethod
from torch.optim import Optimizer

from lightning_tricks._torch_compat.guards import needs_private, set_private

REGISTRIES = ("_parameters", "_buffers", "_modules")  # the attributes that hold what a module registers
COMPILED_CALL = "_compiled_call_impl"  # the attribute that `nn.Module.compile` sets
COMPILED_MODULE = "_orig_mod"  # the name of the module inside the one that `torch.compile` returns
_USERS = "AutoResume or RunFingerprint"

Function = TypeVar("Function", bound=Callable[..., Any])


@cache
def module_internals() -> frozenset[str]:
    """Return the attributes in which every module keeps what torch knows of it."""
    # Of a new module, as each torch adds some: none of them is an attribute of the user.
    internals = frozenset(vars(nn.Module()))
    with needs_private(_USERS):
        for name in REGISTRIES:
            getattr(nn.Module(), name)
    return internals


@needs_private(_USERS)
def own_parameters(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """Return the parameters that a module itself registers; what is set in the dict is set in the module."""
    return module._parameters


@needs_private(_USERS)
def own_buffers(module: nn.Module) -> dict[str, Tensor | None]:
    """Return the buffers that a module itself registers; what is set in the dict is set in the module."""
    return module._buffers


@needs_private(_USERS)
def own_modules(module: nn.Module) -> dict[str, nn.Module | None]:
    """Return the modules that a module itself registers; what is set in the dict is set in the module."""
    return module._modules


def registered_tensor(module: Any, name: str) -> Any:
    """Return the parameter or buffer that a module registers, also where its class computes another value for the name.

    Returns:
        The tensor; None if there is no such parameter or buffer. There is no guard: compiled code runs this.
    """
    # Not `getattr`: a parametrization of torch puts a property for the name into the class, which computes the value.
    value = module._parameters.get(name)
    return module._buffers.get(name) if value is None else value


def pruned_parameters(module: nn.Module) -> Iterator[str]:
    """Yield the names of a module's parameters that `torch.nn.utils.prune` masks."""
    with needs_private(_USERS):
        # A mask leaves nothing but this hook, `<name>_orig` and `<name>_mask` in the module (nn/utils/prune.py).
        hooks = list(module._forward_pre_hooks.values())
    for hook in hooks:
        if isinstance(hook, BasePruningMethod):
            with needs_private(_USERS):
                name = str(hook._tensor_name)
            yield name


def compiled_module(module: nn.Module) -> nn.Module | None:
    """Return the module that `torch.compile` has wrapped into a module; None for any other module."""
    return dict(module.named_children()).get(COMPILED_MODULE)


def compiles_in_place(module: nn.Module) -> bool:
    """Whether `nn.Module.compile` was called on a module."""
    with needs_private("RunFingerprint"):
        # `module.compile()` keeps the class and its `forward`, and only this attribute, which `__call__` asks first,
        # tells.
        return getattr(module, COMPILED_CALL) is not None


def refer_to_own_weights(rnn: nn.RNNBase) -> None:
    """Let the weak references of a copied recurrent layer point to its own weights, not to those of the original."""
    with needs_private("FlopsReport or ModelReport"):
        # `forward` compares them with the weights (nn/modules/rnn.py, `_weights_have_changed`; pytorch #91111), and
        # would find others in each copy, for which it flattens its list anew.
        references = [weight if weight is None else weakref.ref(weight) for weight in rnn._flat_weights]
        set_private(rnn, _flat_weight_refs=references)


def is_batch_norm(module: nn.Module) -> bool:
    """Whether a module is a batch normalization, of any number of dimensions."""
    with needs_private("FlopsReport or ModelReport"):
        return isinstance(module, nn.modules.batchnorm._BatchNorm)


def state_dict_versions(state_dict: Any) -> Any:
    """Return the versions of the modules that made a state dict; None for a plain dict."""
    # Of the OrderedDict that `Module.state_dict` returns; a plain dict has none, and modules take it for an old one, to
    # convert: BatchNorm before version 2, for one, had no `num_batches_tracked`.
    return getattr(state_dict, "_metadata", None)


def set_state_dict_versions(state_dict: Any, versions: Any) -> None:
    """Set the versions of the modules that made a state dict, by which modules convert what older ones have saved."""
    state_dict._metadata = versions


_LOADING = ("load_state_dict", "_load_from_state_dict", "set_extra_state", "state_dict", "_save_to_state_dict")
_LOADING_HOOKS = ("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks", "_state_dict_hooks")


def loads_as_torch_does(module: nn.Module) -> bool:
    """Whether neither a module nor its submodules have methods or hooks of others for their state dicts."""
    with needs_private("CheckpointRemapping"):
        return not any(
            any(getattr(part, hooks) for hooks in _LOADING_HOOKS)
            or any(name in vars(part) or _is_of_others(type(part), name) for name in _LOADING)
            for part in module.modules()
        )


def _is_of_others(cls: type[nn.Module], name: str) -> bool:
    """Whether a class or one of its bases has a method of its own; that of the mixin calls torch's."""
    owners = (base.__module__ for base in cls.__mro__ if name in vars(base))
    return any(owner.partition(".")[0] != "torch" and owner != "lightning_tricks.mixin" for owner in owners)


def has_forward_pre_hook(module: nn.Module, hook: Any) -> bool:
    """Whether a function is among the hooks that a module calls before its `forward`."""
    with needs_private("freezing of normalisation"):
        return any(registered is hook for registered in module._forward_pre_hooks.values())


def remove_forward_pre_hook(module: nn.Module, hook: Any) -> bool:
    """Remove a function from the hooks that a module calls before its `forward`, and return whether it was there.

    The handle that torch returns would do it for the module alone, and not for a copy.
    """
    with needs_private("freezing of normalisation"):
        hooks = module._forward_pre_hooks
    keys = [key for key, registered in hooks.items() if registered is hook]
    # A copy of a module has the hooks under the same keys, but a handle has a weak reference to the dict of the
    # original.
    for key in keys:
        del hooks[key]
    return bool(keys)


_OF_MODULES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_OF_OPTIMIZERS = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")


@needs_private("AutoResume")
def hooks_of(owner: nn.Module | Tensor | Optimizer) -> list[Any]:
    """Return the hooks of a module, a tensor or an optimizer, without those of pruning masks."""
    if isinstance(owner, Optimizer):
        registered = [getattr(owner, name, {}) for name in _OF_OPTIMIZERS]  # wrappers may not call its constructor
    else:
        registered = [getattr(owner, name) for name in (_OF_TENSORS if isinstance(owner, Tensor) else _OF_MODULES)]
    # Masks of pruning are restored by themselves, with their hooks.
    # tensors have None until a hook is registered
    return [hook for hooks in registered for hook in (hooks or {}).values() if not isinstance(hook, BasePruningMethod)]


@needs_private("AutoResume")
def communication_hooks(model: Any) -> list[tuple[Any, Any]]:
    """Return the communication hooks that were registered with a DistributedDataParallel, with their states."""
    return list(model._comm_hooks) if isinstance(model, DistributedDataParallel) else []


def convolution_of(module: Any) -> Any:
    """Return the function `(input, weight, bias)` of a convolution; there is no guard: compiled code runs this."""
    return module._conv_forward


@needs_private("LoRA of convolutions")
def convolves_as(cls: Any, conv: Any) -> bool:
    """Whether a subclass of a convolution has that function from it."""
    return bool(cls._conv_forward is conv._conv_forward)


@needs_private("LoRA of recurrent layers")
def not_compiled(function: Function) -> Function:
    """Leave a function out of what torch compiles, as it does with recurrent layers; the compiler is not imported."""
    # `torch.compiler.disable` imports the compiler, which takes longer than importing torch.
    disable: Any = getattr(torch, "_disable_dynamo")  # noqa: B009  # torch does not export it to type checkers
    return cast(Function, disable(function))


@needs_private("LoRA of recurrent layers")
def use_registered_weights(rnn: Any) -> None:
    """Fill the list that a recurrent layer gives to torch's kernels with its parameters.

    The layer itself replaces them in its next forward pass if its class computes other weights.
    """
    # Kernels take this list (nn/modules/rnn.py, `forward`), not the attributes: what LoRA computes would go unseen.
    set_private(rnn, _flat_weights=[registered_tensor(rnn, name) for name in rnn._flat_weights_names])


@needs_private("LoRA of recurrent layers")
def base_state(rnn: Any) -> dict[str, Any]:
    """Return the state of a recurrent layer for pickle and deepcopy, without the weak references to its weights."""
    # As `RNNBase.__getstate__`, without its look at the weights, which would compute them: weak references cannot be
    # pickled.
    return {name: value for name, value in vars(rnn).items() if name != "_flat_weight_refs"}
