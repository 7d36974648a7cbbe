"""Which private symbols of Lightning the package uses: `private_symbols.txt` lists them, with the files that do.

`python -m tests.lightning_compat.private_symbols` writes the list anew; `--of FOLDER ...` prints which of them the
sources of other Lightnings lack, unpacked from their wheels into folders named by version.
"""

from __future__ import annotations

import ast
import multiprocessing
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

import lightning
import torch
import torchmetrics

PACKAGE = Path(__file__).parents[2] / "lightning_tricks"
LISTED = Path(__file__).with_suffix(".txt")
_PRIVATE = re.compile(r"_[A-Za-z]\w+")


def names_in_source(root: Path, folders: Iterable[str]) -> set[str]:
    files = (file for folder in folders for file in (root / folder).rglob("*.py"))
    return {name for file in files for name in re.findall(r"\b_[A-Za-z]\w+\b", file.read_text(encoding="utf-8"))}


def _used(tree: ast.AST) -> Iterator[str]:
    """The private names that are read, named by text or keyword, or imported."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.alias):
            yield node.name


def _defined(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            yield node.attr


def used() -> dict[str, list[str]]:
    """Each private symbol of Lightning, and the files that use it; not one that others or the package name too."""
    trees = {
        file.relative_to(PACKAGE).as_posix(): ast.parse(file.read_text(encoding="utf-8"))
        for file in sorted(PACKAGE.rglob("*.py"))
    }
    others = names_in_source(Path(torch.__file__).parent, ("nn", "optim", "utils/data", "_dynamo"))
    others |= names_in_source(Path(torchmetrics.__file__).parent, ["."])
    others |= names_in_source(Path(multiprocessing.__file__).parent, ["."])
    others |= {name for tree in trees.values() for name in _defined(tree)}
    symbols = names_in_source(Path(lightning.__file__).parent, ("pytorch", "fabric")) - others
    places = defaultdict(list)
    for file, tree in trees.items():
        for name in sorted({*_used(tree)} & symbols):
            places[name].append(file)
    return dict(sorted(places.items()))


def text() -> str:
    return "".join(f"{name}: {', '.join(files)}\n" for name, files in used().items())


if __name__ == "__main__":
    if sys.argv[1:2] == ["--of"]:
        for folder in map(Path, sys.argv[2:]):
            missing = used().keys() - names_in_source(folder / "lightning", ("pytorch", "fabric"))
            sys.stdout.write(f"{folder.name}: {', '.join(sorted(missing)) or 'all are there'}\n")
    else:
        LISTED.write_text(text(), encoding="utf-8")
