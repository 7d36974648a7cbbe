"""`LoggedKeys`: the keys under which values are logged, and the check of the keys that `best` asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lightning_tricks._shared.checks import check_choice, did_you_mean
from lightning_tricks._shared.text import list_names
from lightning_tricks.metrics.core.expected_names import ExpectedNames

STAGES = ("train", "val", "test")
_MAX_SHOWN = 20


def check_prefix(prefix: Any) -> None:
    """Raise an error for a prefix that would make ambiguous keys."""
    if prefix is None:
        return
    if not isinstance(prefix, str):
        raise TypeError(f"prefix must be a string such as 'ema', or None, got {prefix!r} ({type(prefix).__name__}).")
    if not prefix or "" in prefix.split("/") or prefix != prefix.strip():
        raise ValueError(f"prefix must be a name such as 'ema', which logs 'ema/val/acc', got {prefix!r}.")
    if prefix.split("/")[0] in STAGES:
        raise ValueError(
            f"prefix must not begin with a stage, got {prefix!r}, which would log '{prefix}/val/acc'. Choose "
            "another name."
        )


@dataclass(frozen=True)
class LoggedKeys:
    """The keys of the values of several stages.

    Attributes:
        names: The names of the values.
        prefix: The first part of each key, or None.
        stages: The measured ones of "train", "val" and "test".
    """

    names: ExpectedNames
    prefix: str | None
    stages: Sequence[str]

    def key(self, folder: str, name: str) -> str:
        """Return the key of a value, where `folder` is the stage, with several loaders "<stage>/<number>"."""
        return "/".join(part for part in (self.prefix, folder, name) if part is not None)

    def expected(self, stage: str, loaders: int = 1) -> set[str]:
        """Return the keys that a stage is certain to log, except that of its loss."""
        folders = [stage] if loaders == 1 else [f"{stage}/{number}" for number in range(loaders)]
        return {self.key(folder, name) for folder in folders for name in self.names.known}

    def check_best(self, best: Mapping[str, str]) -> None:
        """Raise an error for keys that no stage of a fit logs.

        Raises:
            ValueError: If there is such a key; the message proposes the nearest one.
        """
        for key, mode in best.items():
            check_choice(f"best[{key!r}]", mode, ("min", "max"))
            stage, name = self._split(key)
            if stage == "test" and stage in self.stages:
                raise ValueError(f"best has the key {key!r}, but a fit does not test: use a key of train or val.")
            if stage not in self.stages:
                forgotten = self.prefix is not None and self._may_log(
                    *LoggedKeys(self.names, None, self.stages)._split(key)
                )
                starts = " or ".join(self.key(stage, "") for stage in self.stages if stage != "test")
                meant = f" Did you mean {self.key(key, '')[:-1]!r}?" if forgotten else ""
                rule = f"a key must start with {starts}" if starts else "stages holds neither train nor val"
                raise ValueError(f"best has the key {key!r}, but {rule}.{meant}")
            if not self._may_log(stage, name):
                raise ValueError(f"best has the key {key!r}, {self.describe_alternatives(key, stage)}")

    def check_loaders(self, best: Iterable[str], stage: str, loaders: int) -> None:
        """Raise an error for keys of `best` without the index of a loader if there are several, or with a wrong index.

        Raises:
            ValueError: If there is such a key; the message lists the right ones.
        """
        for key in best:
            of_stage, name = self._split(key)
            number, _, rest = name.partition("/")
            if of_stage != stage or loaders < 1:
                continue
            numbered = number.isdigit() and not self._is_value_name(name)
            if numbered != (loaders > 1) or (numbered and int(number) >= loaders):
                rest = rest if numbered else name
                there = [stage] if loaders == 1 else [f"{stage}/{number}" for number in range(loaders)]
                keys = list_names((self.key(folder, rest) for folder in there), _MAX_SHOWN)
                raise ValueError(f"best has the key {key!r}, but {stage} has {loaders} loader(s): use one of {keys}.")

    def keys_of_stage(self, best: Iterable[str], stage: str) -> list[str]:
        """Return the keys of `best` that belong to a stage."""
        return [key for key in best if self._split(key)[0] == stage]

    def describe_alternatives(self, key: str, stage: str, there: Iterable[str] | None = None) -> str:
        """Return the end of an error message: which keys exist instead of `key`."""
        listed = [*self.names.known, *self.names.undetermined, "loss"]
        keys = list(dict.fromkeys(self.key(stage, name) for name in listed)) if there is None else list(there)
        named = list_names(keys, _MAX_SHOWN) if keys else "not logged at all"
        return f"but the keys are {named}.{did_you_mean(key, keys)}"

    def _split(self, key: str) -> tuple[str, str]:
        """Return stage and name of a key; the stage is empty if the prefix is missing."""
        if self.prefix is not None:
            if not key.startswith(f"{self.prefix}/"):
                return "", key
            key = key.removeprefix(f"{self.prefix}/")
        stage, _, name = key.partition("/")
        return stage, name

    def _may_log(self, stage: str, name: str) -> bool:
        number, _, rest = name.partition("/")
        return stage in self.stages and (self._is_value_name(name) or (number.isdigit() and self._is_value_name(rest)))

    def _is_value_name(self, name: str) -> bool:
        return name == "loss" or self.names.may_contain(name)
