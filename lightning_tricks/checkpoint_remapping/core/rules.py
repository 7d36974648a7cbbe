"""Rules that rename and reshape the tensors of a state dict, and the file that they are kept in."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import lru_cache
from typing import Any

import torch

from lightning_tricks._shared.patterns import MAX_REPEATS, check_repeats
from lightning_tricks._shared.plain_yaml import read_yaml
from lightning_tricks._shared.text import format_shape
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError, MissingCheckpointError
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import MAX_NAME_LENGTH

# What wrappers put into names, and who does; `module` alone may also be a module's own name
WRAPPERS = {
    "module": "saved from DataParallel, DistributedDataParallel or an averaged model",
    "_orig_mod": "saved from a compiled model (torch.compile)",
    "_forward_module": "saved from a model wrapped by Fabric or a strategy",
    "_fsdp_wrapped_module": "saved from FullyShardedDataParallel",
    "_checkpoint_wrapped_module": "saved with activation checkpointing",
    "_fpw_module": "saved from FullyShardedDataParallel",
}
_COUNTERS = ("total_ops", "total_params", "n_averaged")
_MAX_DEPTH = 8  # lists and dicts in each other, in a file of rules
_MAX_NEW_NAME_LENGTH = 10_000  # characters of a name that rules make
_MAX_SECONDS = 60.0  # seconds of the processor that finding the rule of each name may take


@dataclass(frozen=True)
class RemapRule:
    r"""One step from the names of a file to those of a model.

    Args:
        source: A name or the beginning of one (`"fc"`, `"module."`; whole components alone), a glob over the whole name
            (`"layer*.conv.weight"`), or `re:` and a regular expression that is searched for. Several of them fuse the
            tensors that they match into one.
        target: What the matching part becomes: each `*` stands for what the glob's did, `\\1` for a group. Several of
            them split the tensor; None drops it.
        transpose: Whether the last two dimensions change places.
        shape: The new shape, of as many elements; one size may be -1.
        dim: Along which tensors are split and fused.
        sizes: Of the parts of a split; None makes them equal.

    Raises:
        TypeError: If a source or target is no string.
        ValueError: If a source is empty or no regular expression, or sources and targets do not go together.

    Example:
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
        for text in (*_texts(self.source), *_texts(self.target)):
            if not isinstance(text, str):
                raise TypeError(f"{self}: a source and a target must be strings, got {text!r}.")
        for name in ("shape", "sizes"):
            sizes = getattr(self, name)
            if sizes is not None and not (isinstance(sizes, tuple) and all(type(size) is int for size in sizes)):
                raise TypeError(f"{self}: {name} must be whole numbers, got {sizes!r}.")
        if type(self.dim) is not int:
            raise TypeError(f"{self}: dim must be a whole number, got {self.dim!r}.")
        if not self.source or "" in _texts(self.source):
            raise ValueError(f"{self}: a source must not be empty; '*' with target 'prefix.*' puts a prefix in front.")
        if isinstance(self.source, tuple) and not isinstance(self.target, str):
            raise ValueError(f"{self}: several sources are fused into one target.")
        if self.sizes is not None and (not isinstance(self.target, tuple) or len(self.sizes) != len(self.target)):
            raise ValueError(f"{self}: sizes must name one size for each target.")
        for text in _texts(self.source):
            expression = _expression(text)
            starred = any(part.count("*") > expression.groups for part in _texts(self.target))
            if starred and not text.startswith("re:"):
                raise ValueError(f"{self}: the target has more '*' than the source.")
            for part in _texts(self.target) if text.startswith("re:") else ():
                try:
                    expression.sub(part, "")
                except (re.error, IndexError) as error:
                    raise ValueError(f"{self}: the target does not go with the source: {error}.") from error

    def __str__(self) -> str:
        return f"{' + '.join(map(str, _texts(self.source)))} -> {', '.join(map(str, _texts(self.target))) or 'nothing'}"


RemapRuleLike = RemapRule | Mapping[str, Any] | tuple[Any, ...] | str
Rules = Sequence["RemapRuleLike | Sequence[RemapRuleLike]"] | Mapping[str, Any]


