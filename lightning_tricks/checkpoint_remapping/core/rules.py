"""`RemapRule`, one step from the names and shapes of a file to those of a model, and files of such rules."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from pathlib import Path
from typing import Any

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.files import atomic_write
from lightning_tricks._shared.patterns import MAX_REPEATS, check_repeats
from lightning_tricks._shared.read_budget import read_yaml
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError, MissingCheckpointError
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import MAX_NAME_LENGTH


@dataclass(frozen=True)
class RemapRule:
    r"""A rule that renames, reshapes, splits, fuses or drops the tensors whose names match.

    Args:
        source: A name or the beginning of one (`"fc"`, `"module."`; only whole components match), a glob over the whole
            name (`"layer*.conv.weight"`), or `re:` and a regular expression that is searched for. The tensors that
            several sources match are fused into one.
        target: The replacement of the matching part: each `*` stands for the match of the glob's `*`, `\\1` for a
            group. Several targets split the tensor; None drops it.
        transpose: Whether the last two dimensions are swapped.
        shape: The new shape, with the same number of elements, before a split or behind a fusion; one size may be -1.
        dim: The dimension along which tensors are split and fused.
        sizes: Sizes of the parts of a split; None makes them equal.

    Raises:
        TypeError: If a source or target is not a string.
        ValueError: If a source is empty or not a valid regular expression, or does not fit its targets.

    Examples:
        >>> import torch
        >>> from lightning_tricks.checkpoint_remapping import remap_keys
        >>> weights = {"module.fc.weight": torch.zeros(2, 3), "module.fc.total_ops": torch.zeros(1)}
        >>> rules = [RemapRule("module.", ""), RemapRule("*.total_ops", None), RemapRule("fc", "head")]
        >>> list(remap_keys(weights, rules))
        ['head.weight']
    """

    source: str | tuple[str, ...]
    target: str | tuple[str, ...] | None
    transpose: bool = False
    shape: tuple[int, ...] | None = None
    dim: int = 0
    sizes: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("source", "target", "shape", "sizes"):
            value = getattr(self, name)
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(value))
        self._check_types()
        if not self.source or "" in self.sources:
            raise ValueError(f"{self}: a source must not be empty; '*' with target 'prefix.*' adds a prefix.")
        if isinstance(self.source, tuple) and not isinstance(self.target, str):
            raise ValueError(f"{self}: several sources are fused into one target.")
        if self.sizes is not None and (not isinstance(self.target, tuple) or len(self.sizes) != len(self.target)):
            raise ValueError(f"{self}: sizes must have one size for each target.")
        for source in self.sources:
            self._check_targets(source)

    def _check_types(self) -> None:
        for text in (*self.sources, *self.targets):
            if not isinstance(text, str):
                raise TypeError(f"{self}: a source and a target must be strings, got {text!r}.")
        for name, numbers in (("shape", self.shape), ("sizes", self.sizes), ("dim", (self.dim,))):
            if numbers is not None and not (isinstance(numbers, tuple) and all(type(each) is int for each in numbers)):
                raise TypeError(f"{self}: {name} must be whole numbers, got {getattr(self, name)!r}.")

    def _check_targets(self, source: str) -> None:
        """Check that the targets refer only to stars and groups that a source has."""
        expression = source_expression(source)
        is_regular_expression = source.startswith("re:")
        for target in self.targets:
            if is_regular_expression:
                try:
                    expression.sub(target, "")
                except (re.error, IndexError) as error:
                    raise ValueError(f"{self}: the target does not fit the source: {error}.") from error
            elif target.count("*") > expression.groups:
                raise ValueError(f"{self}: the target has more '*' than the source.")

    @property
    def sources(self) -> tuple[str, ...]:
        """The sources; several are fused."""
        return _as_tuple(self.source)

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets; several are parts of a split, none means that the tensor is dropped."""
        return _as_tuple(self.target)

    def as_dict(self) -> dict[str, Any]:
        """Return what a file of rules holds for it."""
        plain: dict[str, Any] = {"from": self.source, "to": self.target, "transpose": self.transpose}
        plain |= {"shape": self.shape, "dim": self.dim or None, "sizes": self.sizes}
        return {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in plain.items()
            if value not in (None, False) or name == "to"
        }

    def __str__(self) -> str:
        return f"{' + '.join(map(str, self.sources))} -> {', '.join(map(str, self.targets)) or 'nothing'}"


RemapRuleLike = RemapRule | Mapping[str, Any] | tuple[Any, ...] | str
Rules = Sequence["RemapRuleLike | Sequence[RemapRuleLike]"] | Mapping[str, Any]


