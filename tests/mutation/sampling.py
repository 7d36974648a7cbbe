"""Small faults in the package: by cosmic-ray's operators and one that leaves statements out; and a sample of a seed."""

from __future__ import annotations

import ast
import difflib
import random
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider
from parso.python.tree import Keyword

PACKAGE = Path(__file__).parents[2] / "lightning_tricks"
CORES = (
    "_shared/dry_run/*.py",
    "_shared/host_copies.py",
    "_shared/rng.py",
    "_shared/mean_loss.py",
    "*/functional.py",
    "*/core/**/*.py",
)
# Beside the cores: callbacks, runners, trackers and modules; and what of a core only whole runs meet
SHELLS = ("[a-z]*/*.py", "_lightning_compat/*.py")
_MET_BY_RUNS = re.compile(r"auto_resume/core/(attributes|data|signals)")
_LEFT_OUT = re.compile(r"/(download|plot\w*|autograd_graph|errors|testing|__init__)\.py")  # what shows or fetches


def _files(patterns: tuple[str, ...]) -> set[str]:
    found = (path.relative_to(PACKAGE.parent).as_posix() for pattern in patterns for path in PACKAGE.glob(pattern))
    return {path for path in found if not _LEFT_OUT.search(path)}


_IN_CORES = _files(CORES)
_IN_SHELLS = {path for path in _IN_CORES if _MET_BY_RUNS.search(path)} | (_files(SHELLS) - _IN_CORES)
PARTS = {"cores": tuple(sorted(_IN_CORES - _IN_SHELLS)), "shells": tuple(sorted(_IN_SHELLS))}
FILES = PARTS["cores"] + PARTS["shells"]