class Remapped(dict[str, Any]):
    """A state dict after rules were applied.

    Attributes:
        renamed: The new names by the old ones, where they differ; names of fused and split tensors joined by `" + "`.
        dropped: The old names that rules dropped.
        unmatched: The rules that matched nothing.
    """

    def __init__(self, tensors: Mapping[str, Any]) -> None:
        super().__init__(tensors)
        self.renamed: dict[str, str] = {}
        self.dropped: list[str] = []
        self.unmatched: list[str] = []


def remap_keys(state_dict: Mapping[str, Any], rules: Rules) -> Remapped:
    """Rename, drop, transpose, reshape, split and fuse the tensors of a state dict; it stays as it is.

    Args:
        state_dict: Tensors by name.
        rules: One after the other, each on what the one before left: a `RemapRule` or a dict of its arguments
            (`from` and `to` stand for `source` and `target`), a pair `(source, target)`, or `"wrappers"`, which strips
            what DataParallel, DDP, torch.compile, FSDP and thop put into names. A dict `{source: target}`, or a list
            inside the list, is one step: no rule of it sees another's result.

    Returns:
        A new dict in the order of the old, with what was renamed and dropped, and which rules matched nothing.

    Raises:
        CheckpointError: If two tensors would get one name, or a tensor does not have the shape that a rule needs.
        TypeError, ValueError: If a rule is none.

    Example:
        >>> list(remap_keys({"module.conv1.weight": torch.zeros(1)}, ["wrappers", ("conv1", "stem.conv")]))
        ['stem.conv.weight']
    """
    result = Remapped(state_dict)
    origins = {name: name for name in state_dict}
    end = time.thread_time() + _MAX_SECONDS
    for step in _steps(rules):
        if step == "wrappers":
            step = [RemapRule(old, new) for old, new in strip_wrappers(result).items() if new != old]
            if not step:
                result.unmatched.append("wrappers")
        result, origins = _apply(result, origins, step, end)
    result.renamed = renamed_from((origin, name) for name, origin in origins.items())
    return result


