"""Functions that build the members of an ensemble from a class, a module, several modules or files of weights."""

from __future__ import annotations

import copy
import os
import site
import sys
import sysconfig
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lightning_tricks._shared.rng import isolated_rng
from lightning_tricks._shared.tensors import named_tensors
from lightning_tricks.checkpoint_remapping.core.loading import load_weights
from lightning_tricks.ensembles.core.sampling import INITIAL_WEIGHTS, purpose_seed

Factory = Callable[..., nn.Module]
Estimator = Factory | nn.Module | Sequence[Any] | str

_UNTRUSTED_NAMES: ContextVar[bool] = ContextVar("whether a file names the classes", default=False)
_UNTRUSTED_PATHS: ContextVar[bool] = ContextVar("whether a file names the files of weights", default=False)


def build_members(
    estimator: Estimator, n_estimators: int, arguments: Mapping[str, Any] | None, seed: int
) -> tuple[list[nn.Module], list[str]]:
    """Make the members, each with initial weights of its own.

    Args:
        estimator: A class or factory; the `MODULE:CLASS` of one that is imported already; a module, of which each
            member is a copy with new initial weights where they are not frozen; or a list of modules and of paths of
            weights.
        n_estimators: Number of members; a list makes one member of each entry.
        arguments: Arguments of the class or factory. For paths, `"estimator"` is the class or factory itself.
        seed: Seed of the initial weights; the global random state does not change.

    Returns:
        The members, and messages about anything that the user may not expect.

    Raises:
        TypeError: If something is neither a module nor makes one.
        ValueError: If a class is unknown, arguments are not used, or a module cannot get new initial weights.
    """
    if isinstance(estimator, list | tuple):
        return _members_of_list(estimator, dict(arguments or {}), seed)
    if isinstance(estimator, str):
        estimator = imported_class(estimator)
    if isinstance(estimator, nn.Module):
        if arguments:
            raise ValueError(f"estimator_args={dict(arguments)!r} are not used: estimator is a module already.")
        return _copy_members(estimator, n_estimators, seed)
    return [_make_member(estimator, arguments or {}, seed, index) for index in range(n_estimators)], []


@contextmanager
def untrusted_class_names(*, paths: bool) -> Iterator[None]:
    """Treat names of classes in this block as read from a file, which is not trusted.

    Classes of installed packages may read files or open addresses when they are instantiated. Inside of the block they
    are refused, so that the caller has to give such a class itself.

    Args:
        paths: Whether paths of weights are from the file, too; then they are refused.
    """
    tokens = _UNTRUSTED_NAMES.set(True), _UNTRUSTED_PATHS.set(paths)
    try:
        yield
    finally:
        _UNTRUSTED_NAMES.reset(tokens[0])
        _UNTRUSTED_PATHS.reset(tokens[1])


def imported_class(name: str) -> type[nn.Module]:
    """Return the class `MODULE:CLASS` if its module is imported; nothing is imported here.

    Raises:
        ValueError: If it is not imported, is not a class of modules, or is of an installed package inside of
            `untrusted_class_names`.
    """
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if hasattr(found, "__dict__") else None  # getattr could import
    known = isinstance(found, type) and issubclass(found, nn.Module)
    if known and not (_UNTRUSTED_NAMES.get() and _is_installed(module)):
        return found  # type: ignore[no-any-return]
    reason = "is of an installed package" if known else "does not name an imported class of modules"
    raise ValueError(
        f"estimator={name!r} {reason}: give the class itself (load_from_checkpoint(path, estimator=...)), or import "
        f"{module!r} first if it is a part of your program."
    )


def _is_installed(module: str) -> bool:
    """Whether a module belongs to Python or to an installed package other than `torch.nn`, not to the program."""
    file = getattr(sys.modules[module], "__file__", None)
    if module in ("__main__", "torch.nn") or module.startswith("torch.nn.modules."):
        return False
    if file is None or module.partition(".")[0] == __name__.partition(".")[0]:
        return True
    folders = {os.path.realpath(folder) for folder in (*sysconfig.get_paths().values(), *site.getsitepackages())}
    folders -= {os.path.realpath(sysconfig.get_path("data")), os.path.realpath(sysconfig.get_path("scripts"))}
    return any(Path(os.path.realpath(file)).is_relative_to(folder) for folder in folders)


def class_name(estimator: Estimator | None) -> str | None:
    """Return the `MODULE:CLASS` under which `imported_class` finds the class again, or None."""
    if isinstance(estimator, str):
        return estimator
    if not (isinstance(estimator, type) and issubclass(estimator, nn.Module)):
        return None
    name = f"{estimator.__module__}:{estimator.__qualname__}"
    return None if "<locals>" in name else name


