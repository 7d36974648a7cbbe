"""Running a model without its taking notice: on a stand-in, without data if it goes, and undisturbed."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from lightning_tricks._shared.dry_run.input_advice import input_advice
from lightning_tricks._shared.dry_run.model_call import ModelCall
from lightning_tricks._shared.dry_run.model_copy import (
    FakeTensorCopies,
    ModelCopier,
    NoDataError,
    RealTensorCopies,
    common_device,
    unwrap_model,
)
from lightning_tricks._shared.dry_run.trainer_stub import ReadOnlyTrainer, stub_trainer
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks._shared.tensors import tensors_in

T = TypeVar("T")
Copies = RealTensorCopies | FakeTensorCopies
Action = Callable[[nn.Module, ModelCall, Copies], T]


class NoGradientError(ValueError):
    """A backward pass was wanted, and nothing that the model returned requires a gradient."""


def dry_run(model: nn.Module, call: ModelCall, action: Action[T], real: bool = False) -> tuple[T, tuple[str, ...]]:
    """Do something with a copy of a model: on tensors without data, or else, where that fails, on real copies.

    Args:
        model: Any module. It stays as it is, and so do random numbers and torch's switches.
        call: How it is to be called.
        action: `action(model_copy, call, copies)` does it, with copies of the model and of the call's arguments.
            `BatchNorm`s of the copy that have running statistics are in evaluation mode.
        real: Whether to do it on real copies at once.

    Returns:
        What `action` returned, and notes on how it went.

    Raises:
        TypeError: If it failed, and was not called with tensors.
        Exception: The model's own error, with a remark how it was called.
    """
    try:
        return _run_with_fallback(model, call, action, real)
    except Exception as error:
        advice = input_advice(unwrap_model(model), call, error)
        if advice:
            raise TypeError(advice) from error
        raise


def _run_with_fallback(model: nn.Module, call: ModelCall, action: Action[T], real: bool) -> tuple[T, tuple[str, ...]]:
    with _isolated():
        if real:
            try:
                return _run_on_copy(model, call, action, RealTensorCopies()), ()
            except Exception as own:
                _add_hint(own, call)
                raise
        try:
            return _run_on_copy(model, call, action, FakeTensorCopies()), ()
        except NoGradientError:
            raise
        except Exception as error:  # data-dependent control flow, a library that wants data, or the model's own error
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            try:
                result = _run_on_copy(model, call, action, RealTensorCopies())
            except NoDataError as impossible:
                _add_hint(error, call, f"; for a real run {impossible}")
                raise error from None
            except Exception as own:
                told = reason.partition(": ")[2] in str(own)
                _add_hint(own, call, "" if told else f"; before, on tensors without data: {reason}")
                raise
            return result, (f"done in a real run on a copy, as it cannot run on tensors without data ({reason})",)


def find_loss(out: Any, call: ModelCall) -> Tensor:
    """Return the loss in what a model returned, or the sum of all that has a gradient.

    Raises:
        NoGradientError: If nothing has.
    """
    if not isinstance(out, Tensor):
        loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
        if isinstance(loss, Tensor):
            out = loss
    parts = [tensor for tensor in tensors_in(out) if tensor.requires_grad]
    if not parts:
        kind = "Tensor" if isinstance(out, Tensor) else type(out).__name__
        raise NoGradientError(
            f"backward=True: what {call.method} returned ({kind}) holds no tensor that requires a gradient. Check that "
            "some parameters require one, or leave backward out."
        )
    if len(parts) == 1:
        return parts[0] if parts[0].ndim == 0 else parts[0].sum()
    return torch.stack([part.sum().to(parts[0].device, torch.float32) for part in parts]).sum()


def _run_on_copy(model: nn.Module, call: ModelCall, action: Action[T], copies: Copies) -> T:
    original = unwrap_model(model)
    copier = ModelCopier(copies.convert)
    trainer = getattr(original, "_trainer", None)
    if trainer is not None:
        copier.replace(trainer, ReadOnlyTrainer(trainer))
    model_copy = copier.module(original)
    for part in model_copy.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training and part.running_mean is not None:
            part.training = False  # a single image will do, and SyncBatchNorm needs no other ranks
    device = common_device(original)
    if any(tensor.device == device for tensor in tensors_in((call.args, call.kwargs))):
        device = None  # then those that lie elsewhere are there on purpose
    values = call.mapped(ModelCopier(partial(copies.convert, device=device)).value)
    if call.method == "training_step":
        stub_trainer(model_copy, trainer)
    with copies.entered(), _silenced("torch._subclasses.fake_tensor"):
        return action(model_copy, values, copies)


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """Run models as they are written: eagerly, without the fused layers of evaluation; and keep the random state."""
    grad, fast_path = torch.is_grad_enabled(), torch.backends.mha.get_fastpath_enabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(isolated_rng())
        if torch.is_inference_mode_enabled():
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(grad))
        if "torch._dynamo" in sys.modules:  # else nothing is compiled
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.callback(torch.backends.mha.set_fastpath_enabled, fast_path)
        torch.backends.mha.set_fastpath_enabled(False)
        _warm_up_autograd()
        yield


def _warm_up_autograd() -> None:
    """Let the first backward pass of a process be a real one: after one without data, no forked child could run any."""
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()


@contextlib.contextmanager
def _silenced(logger: str) -> Iterator[None]:
    """Keep a logger from reporting errors that are caught."""
    filtered = logging.getLogger(logger)
    filtered.addFilter(_reject_record)
    try:
        yield
    finally:
        filtered.removeFilter(_reject_record)


def _reject_record(record: logging.LogRecord) -> bool:
    return False


def _add_hint(error: Exception, call: ModelCall, more: str = "") -> None:
    """Say in the error how the inputs were used."""
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n(called on a copy of the model: {call}{more})", *error.args[1:])