def renamed_from(pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the new names by the old ones of (old, new) pairs that differ; several are joined by `" + "`."""
    renamed: dict[str, str] = {}
    for old, new in pairs:
        if old != new:
            renamed[old] = f"{renamed[old]} + {new}" if old in renamed else new
    return renamed


def strip_wrappers(names: Iterable[str]) -> dict[str, str | None]:
    """Return what each name is without the parts that wrappers put into it, None for the counters of thop and averages.

    `_orig_mod`, `_forward_module` and their like go at any depth; `module` does where no two names become one by it.
    """
    clean = {
        name: None if name.rpartition(".")[2] in _COUNTERS else _without(name, WRAPPERS.keys() - {"module"}) or name
        for name in names
    }
    bare = {name: None if new is None else _without(new, ("module",)) or new for name, new in clean.items()}
    kept = [new for new in bare.values() if new is not None]
    return bare if len(set(kept)) == len(kept) else clean


def read_rules(path: str | os.PathLike[str]) -> Rules:
    """Read the rules of a YAML file, such as `Alignment.save` writes, of at most 1 MiB.

    What a file holds is trusted less than what you write in code: its globs have at most three `*`, its regular
    expressions at most three repeats, none of them of a group, so that no name makes them take very long.

    Raises:
        CheckpointError: If it is no list of such rules, or is not there.
    """
    import yaml

    try:
        rules: Any = read_yaml(path, max_depth=_MAX_DEPTH, max_scalar_length=MAX_NAME_LENGTH)
        for step in _steps(rules):
            for rule in step if isinstance(step, list) else ():
                _check_patterns(rule)
    except FileNotFoundError as error:
        raise MissingCheckpointError(f"{os.fspath(path)} does not exist.") from error
    except (OSError, RecursionError, TypeError, ValueError, yaml.YAMLError) as error:
        raise CheckpointError(f"{os.fspath(path)} is no file of rules: {str(error)[:1000]}") from error
    checked: Rules = rules
    return checked


def _check_patterns(rule: RemapRule) -> None:
    for source in _texts(rule.source):
        if source.startswith("re:"):
            check_repeats(source[3:])
        elif source.count("*") > MAX_REPEATS:
            raise ValueError(f"{rule}: a glob in a file has at most {MAX_REPEATS} '*', as more can take very long.")


def _texts(value: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return value if isinstance(value, tuple) else () if value is None else (value,)


def _steps(rules: Any) -> list[Any]:
    if isinstance(rules, Mapping):
        rules = [rules]
    if isinstance(rules, str) or not isinstance(rules, Sequence):
        raise TypeError(f"rules must be a list of rules, got {rules!r}.")
    return [_step(rule) for rule in rules]


def _step(rule: Any) -> Any:
    """Return the rules of one step, which are applied at once."""
    if rule == "wrappers":
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
        return [part for inner in rule for part in _step(inner)]
    raise TypeError(f"a rule must be a RemapRule, a dict, a pair (source, target) or 'wrappers', got {rule!r}.")


def _is_pattern(source: str) -> bool:
    return source.startswith("re:") or re.search(r"[*?[]", source) is not None


@lru_cache(maxsize=4096)
def _expression(source: str) -> re.Pattern[str]:
    """Return what finds the part of a name that a rule replaces."""
    try:
        if source.startswith("re:"):
            return re.compile(source[3:])
        if _is_pattern(source):
            stars = [translate(part)[:-2].removeprefix("(?s:").removesuffix(")") for part in source.split("*")]
            return re.compile("^(?:" + "(.*)".join(stars) + r")\Z", re.DOTALL)
        return re.compile("^" + re.escape(source) + ("" if source.endswith(".") else r"(?=\.|\Z)"))
    except re.error as error:
        raise ValueError(f"{source!r} is no regular expression: {error}.") from error


class _Step:
    """The rules of one step; the first that matches a name takes it."""

    def __init__(self, rules: Sequence[RemapRule], end: float) -> None:
        self.end = end
        self.patterns: list[tuple[int, RemapRule, re.Pattern[str]]] = []
        self.names: dict[str, tuple[int, RemapRule]] = {}  # names and their beginnings need no search
        for position, rule in enumerate(rules):
            for source in _texts(rule.source):
                if _is_pattern(source):
                    self.patterns.append((position, rule, _expression(source)))
                else:
                    self.names.setdefault(source, (position, rule))

    def taker(self, name: str) -> RemapRule | None:
        """Return the rule that takes a name."""
        if self.patterns and time.thread_time() > self.end:
            slow = self.patterns[0][1]
            raise CheckpointError(
                f"the rules take longer than {_MAX_SECONDS:g} s: write {slow} and others with fewer repeats."
            )
        ends = [found.start() for found in re.finditer(r"\.", name)]
        beginnings = [name, *(name[:end] for end in ends), *(name[: end + 1] for end in ends)]
        found = [self.names[part] for part in beginnings if part in self.names]
        found += [(position, rule) for position, rule, expression in self.patterns if expression.search(name)]
        return min(found, key=lambda pair: pair[0])[1] if found else None


def _new_name(source: str, target: str, name: str) -> str:
    expression = _expression(source)
    if source.startswith("re:"):
        return expression.sub(target, name)

    def replaced(found: re.Match[str]) -> str:
        stars = iter(found.groups())
        return re.sub(r"\*", lambda _: next(stars), target) if found.groups() else target

    new = expression.sub(replaced, name, count=1)
    return new.removeprefix(".") if not target else new


def _without(name: str, wrappers: Iterable[str]) -> str:
    return ".".join(part for part in name.split(".") if part not in wrappers)


def _apply(
    tensors: Remapped, origins: dict[str, str], step: Sequence[RemapRule], end: float
) -> tuple[Remapped, dict[str, str]]:
    """Apply the rules of one step: the first that matches a name takes it."""
    result, sources = Remapped({}), dict[str, str]()
    order = _Step(step, end)
    takers = {name: order.taker(name) for name in tensors}
    result.dropped = tensors.dropped
    used = set(map(id, takers.values()))
    result.unmatched = tensors.unmatched + [str(rule) for rule in step if id(rule) not in used]
    fused = {name: part for rule in step if isinstance(rule.source, tuple) for name, part in _groups(rule, takers)}
    for name, tensor in tensors.items():
        made: list[tuple[str, Any, str]]
        if name in fused:
            rule, target, parts = fused[name]
            origin = " + ".join(origins[part] for part in parts)
            made = (
                [(target, _fuse(rule, [(part, tensors[part]) for part in parts]), origin)] if name == parts[0] else []
            )
        else:
            made = _renamed(takers[name], name, tensor, origins[name])
            if not made:
                result.dropped.append(origins[name])
        for new, value, origin in made:
            if not new:
                raise CheckpointError(f"a rule leaves nothing of the name {name!r}.")
            if len(new) > _MAX_NEW_NAME_LENGTH:
                raise CheckpointError(f"a rule makes a name of {len(new):,} characters of {name[:80]!r}.")
            if new in result:
                raise CheckpointError(
                    f"{origin!r} and {sources[new]!r} would both become {new!r}: drop one of them, or rename it."
                )
            result[new], sources[new] = value, origin
    return result, sources


def _renamed(rule: RemapRule | None, name: str, tensor: Any, origin: str) -> list[tuple[str, Any, str]]:
    if rule is None:
        return [(name, tensor, origin)]
    if rule.target is None and not (rule.transpose or rule.shape):
        return []
    (source,) = _texts(rule.source)
    value = _reshaped(rule, name, tensor)
    if isinstance(rule.target, str) or rule.target is None:
        return [(name if rule.target is None else _new_name(source, rule.target, name), value, origin)]
    length = value.shape[rule.dim] if -value.dim() <= rule.dim < value.dim() else 0
    sizes = list(rule.sizes or [length // len(rule.target)] * len(rule.target))
    if sum(sizes) != length or min(sizes) < 0:
        raise CheckpointError(
            f"{name} ({format_shape(value.shape)}) does not split into {len(rule.target)} parts: {rule}."
        )
    parts = value.split(sizes, rule.dim)
    return [(_new_name(source, new, name), part, origin) for new, part in zip(rule.target, parts, strict=True)]


def _groups(
    rule: RemapRule, takers: Mapping[str, RemapRule | None]
) -> list[tuple[str, tuple[RemapRule, str, list[str]]]]:
    """Return, for each name that a rule fuses, the rule, the new name, and all names that become it."""
    groups: dict[str, dict[int, str]] = {}
    (target,) = _texts(rule.target)
    for name in [name for name, taker in takers.items() if taker is rule]:
        for position, source in enumerate(_texts(rule.source)):
            if _expression(source).search(name):
                groups.setdefault(_new_name(source, target, name), {})[position] = name
                break
    for new, parts in groups.items():
        if len(parts) < len(_texts(rule.source)):
            raise CheckpointError(f"{', '.join(parts.values())} lack the others that {rule} makes {new} of.")
    return [
        (name, (rule, new, [parts[position] for position in sorted(parts)]))
        for new, parts in groups.items()
        for name in parts.values()
    ]


def _fuse(rule: RemapRule, parts: list[tuple[str, Any]]) -> Any:
    try:
        return torch.cat([_reshaped(rule, name, tensor) for name, tensor in parts], rule.dim)
    except (IndexError, RuntimeError) as error:
        shapes = ", ".join(f"{name} ({format_shape(tensor.shape)})" for name, tensor in parts)
        raise CheckpointError(f"{shapes} do not fuse: {rule}.") from error


def _reshaped(rule: RemapRule, name: str, tensor: Any) -> Any:
    if rule.transpose:
        if tensor.dim() < 2:
            raise CheckpointError(f"{name} ({format_shape(tensor.shape)}) has no two dimensions to transpose: {rule}.")
        tensor = tensor.mT
    if rule.shape is None:
        return tensor
    try:
        return tensor.reshape(rule.shape)
    except (OverflowError, RuntimeError, TypeError) as error:
        raise CheckpointError(
            f"{name} ({format_shape(tensor.shape)}) is no {format_shape(rule.shape)}: {rule}."
        ) from error
