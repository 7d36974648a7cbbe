"""Find the modules that patterns name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from torch import nn

from lightning_tricks._shared.checks import did_you_mean
from lightning_tricks._shared.patterns import Pattern, strip_compile_prefix
from lightning_tricks._shared.text import list_names
from lightning_tricks._torch_compat.modules import compiled_module, compiles_in_place
from lightning_tricks.finetuning.core.class_extension import is_extensible

T = TypeVar("T")


def as_patterns(argument: str, given: str | Sequence[str]) -> list[Pattern]:
    """Return patterns from an argument that takes one or several.

    Raises:
        TypeError: If the argument is neither a string nor a list of strings.
    """
    if isinstance(given, str):
        given = [given]
    if not isinstance(given, list | tuple):
        raise TypeError(f"{argument} must be a pattern or a list of patterns, got {given!r} ({type(given).__name__}).")
    return [Pattern(text) for text in given]


def plain_names(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules below a model by qualified name, without the prefixes of `torch.compile`; a shared one once.

    The module inside a compiled one stands for both.
    """
    named = ((strip_compile_prefix(f"{name}."), part) for name, part in model.named_modules())
    return {name[:-1]: part for name, part in named if name not in ("", ".") and compiled_module(part) is None}


def matching(patterns: Sequence[Pattern], modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Return the modules that a pattern matches."""
    return {name: part for name, part in modules.items() if any(pattern.matches(name) for pattern in patterns)}


def select_modules(
    argument: str,
    patterns: Sequence[Pattern],
    modules: Mapping[str, nn.Module],
    suits: Callable[[nn.Module], bool] = lambda module: True,
    what: str = "modules",
) -> dict[str, nn.Module]:
    """Return the modules that suit and that a pattern matches.

    Args:
        argument: The name of the argument with the patterns, for errors.
        patterns: The patterns.
        modules: All modules by qualified name.
        suits: Whether a module can be taken; a pattern may match others as well.
        what: What suits, in the plural, for errors.

    Raises:
        ValueError: If a pattern matches none that suits.
    """
    found: dict[str, nn.Module] = {}
    for pattern in patterns:
        matched = matching([pattern], modules)
        suitable = {name: module for name, module in matched.items() if suits(module)}
        if not suitable:
            raise ValueError(f"{argument}: {_no_match(pattern, matched, modules, what)}")
        found |= suitable
    return {name: module for name, module in modules.items() if name in found}


def value_for(patterns: Mapping[Pattern, T], name: str, default: T) -> T:
    """Return the value of the first pattern that matches a name."""
    return next((value for pattern, value in patterns.items() if pattern.matches(name)), default)


def check_targets(model: nn.Module, targets: Mapping[str, nn.Module], what: str) -> None:
    """Refuse modules that are, or lie in, compiled ones, whose code is made for the modules as they were.

    Raises:
        ValueError: If there is one, or one that cannot be extended; the message names it.
    """
    for name, module in model.named_modules():
        if compiled_module(module) is None and not compiles_in_place(module):
            continue
        inside = {id(part) for part in module.modules()}
        if any(id(target) in inside for target in targets.values()):
            raise ValueError(
                f"{strip_compile_prefix(name) or type(module).__name__} is compiled: add {what} first, and call "
                "torch.compile on the result."
            )
    fixed = [f"{name} ({type(target).__name__})" for name, target in targets.items() if not is_extensible(target)]
    if fixed:
        raise ValueError(
            f"target_modules: the classes of {len(fixed)} layers cannot be extended, as one of their bases is "
            f"abc.ABC or has slots: {list_names(fixed)}. Use PeftAdapters, or leave them out by exclude."
        )


def _no_match(
    pattern: Pattern, matched: Mapping[str, nn.Module], all_modules: Mapping[str, nn.Module], what: str
) -> str:
    if matched:
        name, module = next(iter(matched.items()))
        return (
            f"pattern {pattern.text!r} matches {len(matched)} modules, such as {name!r} ({type(module).__name__}), but "
            f"none of them are {what}."
        )
    last = [name for name in all_modules if name.rpartition(".")[2] == pattern.text]
    hint = f" Did you mean '*.{pattern.text}'?" if last else did_you_mean(pattern.text, all_modules)
    return f"pattern {pattern.text!r} matches none of the {len(all_modules)} modules.{hint}"
