"""A file in the format of another project, made by undoing a conversion function, and what that function makes of it.

The function of the other project is the truth: the file is loaded into the model that the function is for, and the
model's own weights into one with the names of the file. Either must end as the function says, in any order of names.
"""

from __future__ import annotations

import ast
import contextlib
import inspect
import io
import random
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_tricks import load_weights
from lightning_tricks.checkpoint_remapping import CheckpointError
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import is_computed
from tests.checkpoint_remapping.advice import WARNED, load_blindly
from tests.checkpoint_remapping.models import module_of

RIGHT, REFUSED, WRONG = OUTCOMES = ("right", "refused", "WRONG")
DIRECTIONS = ("from the original", "to the original")
State = dict[str, Any]
Rules = Sequence[tuple[str, Any]]  # regular expressions and replacements, as in `re.sub`


class Converter(NamedTuple):
    """A function of another project that converts the files of an original into those of a model."""

    name: str
    model: Callable[[], nn.Module]
    convert: Callable[[State, nn.Module], State]
    original: Callable[[State, nn.Module], State]  # makes a file of the original from the tensors of the model
    device: str = "meta"  # where the model is built: some cannot be without values


def replaced(name: str, rules: Rules) -> str:
    """Return a name after all replacements."""
    for pattern, replacement in rules:
        name = re.sub(pattern, replacement, name)
    return name


class Case:
    """The tensors of a model, its original file, and what the function makes of that."""

    def __init__(self, which: Converter) -> None:
        with torch.device(which.device), contextlib.redirect_stdout(io.StringIO()):
            self.which, self.model = which, which.model()
        self.own = self.model.state_dict(keep_vars=True)
        generator = torch.Generator().manual_seed(0)
        made: dict[int, torch.Tensor] = {}
        self.state = {
            name: made.setdefault(id(tensor), torch.rand(tensor.shape, generator=generator))
            for name, tensor in self.own.items()
            if tensor.is_floating_point() and not is_computed(name, tuple(tensor.shape))
        }
        self.original = which.original(dict(self.state), self.model)
        self.truth = self._converted(self.original)
        tied = {id(self.own[name]) for name in self.truth if name in self.own}
        self.lacking = [name for name in self.state if name not in self.truth and id(self.own[name]) not in tied]

    def outcome(
        self, direction: str, seed: int | None, accept: str | tuple[()] = (), blindly: bool = False
    ) -> tuple[str, str]:
        """Load in a direction, with the names in the order of the file or in a random one; say how that ended.

        Blindly, the first rule or `accept` of each message is taken as it stands.
        """
        file, shapes = self.original, self.own
        if direction == DIRECTIONS[1]:
            file, shapes = self.state, self.original
        target = module_of(_without_values(shapes))
        names = list(file)
        if seed is not None:
            random.Random(seed).shuffle(names)
        copies: dict[int, torch.Tensor] = {}
        try:
            tensors = {name: copies.setdefault(id(file[name]), file[name].clone()) for name in names}
            load = partial(load_weights, target, tensors)
            is_loaded, is_warned = load_blindly(load) if blindly else (load(accept=accept), False)
        except CheckpointError as error:
            return REFUSED, str(error)
        if not is_loaded:
            return REFUSED, "no advice, or one that was taken"
        got = target.state_dict() if file is self.original else self._converted(target.state_dict())
        wrong = [
            n for n in self.state if n in self.truth and not torch.equal(got[n].flatten(), self.truth[n].flatten())
        ]
        return (WARNED if wrong and is_warned else WRONG if wrong else RIGHT), ", ".join(wrong[:3])

    def _converted(self, file: State) -> State:
        with contextlib.redirect_stdout(io.StringIO()):
            return self.which.convert(_Lenient((name, tensor.clone()) for name, tensor in file.items()), self.model)


def _without_values(tensors: State) -> State:
    made: dict[int, torch.Tensor] = {}
    return {
        name: made.setdefault(id(tensor), torch.full(tensor.shape, torch.nan if tensor.is_floating_point() else 0))
        for name, tensor in tensors.items()
    }