def parse_steps(rules: Any) -> list[Any]:
    """Return the steps of rules: lists of `RemapRule`, each applied at once, or `"wrappers"`, and `"only"` at the end.

    Raises:
        TypeError: If `rules` is not a list of rules.
        ValueError: If an argument of a rule is wrong, or `"only"` is not the last step.
    """
    if isinstance(rules, Mapping):
        rules = [rules]
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise TypeError(f"rules must be a list of rules, got {rules!r}.")
    if "only" in list(rules)[:-1]:
        raise ValueError('"only" must be the last of the rules: it says that nothing else is matched.')
    return [_parse_step(rule) for rule in rules]


def _parse_step(rule: Any) -> Any:
    if isinstance(rule, str) and rule in ("wrappers", "only"):
        return rule
    if isinstance(rule, RemapRule):
        return [rule]
    if isinstance(rule, Mapping) and "from" not in rule and "source" not in rule:
        return [RemapRule(source, target) for source, target in rule.items()]
    if isinstance(rule, Mapping):
        arguments = {{"from": "source", "to": "target"}.get(name, name): value for name, value in rule.items()}
        return [RemapRule(**{"target": None, **arguments})]  # type: ignore[arg-type]
    if isinstance(rule, tuple) and len(rule) == 2:
        return [RemapRule(*rule)]
    if isinstance(rule, list):
        return [part for inner in rule for part in _parse_step(inner)]
    raise TypeError(f"a rule must be a RemapRule, a dict, a pair (source, target), 'wrappers' or 'only', got {rule!r}.")


def _as_tuple(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)


def is_pattern(source: str) -> bool:
    """Whether a source is a glob or a regular expression, not a name or the beginning of one."""
    return source.startswith("re:") or re.search(r"[*?[]", source) is not None


@lru_cache(maxsize=4096)
def source_expression(source: str) -> re.Pattern[str]:
    """Return the regular expression for the part of a name that a rule replaces.

    Raises:
        ValueError: If the source is not a valid regular expression.
    """
    try:
        if source.startswith("re:"):
            return re.compile(source[3:])
        if is_pattern(source):
            stars = [translate(part)[:-2].removeprefix("(?s:").removesuffix(")") for part in source.split("*")]
            return re.compile("^(?:" + "(.*)".join(stars) + r")\Z", re.DOTALL)
        return re.compile("^" + re.escape(source) + ("" if source.endswith(".") else r"(?=\.|\Z)"))
    except re.error as error:
        raise ValueError(f"{source!r} is not a valid regular expression: {error}.") from error


def rename(source: str, target: str, name: str) -> str:
    """Return what a name becomes when the part that matches `source` is replaced by `target`."""
    expression = source_expression(source)
    if source.startswith("re:"):
        return expression.sub(target, name)

    def fill_stars(found: re.Match[str]) -> str:
        stars = iter(found.groups())
        return re.sub(r"\*", lambda _: next(stars), target) if found.groups() else target

    new = expression.sub(fill_stars, name, count=1)
    return new.removeprefix(".") if not target else new


_MAX_DEPTH = 8  # nested lists and dicts in a file of rules


def read_rules(path: str | os.PathLike[str]) -> Rules:
    """Read rules from a YAML file of at most 1 MiB, such as `Alignment.save` writes.

    A file is trusted less than code: its globs may have at most three `*`, its regular expressions at most three
    repeats and no repeat of a group, so that no match takes very long.

    Args:
        path: Path of the file.

    Returns:
        The rules, as `remap_keys` and `load_weights` take them.

    Raises:
        CheckpointError: If the file does not exist, or is not a list of such rules.
    """
    import yaml

    check_path("path", path, "a file of rules")
    try:
        rules: Any = read_yaml(path, max_depth=_MAX_DEPTH, max_scalar_length=MAX_NAME_LENGTH)
        for step in parse_steps(rules):
            for rule in step if isinstance(step, list) else ():
                _check_patterns(rule)
    except FileNotFoundError as error:
        raise MissingCheckpointError(f"{os.fspath(path)} does not exist.") from error
    except (OSError, RecursionError, TypeError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{os.fspath(path)} is not a file of rules: {str(error)[:1000]}") from error
    checked: Rules = rules
    return checked


def write_rules(path: str | os.PathLike[str], rules: Sequence[Any], comment: str) -> None:
    """Write rules to a YAML file, with a comment in its first line."""
    import yaml

    text: str = yaml.safe_dump(_plain(rules), sort_keys=False, default_flow_style=None, width=10**6)
    with atomic_write(Path(check_path("path", path, "a file of rules"))) as staged:
        staged.write_text(f"# {comment}\n{text}", encoding="utf-8")


def _check_patterns(rule: RemapRule) -> None:
    for source in rule.sources:
        if source.startswith("re:"):
            check_repeats(source[3:])
        elif source.count("*") > MAX_REPEATS:
            raise ValueError(f"{rule}: a glob in a file has at most {MAX_REPEATS} '*', as more can take very long.")


def _plain(rules: Any) -> Any:
    """Return what a file holds for a step, or for a list of them."""
    if isinstance(rules, RemapRule):
        return rules.as_dict()
    return [_plain(step) for step in rules] if isinstance(rules, list | tuple) else rules
