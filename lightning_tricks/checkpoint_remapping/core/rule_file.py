"""Rules in a YAML file: `read_rules`, and `write_rules` for what `align` found."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_tricks._shared.checks import check_path
from lightning_tricks._shared.files import atomic_write
from lightning_tricks._shared.patterns import MAX_REPEATS, check_repeats
from lightning_tricks._shared.plain_yaml import read_yaml
from lightning_tricks.checkpoint_remapping.core.errors import CheckpointError, MissingCheckpointError
from lightning_tricks.checkpoint_remapping.core.files.pickle_values import MAX_NAME_LENGTH
from lightning_tricks.checkpoint_remapping.core.rules import RemapRule, Rules, parse_steps

_MAX_DEPTH = 8  # nested lists and dicts in a file of rules


def read_rules(path: str | os.PathLike[str]) -> Rules:
    """Read rules from a YAML file of at most 1 MiB, such as `Alignment.save` writes.

    A file is trusted less than code: its globs have at most three `*`, its regular expressions at most three repeats
    and no repeat of a group, so that no name makes a match take very long.

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
    lines = [f"# {comment}", *(_yaml(step) for step in rules)] + ["[]"] * (not rules)
    with atomic_write(Path(check_path("path", path, "a file of rules"))) as staged:
        staged.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _check_patterns(rule: RemapRule) -> None:
    for source in rule.sources:
        if source.startswith("re:"):
            check_repeats(source[3:])
        elif source.count("*") > MAX_REPEATS:
            raise ValueError(f"{rule}: a glob in a file has at most {MAX_REPEATS} '*', as more can take very long.")


def _yaml(step: Any) -> str:
    import yaml

    if isinstance(step, list):
        return "- " + ("\n  ".join(map(_yaml, step)) or "[]")
    if isinstance(step, RemapRule):
        plain: dict[str, Any] = {"from": step.source, "to": step.target, "transpose": step.transpose}
        plain |= {"shape": step.shape, "dim": step.dim or None, "sizes": step.sizes}
        step = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in plain.items()
            if value not in (None, False) or name == "to"
        }
    text: str = yaml.safe_dump(step, sort_keys=False, default_flow_style=True, width=10**6)
    return "- " + text.removesuffix("...\n").strip()
