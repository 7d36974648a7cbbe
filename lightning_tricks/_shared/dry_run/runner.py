"""Run an action on a copy of a model, without data if possible, and without side effects."""

from __future__ import annotations

import contextlib
import copy
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from lightning_tricks._shared.dry_run.model_call import ModelCall, input_advice
from lightning_tricks._shared.dry_run.model_copy import ModelCopier, common_device, unwrap_model
from lightning_tricks._shared.dry_run.shared_state import restored_state
from lightning_tricks._shared.dry_run.trainer_stub import ReadOnlyTrainer, stub_trainer
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks._shared.tensors import is_sharded, tensors_in
from lightning_tricks._shared.text import describe_error, where_raised
from lightning_tricks._torch_compat.modules import is_batch_norm
from lightning_tricks._torch_compat.operators import FakeTensor, FakeTensorMode, mark_as_parameter

T = TypeVar("T")
Action = Callable[[nn.Module, ModelCall], T]


class NoDataError(NotImplementedError):
    """Copies with data were requested, but some tensors have none, or this rank holds only a part of it."""


class NoGradientError(ValueError):
    """A backward pass was requested, but no output of the model requires a gradient."""


def dry_run(
    model: nn.Module, call: ModelCall, action: Action[T], needs_data: bool = False
) -> tuple[T, tuple[str, ...]]:
    """Run an action on a copy of a model: on tensors without data or, if that fails, on copies with data.

    Args:
        model: Any module. It is not changed, and neither are the random state and the global switches of torch.
        call: How to call the model.
        action: Called as `action(model_copy, call)`, with copies of the model and of the call's arguments.
            Each `BatchNorm` of the copy that has running statistics is in evaluation mode.
        needs_data: Whether to use copies with data from the start.

    Returns:
        What `action` returned, and notes on how it was run.

    Raises:
        TypeError: If the run failed and the inputs are not tensors.
        Exception: The model's own error, with a hint on how the model was called.
    """
    try:
        with _isolated():
            return _run(model, call, action, needs_data)
    except Exception as error:
        advice = input_advice(unwrap_model(model), call, error)
        if advice:
            raise TypeError(advice) from error
        raise


def find_loss(out: Any, call: ModelCall) -> Tensor:
    """Return the loss in the output of a model, or the sum of all outputs that require a gradient.

    Raises:
        NoGradientError: If no output requires one.
    """
    if not isinstance(out, Tensor):
        loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
        if isinstance(loss, Tensor):
            out = loss
    parts = [tensor for tensor in tensors_in(out) if tensor.requires_grad]
    if not parts:
        kind = "Tensor" if isinstance(out, Tensor) else type(out).__name__
        raise NoGradientError(
            f"backward=True: what {call.method} returned ({kind}) contains no tensor that requires a gradient. Check "
            "that some parameters require one, or leave backward out."
        )
    parts = [torch.view_as_real(part) if part.is_complex() else part for part in parts]
    if len(parts) == 1:
        return parts[0] if parts[0].ndim == 0 else parts[0].sum()
    return torch.stack([part.sum().to(parts[0].device, torch.float32) for part in parts]).sum()


def _run(model: nn.Module, call: ModelCall, action: Action[T], needs_data: bool) -> tuple[T, tuple[str, ...]]:
    if needs_data:
        return _run_with_data(model, call, action), ()
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    try:
        return _run_on_copy(model, call, action, partial(_copy_without_data, mode), mode), ()
    except NoGradientError:
        raise
    except Exception as error:  # data-dependent control flow, a library that wants data, or the model's own error
        reason = describe_error(error).partition("\n")[0]
        result = _run_with_data(model, call, action, error, reason)
    return result, (f"done in a real run on a copy, because it cannot run on tensors without data ({reason})",)


def _run_with_data(
    model: nn.Module, call: ModelCall, action: Action[T], without: Exception | None = None, reason: str = ""
) -> T:
    """Run an action on copies with data, perhaps after the run without data has raised an error."""
    try:
        return _run_on_copy(model, call, action, _copy_with_data)
    except Exception as error:
        if without is not None and isinstance(error, NoDataError):
            _add_hint(without, call, f"; a run with data is impossible: {error}")
            raise without from None
        is_same = reason.partition(": ")[2] in str(error)
        _add_hint(error, call, "" if is_same else f"; before, on tensors without data: {reason}")
        raise


