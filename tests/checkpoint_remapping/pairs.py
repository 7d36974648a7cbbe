"""Load each network of `other_projects` into the same one of another project, and compare them.

`python -m tests.checkpoint_remapping.pairs [WORD]` prints a line for each directed pair (whose name contains the word),
and counts: right, refused, or WRONG, which is what must never be.
"""

from __future__ import annotations

import itertools
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import nn

from lightning_tricks import load_weights
from lightning_tricks.checkpoint_remapping import CheckpointError
from lightning_tricks.checkpoint_remapping.core.matching.synonyms import is_computed
from tests.checkpoint_remapping.models import randomized
from tests.checkpoint_remapping.other_projects import ARCHITECTURES

TOLERANCE = 1e-4
RIGHT, REFUSED, WRONG = "right", "refused", "WRONG"


def _prefixed(prefix: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda state: {f"{prefix}.{name}": tensor for name, tensor in state.items()}


CONTAINERS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "as registered": dict,
    "sorted": lambda state: dict(sorted(state.items())),  # as in a .safetensors
    "shuffled": lambda state: dict(random.Random(0).sample([*state.items()], len(state))),
    "model.": _prefixed("model"),
}


class Pair(NamedTuple):
    """Who wrote the file, and whose model it is loaded into."""

    architecture: str
    origin: str
    target: str

    def __str__(self) -> str:
        return f"{self.architecture}: {self.origin} -> {self.target}"


PAIRS = [Pair(name, *pair) for name, which in ARCHITECTURES.items() for pair in itertools.permutations(which.sides, 2)]


@cache
def model(architecture: str, project: str) -> nn.Module:
    """Return the model of a project, with values of its own in every tensor."""
    built = ARCHITECTURES[architecture].sides[project]().eval()
    computed = {name: value.clone() for name, value in built.state_dict().items() if is_computed(name, value.shape)}
    randomized(built).load_state_dict(computed, strict=False)
    return built


def unset(architecture: str, project: str) -> nn.Module:
    """Return a copy that is not a number until all of its weights are loaded."""
    copy = deepcopy(model(architecture, project))
    with torch.no_grad():
        for name, tensor in copy.state_dict().items():
            if tensor.is_floating_point() and not is_computed(name, tensor.shape):
                tensor.fill_(torch.nan)
    return copy


def outcome(pair: Pair, container: str) -> tuple[str, str]:
    """Return what became of a pair, and why."""
    source = model(pair.architecture, pair.origin)
    target = unset(pair.architecture, pair.target)
    try:
        load_weights(target, CONTAINERS[container](source.state_dict()))
    except CheckpointError as error:
        return REFUSED, str(error)
    difference = ARCHITECTURES[pair.architecture].difference(pair.origin, source, pair.target, target)
    return (RIGHT if difference < TOLERANCE else WRONG), f"they differ by {difference:.2g}"


def main(word: str = "") -> Counter[str]:
    """Print the outcome of every pair whose name contains a word, and how many there are of each."""
    totals: Counter[str] = Counter()
    for pair in PAIRS:
        if word in str(pair):
            outcomes = {container: outcome(pair, container) for container in CONTAINERS}
            totals.update(verdict for verdict, _ in outcomes.values())
            sys.stdout.write(f"{pair}: {'; '.join(_lines(outcomes))}\n")
    sys.stdout.write(", ".join(f"{totals[verdict]} {verdict}" for verdict in (RIGHT, REFUSED, WRONG)) + "\n")
    return totals


def _lines(outcomes: dict[str, tuple[str, str]]) -> Iterator[str]:
    """Say once what is the same in all containers."""
    for verdict in dict.fromkeys(verdict for verdict, _ in outcomes.values()):
        where = [container for container, (found, _) in outcomes.items() if found == verdict]
        reason = outcomes[where[0]][1] if verdict != RIGHT else ""
        places = "" if len(where) == len(outcomes) else f" ({', '.join(where)})"
        yield f"{verdict}{places}{': ' * bool(reason)}{_short(reason)}"


def _short(reason: str) -> str:
    match = re.search(
        r"ambiguous which of .*? in the checkpoint|\d+ tensors? (is|are) \w+[^(]*|they differ .*|No tensor", reason
    )
    return (match.group() if match else reason)[:120]


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:])[WRONG] > 0)
