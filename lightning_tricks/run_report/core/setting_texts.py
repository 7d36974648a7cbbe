"""Settings of a run as texts, one for each name, short and without secrets; versions of packages; settings of torch."""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
import re
import sys
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

import torch

from lightning_tricks._shared.text import list_names
from lightning_tricks.auto_resume.core.configuration import flatten, is_comparable, plain
from lightning_tricks.run_report.core.secret_values import HIDDEN, hidden, is_secret

_PACKAGES = ("torch", "lightning", "lightning-tricks", "torchmetrics", "torchvision", "transformers", "timm", "numpy")
_LONGEST_TEXT = 300
_MOST_ITEMS = 100_000  # of a list whose content is recorded
_MOST_SETTINGS = 3000


@dataclass
class SettingTexts:
    """Gathers names and texts of settings.

    Attributes:
        texts: Name -> text.
        types_only: The names of those of which only the type was recorded.
        secrets: The names of those whose values were left out, as they may be secret.
        unknown: Other settings that exist and were not recorded, in words.
    """

    texts: dict[str, str] = field(default_factory=dict)
    types_only: list[str] = field(default_factory=list)
    secrets: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def add_arguments(self, label: str, instance: object) -> None:
        """Add the arguments of an object's constructor that it stores under their names, or those with a "_" before."""
        try:
            parameters = inspect.signature(type(instance).__init__).parameters
        except (TypeError, ValueError):
            return
        held, lost = getattr(instance, "__dict__", {}), []
        for name, parameter in list(parameters.items())[1:]:
            stored = next((key for key in (name, f"_{name}") if key in held), None)
            if stored is not None:
                self.add(name, held[stored], label)
            elif parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                lost.append(name)
        if lost:
            self.unknown.append(f"{', '.join(lost)} of {label}")

    def not_recorded(self) -> list[str]:
        """Return which settings were not recorded, in words."""
        words = (("values that may be secret: {}", self.secrets), ("more than the type of {}", self.types_only))
        said = [text.format(list_names(names, 20)) for text, names in words if names]
        return [
            *said,
            *([f"arguments that objects do not store: {list_names(self.unknown, 20)}"] if self.unknown else []),
        ]

    def add(self, name: str, value: Any, owner: str = "") -> None:
        """Add a value; of mappings, namespaces and dataclasses each part, under names that are joined by dots."""
        is_long = isinstance(value, list | tuple) and len(value) > 1000  # whose items `plain` leaves out
        parts = [(name, [plain(item) for item in value[:_MOST_ITEMS]])] if is_long else list(flatten(name, value))
        for path, part in parts:
            words = [name, *(path.removeprefix(f"{name}.").split(".") if path != name else ())]
            secret = next((place for place, word in enumerate(words) if is_secret(word)), None)
            path = path if secret is None else ".".join(words[: secret + 1])
            path = f"{owner}.{path}" if owner else path
            shown = hidden(words[-1 if secret is None else secret], part)
            if shown == HIDDEN:
                self.secrets += [path] if path not in self.secrets else []
            elif not is_comparable(shown):
                self.types_only.append(path)
            if self.texts.get(path) != HIDDEN:
                self.texts[path[:_LONGEST_TEXT]] = text_of(shown)

    def pairs(self) -> list[tuple[str, str]]:
        """Return names and texts; of those beyond the first 3,000 a digest."""
        pairs = list(self.texts.items())
        return pairs[:_MOST_SETTINGS] + (
            [(f"{len(pairs) - _MOST_SETTINGS:,} more", digest(map(repr, pairs[_MOST_SETTINGS:])))]
            if len(pairs) > _MOST_SETTINGS
            else []
        )


def text_of(value: Any) -> str:
    """Return a plain value as text; of a long one the beginning, and a digest of the whole.

    Examples:
        >>> text_of(0.1), text_of(1.0), text_of(0.30000004), text_of("sgd"), text_of([1, "a"])
        ('0.1', '1', '0.30000004', 'sgd', "[1, 'a']")
    """
    text = value if isinstance(value, str) else repr(value)
    if isinstance(value, float) and float(f"{value:g}") == value:
        text = f"{value:g}"
    if len(text) <= _LONGEST_TEXT:
        return text
    return f"{text[:_LONGEST_TEXT]}… ({len(text):,} characters, SHA-256 {digest([text])})"


def digest(texts: Iterable[str]) -> str:
    """Return the first 12 digits of a digest of texts."""
    found = hashlib.sha256()
    for text in texts:
        found.update(text.encode("utf-8", "surrogatepass") + b"\0")
    return found.hexdigest()[:12]


def versions() -> list[tuple[str, str]]:
    """Return the versions of Python, the system and the libraries that are installed."""
    found = [("python", platform.python_version())]
    for name in _PACKAGES:
        try:
            found.append((name, metadata.version(name)))
        except metadata.PackageNotFoundError:
            continue
    if torch.version.cuda:
        found.append(("CUDA", torch.version.cuda))
    return [*found, ("system", platform.platform())]


def other_versions() -> list[tuple[str, str]]:
    """Return the versions of all other packages that are installed, by the names of their folders."""
    found: dict[str, str] = {}
    for folder in sys.path:
        with suppress(OSError):
            for entry in os.listdir(folder or os.curdir):  # noqa: PTH208 - a Path for each takes ten times as long
                parts = re.fullmatch(r"(.+?)-([^-]+)(-py[\d.]+)?\.(dist|egg)-info", entry)
                if parts is not None:
                    found.setdefault(parts[1].replace("_", "-").lower(), parts[2])
    return [(f"version of {name}", version) for name, version in sorted(found.items()) if name not in _PACKAGES]


def torch_settings() -> list[tuple[str, str]]:
    """Return torch's settings that decide whether a run can be repeated, and how fast it is."""
    return [
        ("deterministic algorithms", _on_off(torch.are_deterministic_algorithms_enabled())),
        ("cudnn.benchmark", _on_off(torch.backends.cudnn.benchmark)),
        ("cudnn.deterministic", _on_off(torch.backends.cudnn.deterministic)),
        ("float32 matmul precision", torch.get_float32_matmul_precision()),
        ("cudnn.allow_tf32", _on_off(torch.backends.cudnn.allow_tf32)),
        ("anomaly detection", _on_off(torch.is_anomaly_enabled())),
        ("default dtype", str(torch.get_default_dtype())),
        ("threads of torch", str(torch.get_num_threads())),
    ]


def _on_off(is_on: bool) -> str:
    return "on" if is_on else "off"
