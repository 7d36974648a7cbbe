"""What the command line says of a wrong option: jsonargparse's message, cut down to the sentence in it."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from importlib import import_module
from inspect import signature

from lightning_tricks._shared.checks import did_you_mean

_NOISE = (
    "Does not validate against any of the Union subtypes",
    "Subtypes:",
    "Errors:",
    "Expected a <class 'NoneType'>",
    "Expected a path but",
    "Given value",
    "Not a valid subclass of",
    "Subclass types expect one of",
    "a class path (str)",
    "a dict with",
)

# What older scripts call their options
_OLDER_OPTIONS = {
    "--ngpu": "--trainer.devices N",
    "--gpu_id": "--trainer.devices '[N]', or --select_gpus 1 for one that is free",
    "--workers": "--data.init_args.num_workers N",
    "--nodes": "--trainer.num_nodes N",
}


def condense_message(message: str, classes: Iterable[type], options: Iterable[str] = ()) -> str:
    """Return one line with what is wrong and the remedy.

    Args:
        message: What jsonargparse says: a tree of all types that a value may have, and why it is none of them.
        classes: The classes that an option may name without their module, to suggest the most similar one.
        options: The names of options, for the same.
    """

    def ending(text: str) -> str:
        return "" if text.endswith((".", "!", "?")) else "."

    line = ""
    for part in _informative_lines(message):
        line += (
            part if not line else f" {part}" if line.endswith(":") else f"{ending(line)} {part[0].upper()}{part[1:]}"
        )
    line = re.sub(r"Parser key \"([^\"]+)\"", r"\1", line)
    line = re.sub(r"Problem with given class_path '([^']+)'", r"\1", line).rstrip(" :") or message
    line = re.sub(r"Expected a dot import path string: (\S+)", r"no class is called '\1'", line)
    if "Expected a" in line and "Got value" not in line and (found := re.findall(r"Given value: (.{1,80})$", message)):
        line += f". Got value: {found[-1]}"
    return f"{line}{ending(line)}{_remedy(line, classes, options)}"


def _informative_lines(message: str) -> Iterator[str]:
    """Yield the lines that say something, each once; of the types that a value may have, only the first says why."""
    seen: set[str] = set()
    tried: dict[int, int] = {}  # indentation -> how many types were tried there
    skipped_below = -1
    for line in message.splitlines():
        indentation, text = len(line) - len(line.lstrip()), line.strip().removeprefix("- ")
        if -1 < skipped_below < indentation:
            continue
        skipped_below = -1
        if text.startswith("Problem with given class_path"):
            tried[indentation] = tried.get(indentation, 0) + 1
            if tried[indentation] > 1:
                skipped_below = indentation
                continue
        if text and not text.startswith(_NOISE) and text not in seen:
            seen.add(text)
            yield text


def _remedy(line: str, classes: Iterable[type], options: Iterable[str]) -> str:
    """Return a sentence that says what to write instead, or an empty string."""
    if found := re.search(r"no class is called '(\S+)'", line):
        names = sorted({kind.__name__ for kind in classes})
        return f"{did_you_mean(found[1], names)} A class of your own is named as module.Class."
    if found := re.search(r"([\w.]+): Option '([\w.]+)' is not accepted", line):
        module, _, name = found[1].rpartition(".")
        known = list(signature(getattr(import_module(module), name)).parameters)
        return f" {name} takes {', '.join(known) or 'no arguments'}.{did_you_mean(found[2], known)}"
    if "No module named" in line:
        return " Modules are looked for in the working directory and among the installed packages."
    if found := re.search(r"arguments are required: (\w+)\.model", line):
        stage = found[1]
        return f" Write `{stage} --config FILE`, with a YAML file that has a model, or `{stage} --model module.Class`."
    if found := re.search(r"does not accept option '([\w.]+)'", line):
        return did_you_mean(found[1], options)
    if found := re.search(r"unrecognized arguments: (--([\w.]+))", line):
        if found[1] in _OLDER_OPTIONS:
            return f" Write {_OLDER_OPTIONS[found[1]]}."
        return f"{did_you_mean(found[2], options)} `fit --help` lists them all."
    if line.startswith("Unexpected config"):
        return " A file of --config holds options, such as `trainer: {max_epochs: 5}`."
    return ""