def reset_parameters(module: nn.Module) -> list[str]:
    """Give a module new initial weights by the `reset_parameters` of its layers.

    Returns:
        Names of the parameters of layers without `reset_parameters`, which keep their values.
    """
    kept: list[str] = []

    def visit(part: nn.Module, prefix: str) -> None:
        reset = getattr(part, "reset_parameters", None) or getattr(part, "_reset_parameters", None)
        for name, child in part.named_children():
            visit(child, f"{prefix}{name}.")
        if callable(reset):
            reset()
        else:
            kept.extend(f"{prefix}{name}" for name, _ in part.named_parameters(recurse=False))

    visit(module, "")
    return kept


def _make_member(factory: Any, arguments: Mapping[str, Any], seed: int, index: int) -> nn.Module:
    if not callable(factory):
        raise TypeError(
            "estimator must be a class or factory, a torch.nn.Module, or a list of modules or paths, got "
            f"{factory!r} ({type(factory).__name__})."
        )
    with isolated_rng(purpose_seed(seed, INITIAL_WEIGHTS, index)):
        made = factory(**arguments)
    if not isinstance(made, nn.Module):
        raise TypeError(f"estimator must make a torch.nn.Module, {factory!r} made {made!r}.")
    return made


def _copy_members(module: nn.Module, n: int, seed: int) -> tuple[list[nn.Module], list[str]]:
    members, kept = [], []
    frozen = _frozen_values(module)
    for index in range(n):
        member = copy.deepcopy(module)
        with isolated_rng(purpose_seed(seed, INITIAL_WEIGHTS, index)):
            kept = [name for name in reset_parameters(member) if name not in frozen]
        own = named_tensors(member)
        with torch.no_grad():
            for name, value in frozen.items():
                own[name].copy_(value)
        members.append(member)
    kind = type(module).__name__
    trained = [name for name, value in module.named_parameters() if value.requires_grad]
    if n > 1 and trained and set(trained) <= set(kept):
        raise ValueError(
            f"estimator: no layer of {kind} has reset_parameters, so that all members would begin with the same "
            "weights: give the class, with estimator_args, or a list of modules."
        )
    messages = [f"the members are copies of the given {kind} with new initial weights, not with its own"]
    if frozen:
        messages.append(f"{len(frozen)} frozen parameters and buffers keep the values of the given {kind}")
    if kept:
        messages.append(f"{len(kept)} parameters have no reset_parameters and begin alike in all members: {kept[0]}")
    return members, messages


def _frozen_values(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters that are not trained, and the buffers of layers all of whose parameters are not."""
    values = {name: value.detach() for name, value in module.named_parameters() if not value.requires_grad}
    for path, part in module.named_modules():
        own = [*part.parameters(recurse=False)]
        if own and not any(parameter.requires_grad for parameter in own):
            prefix = f"{path}." if path else ""
            values.update((f"{prefix}{name}", buffer) for name, buffer in part.named_buffers(recurse=False))
    return values


def _members_of_list(given: Sequence[Any], arguments: dict[str, Any], seed: int) -> tuple[list[nn.Module], list[str]]:
    if not given:
        raise ValueError("estimator must not be an empty list.")
    paths = [value for value in given if isinstance(value, str | os.PathLike)]
    factory = arguments.pop("estimator", None)
    if paths and _UNTRUSTED_PATHS.get():
        raise ValueError(
            f"the checkpoint asks for weights of other files ({os.fspath(paths[0])!r}), which are not read: give the "
            "members, load_from_checkpoint(path, estimator=...)."
        )
    if paths and factory is None:
        raise ValueError(
            f"estimator holds paths of weights ({os.fspath(paths[0])!r}): give the class that they are "
            "weights of, estimator_args={'estimator': Net, ...}."
        )
    if arguments and not paths:
        raise ValueError(f"estimator_args={arguments!r} are not used: estimator is a list of modules.")
    members: list[nn.Module] = []
    messages = []
    for index, value in enumerate(given):
        if isinstance(value, nn.Module):
            if any(value is member for member in members):
                raise ValueError(f"estimator[{index}] is the same module as one before it: give a copy.")
            members.append(value)
        elif isinstance(value, str | os.PathLike):
            member = _make_member(factory, arguments, seed, index)
            messages.append(f"member {index}: {load_weights(member, value)}")
            members.append(member)
        else:
            raise TypeError(f"estimator[{index}] must be a torch.nn.Module or a path, got {value!r}.")
    return members, messages