ARITHMETIC = {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod"}
BITS = {"BitOr", "BitAnd", "BitXor", "LShift", "RShift"}


@dataclass(frozen=True)
class Mutant:
    """One fault in the body of a function: the file, what it holds instead, and where.

    The function is the outermost one, or a method; what is defined in it is a part of it.
    """

    file: str
    code: str
    first_line: int
    name: str
    before: str
    after: str

    @property
    def room(self) -> str:
        """The folder that holds the file."""
        return Path(self.file).parts[1]

    @property
    def part(self) -> str:
        """Whether it is in the cores or the shells."""
        return next(part for part, files in PARTS.items() if self.file in files)

    @property
    def key(self) -> str:
        """What names the fault in the results, also when lines have moved."""
        return f"`{self.file.removeprefix('lightning_tricks/')}` `{self.before}` → `{self.after}`"


class StatementLeftOut(Operator):
    """Leave out a call, an assignment to something that lasts, or an augmented assignment."""

    def mutation_positions(self, node):
        """Yield the statement's place."""
        if getattr(node.parent, "type", None) != "simple_stmt" or node.type not in ("atom_expr", "expr_stmt"):
            return
        lasts = node.type == "atom_expr" or node.children[0].type == "atom_expr" or node.children[1].type == "operator"
        plain = node.type == "expr_stmt" and node.children[0].type == "name" and node.children[1].type == "operator"
        if lasts and not (plain and node.children[1].value == "="):
            yield node.start_pos, node.end_pos

    def mutate(self, node, index):
        """Put `pass` in its place."""
        return Keyword("pass", node.start_pos, node.get_first_leaf().prefix)

    @classmethod
    def examples(cls):
        """Give none: the sample compiles what it takes."""
        return ()


def _is_worth_it(name: str) -> bool:
    """A plus becomes another sum or product, never a shift, and `==` never `is`: types would tell of those at once."""
    if "BinaryOperator_" in name:
        return set(name.split("_")[1:]) <= ARITHMETIC or set(name.split("_")[1:]) <= BITS
    return "ComparisonOperator_" not in name or ("_Is" in name) == name.endswith(("_Is", "_IsNot"))


@cache
def operators() -> dict[str, Operator]:
    """The operators that need no arguments."""
    found = OperatorProvider()
    made = {name: found[name]() for name in found if not found[name].arguments() and _is_worth_it(name)}
    return {**made, "StatementLeftOut": StatementLeftOut()}


def family(operator: str) -> str:
    """Which operators do the same to the same place: `Add_Sub` and `Add_Mul` to a plus."""
    return operator.rsplit("_", 2)[0] if operator.startswith("Replace") and "Operator_" in operator else operator


def functions_by_line(source: str) -> dict[int, tuple[int, str]]:
    """For each line in a function's body the first line and the name of the function."""
    found: dict[int, tuple[int, str]] = {}
    scopes: list[ast.AST] = [ast.parse(source)]
    while scopes:
        for node in ast.iter_child_nodes(scopes.pop()):
            if isinstance(node, ast.FunctionDef):
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                lines = range(node.body[0].lineno, (node.end_lineno or first) + 1)
                found.update(dict.fromkeys(lines, (first, node.name)))
            elif isinstance(node, ast.ClassDef | ast.If):
                scopes.append(node)
    return found


def annotations(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Where annotations start and end, none of which is evaluated."""
    found = []
    for node in ast.walk(ast.parse(source)):
        for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
            if isinstance(part, ast.expr):
                found.append(((part.lineno, part.col_offset), (part.end_lineno or 0, part.end_col_offset or 0)))
    return found


@cache
def places(source: str) -> dict[tuple[object, ...], list[tuple[str, int]]]:
    """Every place of a file that can be changed, with the operators that do so."""
    nodes, found = list(ast_nodes(get_ast(source))), defaultdict(list)
    skipped, bodies = annotations(source), functions_by_line(source)
    for name, operator in operators().items():
        positions = (place for node in nodes for place in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(positions):
            if start[0] in bodies and not any(first <= start and end <= last for first, last in skipped):
                found[start, end, family(name)].append((name, occurrence))
    return found


def mutant(file: str, source: str, name: str, occurrence: int) -> Mutant | None:
    """Change one place; None where that changes nothing or is no Python."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", SyntaxWarning)  # which would fail any test
            code = mutate_code(source, operators()[name], occurrence)
            if code is None or ast.dump(ast.parse(code)) == ast.dump(ast.parse(source)):
                return None
            compile(code, file, "exec")
    except (AttributeError, SyntaxError, ValueError):  # cosmic-ray cannot change `except module.Error`
        return None
    old, new, bodies = source.splitlines(), code.splitlines(), functions_by_line(source)
    blocks = [block for block in difflib.SequenceMatcher(None, old, new).get_opcodes() if block[0] != "equal"]
    before = " ".join(" ".join(line.split()) for block in blocks for line in old[block[1] : block[2]])
    after = " ".join(" ".join(line.split()) for block in blocks for line in new[block[3] : block[4]])
    return Mutant(file, code, *bodies[blocks[0][1] + 1], before, after)


def chosen_of(file: str, source: str, count: int, chance: random.Random) -> Iterator[Mutant]:
    """Draw places, and of each one change."""
    order = list(places(source).values())
    chance.shuffle(order)
    for options in order:
        if count == 0:
            return
        made = mutant(file, source, *chance.choice(options))
        if made is not None:
            count -= 1
            yield made


def sample(root: Path, count: int, seed: int) -> list[Mutant]:
    """Draw `count` faults or a few more of each part, from each file as its size asks for, and two at least."""
    found: dict[str, Mutant] = {}
    for files in PARTS.values():
        sources: Mapping[str, str] = {file: (root / file).read_text() for file in files}
        sizes = {file: len(places(source)) for file, source in sources.items()}
        for file, source in sources.items():
            share = max(2, round(count * sizes[file] / sum(sizes.values())))
            made = chosen_of(file, source, share, random.Random(f"{seed} {file}"))
            found.update((mutant.key, mutant) for mutant in made)
    return list(found.values())


def few(mutants: list[Mutant], most: int, seed: int) -> list[Mutant]:
    """Draw `most` of each part of each room."""
    groups = defaultdict(list)
    for mutant in mutants:
        groups[mutant.room, mutant.part].append(mutant)
    chance = random.Random(seed)
    return [mutant for group in groups.values() for mutant in chance.sample(group, min(most, len(group)))]
