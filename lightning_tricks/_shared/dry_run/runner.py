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

from lightning_tricks._shared.dry_run.calls import Call
from lightning_tricks._shared.dry_run.input_advice import remedy_for
from lightning_tricks._shared.dry_run.model_copy import Copier, FakeCopies, NoDataError, RealCopies, bare, device_of
from lightning_tricks._shared.dry_run.trainer_stub import TrainerView, put_on_stage
from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks._shared.tensors import tensors_in

T = TypeVar("T")
Copies = RealCopies | FakeCopies
Play = Callable[[nn.Module, Call, Copies], T]


class NothingToDifferentiateError(ValueError):
    """A backward pass was wanted, and nothing that the model returned requires a gradient."""


def rehearse(model: nn.Module, call: Call, play: Play[T], real: bool = False) -> tuple[T, tuple[str, ...]]:
    """Do something with a copy of a model: on tensors without data, or else, where that fails, on real copies.

    Args:
        model: Any module. It stays as it is, and so do random numbers and torch's switches.
        call: How it is to be called.
        play: `play(twin, call, copies)` does it, with copies of the model and of the call's arguments. `BatchNorm`s of
            the twin that have running statistics are in evaluation mode.
        real: Whether to do it on real copies at once.

    Returns:
        What `play` returned, and notes on how it went.

    Raises:
        TypeError: If it failed, and was not called with tensors.
        Exception: The model's own error, with a remark how it was called.
    """
    try:
        return _rehearsed(model, call, play, real)
    except Exception as error:
        remedy = remedy_for(bare(model), call, error)
        if remedy:
            raise TypeError(remedy) from error
        raise


def _rehearsed(model: nn.Module, call: Call, play: Play[T], real: bool) -> tuple[T, tuple[str, ...]]:
    with _undisturbed():
        if real:
            try:
                return _played(model, call, play, RealCopies()), ()
            except Exception as own:
                _add_hint(own, call)
                raise
        try:
            return _played(model, call, play, FakeCopies()), ()
        except NothingToDifferentiateError:
            raise
        except Exception as error:  # data-dependent control flow, a library that wants data, or the model's own error
            reason = f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
            try:
                result = _played(model, call, play, RealCopies())
            except NoDataError as impossible:
                _add_hint(error, call, f"; for a real run {impossible}")
                raise error from None
            except Exception as own:
                told = reason.partition(": ")[2] in str(own)
                _add_hint(own, call, "" if told else f"; before, on tensors without data: {reason}")
                raise
            return result, (f"done in a real run on a copy, as it cannot run on tensors without data ({reason})",)


def loss_in(out: Any, call: Call) -> Tensor:
    """Return the loss in what a model returned, or the sum of all that has a gradient.

    Raises:
        NothingToDifferentiateError: If nothing has.
    """
    if not isinstance(out, Tensor):
        loss = out.get("loss") if isinstance(out, Mapping) else getattr(out, "loss", None)
        if isinstance(loss, Tensor):
            out = loss
    parts = [tensor for tensor in tensors_in(out) if tensor.requires_grad]
    if not parts:
        kind = "Tensor" if isinstance(out, Tensor) else type(out).__name__
        raise NothingToDifferentiateError(
            f"backward=True: what {call.method} returned ({kind}) holds no tensor that requires a gradient. Check that "
            "some parameters require one, or leave backward out."
        )
    if len(parts) == 1:
        return parts[0] if parts[0].ndim == 0 else parts[0].sum()
    return torch.stack([part.sum().to(parts[0].device, torch.float32) for part in parts]).sum()


def _played(model: nn.Module, call: Call, play: Play[T], copies: Copies) -> T:
    original = bare(model)
    copier = Copier(copies.convert)
    trainer = getattr(original, "_trainer", None)
    if trainer is not None:
        copier.replace(trainer, TrainerView(trainer))
    twin = copier.module(original)
    for part in twin.modules():
        if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training and part.running_mean is not None:
            part.training = False  # a single image will do, and SyncBatchNorm needs no other ranks
    device = device_of(original)
    if any(tensor.device == device for tensor in tensors_in((call.args, call.kwargs))):
        device = None  # then those that lie elsewhere are there on purpose
    values = call.mapped(Copier(partial(copies.convert, device=device)).value)
    if call.method == "training_step":
        put_on_stage(twin, trainer)
    with copies.entered(), _quiet("torch._subclasses.fake_tensor"):
        return play(twin, values, copies)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
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
        _start_autograd()
        yield


def _start_autograd() -> None:
    """Let the first backward pass of a process be a real one: after one without data, no forked child could run any."""
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()


@contextlib.contextmanager
def _quiet(logger: str) -> Iterator[None]:
    """Keep a logger from reporting errors that are caught."""
    filtered = logging.getLogger(logger)
    filtered.addFilter(_nothing)
    try:
        yield
    finally:
        filtered.removeFilter(_nothing)


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _add_hint(error: Exception, call: Call, more: str = "") -> None:
    """Say in the error how the inputs were used."""
    if error.args and isinstance(error.args[0], str):
        error.args = (f"{error.args[0]}\n(called on a copy of the model: {call}{more})", *error.args[1:])
