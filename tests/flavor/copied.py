"""The tests as a program that imports `pytorch_lightning` has them: a copy in which nothing but the imports changes.

    python -m tests.flavor.copied FOLDER

The folder then holds `tests`, `examples`, `docs` and `lightning_tricks`. The package is the same, but for the examples
in its docstrings, which are tests too.
"""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
_RULES = (
    (r"\blightning\.pytorch\b", "pytorch_lightning"),
    (r"\blightning\.fabric\b", "lightning_fabric"),
    (r"\bdoes not work with lightning\b", "does not work with pytorch_lightning"),
    (
        r"^(\s*(?:>>> )?)import lightning$",
        r"\1import lightning_fabric, pytorch_lightning, pytorch_lightning as lightning",
    ),
    (r"^(\s*(?:>>> )?)import lightning as", r"\1import pytorch_lightning as"),
    (r"^(\s*(?:>>> )?)from lightning import", r"\1from pytorch_lightning import"),
)


def with_other_imports(text: str) -> str:
    """Return a program that imports `pytorch_lightning` in place of `lightning`."""
    for pattern, replacement in _RULES:
        text = re.sub(pattern, replacement, text, flags=re.MULTILINE)
    return text


def _with_other_examples(text: str) -> str:
    return re.sub(r"^ *(?:>>>|\.\.\.) .*$", lambda line: with_other_imports(line[0]), text, flags=re.MULTILINE)


def copy(folder: Path) -> None:
    """Write the copy into a folder, whose old content goes."""
    shutil.rmtree(folder, ignore_errors=True)
    changes = {"tests": with_other_imports, "examples": with_other_imports, "lightning_tricks": _with_other_examples}
    for name, change in changes.items():
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        for file in (folder / name).rglob("*.py"):
            file.write_text(change(file.read_text(encoding="utf-8")), encoding="utf-8")
    shutil.copytree(ROOT / "docs", folder / "docs")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder / name)


if __name__ == "__main__":
    copy(Path(sys.argv[1]))
