"""How large the package and its tests are, and how often tests reach into what is not public.

`sizes.json` holds the largest numbers that are allowed. `python -m tests.architecture.sizes` writes those that have
fallen; one that has risen it writes only if it is named: `--raise auto_resume tests`.

A line of code is one that is neither blank, a comment nor part of a docstring; of templates and style sheets, one that
is not blank. A room is a folder or a file of `lightning_tricks/`. Beside the rooms stand

- `lines` and `files` of the whole package, and `tests`: lines of tests that are not blank.
- `private`: how often tests read or set `x._name`, where x is neither `self`, `cls` nor `super()`.
- `inner`: how many imports in tests name a module inside of a room, `lightning_tricks.room.module`, which its
  `__init__.py` hides. What begins with an underscore, such as `_shared`, is no room.
"""

from __future__ import annotations

import argparse
import ast
import io
import json
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
TABLE = Path(__file__).with_suffix(".json")
MAY_ONLY_FALL = ("private", "inner")
_PACKAGE, _TESTS = ROOT / "lightning_tricks", ROOT / "tests"
_OTHERS = (".css", ".html", ".j2", ".jinja", ".js", ".pyi", ".svg")
_LAYOUT = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)


def code_lines(source: str) -> int:
    """How many lines of a module are code."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _LAYOUT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(getattr(first.value, "value", None), str):
                lines -= set(range(first.lineno, first.end_lineno + 1))
    return len(lines)


def private_touches(tree: ast.AST) -> int:
    """How often a test reaches for an attribute that belongs to somebody else."""
    found = (node for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    return sum(
        node.attr[0] == "_"
        and not node.attr.startswith("__")
        and ast.unparse(node.value) not in ("self", "cls", "super()")
        for node in found
    )


def inner_imports(tree: ast.AST) -> Iterator[str]:
    """The modules inside of rooms that a test imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name for name in inside if _is_module(name)] or [node.module]
        else:
            continue
        for name in names:
            package, *inner = name.split(".")
            if package == "lightning_tricks" and len(inner) > 1 and inner[0][0] != "_" and _is_module(name):
                yield name


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def measure() -> dict[str, int]:
    """All numbers of now."""
    rooms, found = Counter[str](), Counter[str](dict.fromkeys(("lines", "files", "tests", *MAY_ONLY_FALL), 0))
    for path in _PACKAGE.rglob("*"):
        if path.suffix == ".py" or path.suffix in _OTHERS:
            text = path.read_text(encoding="utf-8")
            lines = code_lines(text) if path.suffix == ".py" else _not_blank(text)
            rooms[path.relative_to(_PACKAGE).parts[0]] += lines
            found.update(lines=lines, files=1)
    for path in _TESTS.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        found.update(tests=_not_blank(text), private=private_touches(tree), inner=len([*inner_imports(tree)]))
    return {**found, **dict(sorted(rooms.items()))}


def _not_blank(text: str) -> int:
    return sum(bool(line.strip()) for line in text.splitlines())


def allowed() -> dict[str, int]:
    """The numbers of the table."""
    return json.loads(TABLE.read_text(encoding="utf-8"))


def risen(now: dict[str, int], largest: dict[str, int]) -> dict[str, tuple[int, int]]:
    """What has more than it may have, or is not in the table: name -> what it may have and what it has."""
    return {name: (largest.get(name, 0), number) for name, number in now.items() if number > largest.get(name, 0)}


def main(argv: list[str] | None = None) -> int:
    """Write the table; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.architecture.sizes", description=__doc__.split("\n")[0])
    words = "names whose numbers may rise, in a commit of its own that says what the reader gets"
    parser.add_argument("--raise", nargs="+", default=[], metavar="NAME", dest="raised", help=words)
    arguments = parser.parse_args(argv)
    now, largest = measure(), allowed() if TABLE.exists() else {}
    more = risen(now, largest)
    refused = {name for name in more if name not in arguments.raised or (name in MAY_ONLY_FALL and largest)}
    if refused:
        rows = (f"{name}: {more[name][1]:,}, and {more[name][0]:,} are allowed\n" for name in sorted(refused))
        sys.stderr.write("".join(rows) + "Nothing was written: delete as much, or name them in --raise.\n")
        return 1
    TABLE.write_text(json.dumps(now, indent=4) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
