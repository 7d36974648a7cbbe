"""Normalisation with running statistics that stays in evaluation mode while its parameters are frozen."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from lightning_tricks._torch_compat.modules import has_forward_pre_hook, remove_forward_pre_hook


def _requires_grad(parameter: Tensor) -> bool:
    return parameter.requires_grad


def frozen_norms(model: nn.Module, trains: Callable[[nn.Parameter], bool] = _requires_grad) -> list[str]:
    """Return the names of the normalisation with running statistics whose parameters are frozen.

    These are the modules with a buffer `running_mean` or `running_var`: BatchNorm and SyncBatchNorm of torch and timm,
    InstanceNorm with `track_running_stats`, and others of their kind. One is frozen if its own parameters are; without
    any, if all parameters of the nearest module around it that has some are.

    Args:
        model: The model.
        trains: Whether a parameter trains.
    """
    return [name for name, module, around in _norms(model) if _is_frozen(module, around, trains)]


def hold_norms_(model: nn.Module, names: Iterable[str]) -> list[str]:
    """Keep normalisation in evaluation mode, so that `train()` does not wake it, until `release_norms_`.

    Args:
        model: The model. A hook on each such module is all that is changed beside the modes, and copies have it too.
        names: Their qualified names.

    Returns:
        The names of those that were not held before.
    """
    chosen = set(names)
    new = [(n, m) for n, m, _ in _norms(model) if n in chosen and not has_forward_pre_hook(m, _stay_in_eval_mode)]
    for _, module in new:
        module.register_forward_pre_hook(_stay_in_eval_mode)
        module.eval()
    return [name for name, _ in new]


def release_norms_(model: nn.Module, names: Iterable[str]) -> None:
    """Release normalisation, which takes on the mode of the module around it.

    Args:
        model: The model.
        names: Their qualified names.
    """
    chosen = set(names)
    for name, module, around in _norms(model):
        if name in chosen:
            remove_forward_pre_hook(module, _stay_in_eval_mode)
            module.train(around[-1].training if around else True)


def held_norms(model: nn.Module) -> list[str]:
    """Return the names of the normalisation that is held."""
    return [name for name, module, _ in _norms(model) if has_forward_pre_hook(module, _stay_in_eval_mode)]


def norm_modes(model: nn.Module) -> dict[str, bool]:
    """Return the names of the normalisation whose mode is not that of the module around it, with its mode."""
    return {n: m.training for n, m, around in _norms(model) if around and m.training != around[-1].training}


def set_norm_modes_(model: nn.Module, modes: dict[str, bool]) -> None:
    """Set the modes of normalisation, given by name."""
    for name, module, _ in _norms(model):
        if name in modes:
            module.train(modes[name])


def _stay_in_eval_mode(module: nn.Module, inputs: Any) -> None:
    if module.training:  # set only if needed: compiled code depends on it
        module.eval()


def _norms(model: nn.Module) -> Iterator[tuple[str, nn.Module, list[nn.Module]]]:
    """Yield the modules with running statistics: name, module and those around it, the nearest last."""
    by_name = dict(model.named_modules())
    for name, module in by_name.items():
        if any(key in ("running_mean", "running_var") for key, _ in module.named_buffers(recurse=False)):
            parts = name.split(".") if name else []
            around = [by_name.get(".".join(parts[:depth])) for depth in range(len(parts))]
            yield name, module, [one for one in around if one is not None]


def _is_frozen(module: nn.Module, around: list[nn.Module], trains: Callable[[nn.Parameter], bool]) -> bool:
    own = list(module.parameters(recurse=False))
    if not own:
        own = next((found for one in reversed(around) if (found := list(one.parameters()))), [])
    return bool(own) and not any(map(trains, own))