class _Lenient(dict):  # type: ignore[type-arg]
    """A file with the indices that models compute themselves, and that some functions take."""

    def pop(self, name: str, *default: Any) -> Any:
        computed = (torch.zeros(1),) if name.endswith("relative_position_index") else ()
        return super().pop(name, *(default or computed))


# Functions that name all tensors: a file that records what is taken says what it holds


class _Probe:
    def __init__(self, name: str, start: int = 0) -> None:
        self.name, self.start = name, start

    def __getitem__(self, key: Any) -> _Probe:
        start = (key[0] if isinstance(key, tuple) else key).start or 0
        return _Probe(self.name, start if start >= 0 else 10**9)


class _ProbedFile(dict):  # type: ignore[type-arg]
    def pop(self, name: str, *default: Any) -> Any:
        return super().pop(name, _Probe(name))


def probed(convert: Callable[[State, nn.Module], State]) -> Callable[[State, nn.Module], State]:
    """Return the undoing of a function that names all tensors that it takes."""

    def original(state: State, model: nn.Module) -> State:
        parts: dict[str, list[tuple[int, str]]] = {}
        for new, probe in convert(_ProbedFile(), model).items():
            if new in state:
                parts.setdefault(probe.name, []).append((probe.start, new))
        tensors = {name: [state[new] for _, new in sorted(pieces)] for name, pieces in parts.items()}
        return {name: torch.cat(pieces) if len(pieces) > 1 else pieces[0] for name, pieces in tensors.items()}

    return original


# Functions that replace parts of names: their source says what they replace


def replacements(function: Any) -> list[tuple[str, str]]:
    """Return the (old, new) parts of names that a function replaces."""
    found = []
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(function)))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "replace":
            texts = [argument.value for argument in node.args[:2] if isinstance(argument, ast.Constant)]
            if len(texts) == 2:
                found.append((node.lineno, node.end_col_offset or 0, *texts))
    return [(old, new) for _, _, old, new in sorted(found)]


def undone(
    convert: Callable[[State, nn.Module], State], pairs: Sequence[tuple[str, str]], fused: Rules = (), first: Rules = ()
) -> Callable[[State, nn.Module], State]:
    """Return the undoing of a function that replaces parts of names.

    Args:
        convert: The function.
        pairs: What it replaces.
        fused: Names of the model whose tensors are parts of one, called `part`, and the name of that.
        first: Replacements in names of the model before.
    """

    def original(state: State, model: nn.Module) -> State:
        file: State = {}
        groups: dict[str, dict[str, torch.Tensor]] = {}
        for name, tensor in state.items():
            match = next((found for pattern, _ in fused if (found := re.fullmatch(pattern, name))), None)
            if match:
                template = next(new for pattern, new in fused if pattern == match.re.pattern)
                groups.setdefault(match.expand(template), {})[match["part"][0]] = tensor
                continue
            valid = [old for old in _before(replaced(name, first), pairs) if _makes(old, name, tensor, model)]
            if valid:
                file[min(valid, key=len)] = tensor
        return file | {
            name: torch.cat([parts[part] for part in "qkv" if part in parts]) for name, parts in groups.items()
        }

    def _makes(old: str, name: str, tensor: torch.Tensor, model: nn.Module) -> bool:
        try:
            with contextlib.redirect_stdout(io.StringIO()):
                made = convert({old: tensor.clone()}, model)
        except Exception:  # whatever a function does with a name that it does not expect
            return False
        return name in made and made[name].shape == tensor.shape

    return original


def _before(name: str, pairs: Sequence[tuple[str, str]], most: int = 1000) -> Iterator[str]:
    """Yield what a name may have been before replacements, beginning with the most changed."""
    left = [most]

    def go(current: str, end: int) -> Iterator[str]:
        for i in range(end - 1, -1, -1):
            old, new = pairs[i]
            if left[0] > 0 and new.strip(".") and new in current and old != new:
                yield from go(current.replace(new, old), i)
        left[0] -= 1
        yield current

    yield from dict.fromkeys(go(name, len(pairs)))