def _run_on_copy(
    model: nn.Module,
    call: ModelCall,
    action: Action[T],
    copy_tensor: Callable[..., Tensor],
    mode: AbstractContextManager[Any] | None = None,
) -> T:
    original = unwrap_model(model)
    copier = ModelCopier(copy_tensor)
    trainer = getattr(original, "_trainer", None)
    if trainer is not None:
        copier.substitute(trainer, ReadOnlyTrainer(trainer))
    model_copy = copier.copy_module(original)
    if callable(prepare := getattr(model_copy, "on_dry_run", None)):  # of an ensemble, which looks at first batches
        prepare()
    for part in model_copy.modules():
        if is_batch_norm(part) and part.training and part.running_mean is not None:
            part.training = False  # so that one image is enough, and SyncBatchNorm needs no other ranks
    device = common_device(original)
    if any(tensor.device == device for tensor in tensors_in((call.args, call.kwargs))):
        device = None  # some inputs are on the model's device, so the others are elsewhere on purpose
    call_of_copies = call.map_arguments(ModelCopier(partial(copy_tensor, device=device)).copy_value)
    if call.method == "training_step":
        stub_trainer(model_copy, trainer, dict(zip(original.parameters(), model_copy.parameters(), strict=True)))
    state = restored_state(original, getattr(trainer, "datamodule", None))
    with state, mode or nullcontext(), _silenced("torch._subclasses.fake_tensor"):
        return action(model_copy, call_of_copies)


def _copy_with_data(tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a clone of a tensor.

    Args:
        tensor: The original.
        device: The device of the copy; None for that of the original.

    Raises:
        NoDataError: If the tensor has no data, or this rank holds only a part of it.
    """
    if is_lazy(tensor):
        return copy.deepcopy(tensor)
    if tensor.is_meta or is_sharded(tensor) or isinstance(tensor, FakeTensor):
        kind = "sharded" if is_sharded(tensor) else "on the meta device" if tensor.is_meta else "fake"
        raise NoDataError(f"there is no data to copy: some tensors are {kind}")
    copied = tensor.detach().clone()
    if device is not None:
        copied = copied.to(device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(copied, tensor.requires_grad)
    return copied.requires_grad_(tensor.requires_grad)


def _copy_without_data(mode: FakeTensorMode, tensor: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a `FakeTensor`, which has the shape, strides, dtype and device of a tensor, but no elements.

    A meta tensor becomes a fake CPU tensor, and a sharded tensor gets its full shape.

    Args:
        mode: The mode in which it is used.
        tensor: The original.
        device: The device that the fake tensor claims to be on; None for that of the original.
    """
    fake_device = device or tensor.device
    if fake_device.type == "meta":
        fake_device = torch.device("cpu")
    if is_sharded(tensor):
        elem = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    elif tensor.layout != torch.strided:
        raise NotImplementedError(f"a tensor without data has no elements to skip, as {tensor.layout} does")
    elif type(tensor) in (Tensor, nn.Parameter, FakeTensor) and not tensor.is_quantized:
        elem = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    else:
        return mode.from_tensor(tensor)
    fake = FakeTensor(mode, elem, fake_device)
    if isinstance(tensor, nn.Parameter):
        mark_as_parameter(fake)
    return fake.requires_grad_(tensor.requires_grad)


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """Run models eagerly and without the fused layers of evaluation mode, and restore the random state afterwards."""
    grad, fast_path = torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(isolated_rng())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(grad))
        if "torch._dynamo" in sys.modules:  # otherwise nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        with torch.enable_grad():  # if the first backward pass of a process has no data, its forks cannot run any
            torch.zeros((), requires_grad=True).backward()
        yield


@contextlib.contextmanager
def _silenced(logger: str) -> Iterator[None]:
    """Keep a logger from reporting errors that are caught here."""
    silenced = logging.getLogger(logger)
    before, silenced.disabled = silenced.disabled, True
    try:
        yield
    finally:
        silenced.disabled = before


def _add_hint(error: Exception, call: ModelCall, more: str = "") -> None:
    """Append to an error's message how the inputs were used."""
    if not error.args:
        error.args = (where_raised(error),)
    if isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n(called on a copy of the model: {call}{more})", *error.args[1:])
