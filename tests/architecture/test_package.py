"""The shape of the house: cheap imports, honest exports, and import rules that a broken package does not pass."""

import ast
import compileall
import importlib
import inspect
import json
import os
import pkgutil
import re
import runpy
import shutil
import subprocess
import sys
import zipfile
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path

import pytest

import lightning_tricks

_PACKAGE = Path(lightning_tricks.__file__).parent
_ROOMS = [module.name for module in pkgutil.iter_modules([str(_PACKAGE)]) if module.ispkg and module.name[0] != "_"]
_HEAVY = ("torch", "lightning", "pytorch_lightning", "numpy", "rich", "sklearn")


def _loaded_by(statement):
    code = f"import sys; {statement}; print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    return set(output.split())


def test_importing_the_package_and_its_rooms_loads_nothing():
    loaded = _loaded_by("; ".join(f"import lightning_tricks.{room}" for room in _ROOMS))
    assert not loaded & set(_HEAVY)


@pytest.fixture(scope="module")
def loaded_by_cores():
    """Room -> the modules of its core, and what is loaded when they are; each in a fork of one process with torch."""
    cores = {}
    for room in _ROOMS:
        core = [_PACKAGE / room / "functional.py", *(_PACKAGE / room / "core").rglob("*.py")]
        names = [".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts) for path in core if path.exists()]
        cores[room] = [name.removesuffix(".__init__") for name in names]
    run = subprocess.run([sys.executable, "-c", _LOADS, json.dumps(cores)], capture_output=True, text=True, check=True)
    loaded = {room: set(modules) for room, modules in map(json.loads, run.stdout.splitlines())}
    return {room: (names, loaded[room]) for room, names in cores.items()}


_LOADS = """
import importlib, json, os, sys
import torch
assert not {"lightning", "pytorch_lightning", "lightning_tricks"} & {*sys.modules}
for room, names in json.loads(sys.argv[1]).items():
    if os.fork() == 0:
        for name in names:
            importlib.import_module(name)
        print(json.dumps([room, [*sys.modules]]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


@pytest.mark.parametrize("room", _ROOMS)
def test_the_core_loads_no_lightning(room, loaded_by_cores):
    names, loaded = loaded_by_cores[room]
    assert names
    assert set(names) <= loaded
    assert not loaded & {"lightning", "lightning_fabric", "pytorch_lightning"}


@pytest.mark.parametrize("name", ["lightning_tricks", *(f"lightning_tricks.{room}" for room in _ROOMS)])
def test_public_names_are_there_and_typed(name):
    package = importlib.import_module(name)
    assert package.__doc__
    assert dir(package) == package.__all__
    for public in package.__all__:
        assert inspect.getdoc(getattr(package, public)), f"{public} has no docstring"
        assert public not in _ROOMS, "a lazy import would return the package"
    read_by_type_checkers = next(
        node for node in ast.parse(Path(package.__file__).read_text()).body if isinstance(node, ast.If)
    )
    imports = [statement for statement in read_by_type_checkers.body if isinstance(statement, ast.ImportFrom)]
    aliases = [alias for statement in imports for alias in statement.names if alias.name != "__version__"]
    assert sorted(alias.name for alias in aliases) == package.__all__
    assert all(alias.name == alias.asname for alias in aliases), "`import x as x` re-exports"
    with pytest.raises(AttributeError, match=f"{name}.* has no attribute 'nothing'; it has "):
        package.nothing  # noqa: B018


@pytest.mark.parametrize("room", _ROOMS)
def test_no_function_bears_the_name_of_its_room(room):
    """Nor a file, private or not: whoever reads `seeding` has to know what is meant."""
    paths = [*(_PACKAGE / room).rglob("*.py")]
    functions = (node for path in paths for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
    names = {node.name.strip("_") for node in functions if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    assert room not in names | {path.stem for path in paths}


def test_a_name_of_a_room_is_pointed_out():
    assert len(lightning_tricks.__all__) <= 45
    words = "'VotingClassifier'; write `from lightning_tricks.ensembles import VotingClassifier`"
    with pytest.raises(AttributeError, match=words):
        lightning_tricks.VotingClassifier  # noqa: B018
    with pytest.raises(ImportError, match=words):
        from lightning_tricks import VotingClassifier  # noqa: F401
    assert not hasattr(lightning_tricks, "AGC")
    with pytest.raises(ImportError, match="cannot import name 'Nothing'"):
        from lightning_tricks import Nothing  # noqa: F401


def test_a_program_without_sources_knows_the_names(tmp_path):
    """As PyInstaller makes it: a zip of bytecode."""
    sources = shutil.copytree(_PACKAGE, tmp_path / "sources" / "lightning_tricks")
    compileall.compile_dir(sources, quiet=1, legacy=True, optimize=2)
    with zipfile.ZipFile(tmp_path / "frozen.zip", "w") as frozen:
        for path in sources.rglob("*.pyc"):
            if path.parent.name != "__pycache__":
                frozen.write(path, path.relative_to(sources.parent))
    code = "import lightning_tricks as t; print(t.__file__, [t.count_flops.__module__, t.__version__, *t.__all__])"
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "frozen.zip")}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert run.stdout.startswith(f"{tmp_path / 'frozen.zip'}")
    names = ["lightning_tricks.flops.core.model_flops", lightning_tricks.__version__, *lightning_tricks.__all__]
    assert run.stdout.endswith(f"{names}\n")


def test_the_version_is_that_of_the_project(capsys, monkeypatch):
    stated = re.search(r'^version = "(.+)"$', (_PACKAGE.parent / "pyproject.toml").read_text(), re.MULTILINE)[1]
    assert lightning_tricks.__version__ == stated
    monkeypatch.setattr(sys, "argv", ["python -m lightning_tricks", "--version"])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_module("lightning_tricks", run_name="__main__")
    assert capsys.readouterr().out == f"lightning-tricks {stated}\n"


def test_a_source_that_is_not_installed_has_no_version(monkeypatch):
    def not_installed(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", not_installed)
    assert runpy.run_path(str(_PACKAGE / "_version.py"))["__version__"] == "0+unknown"


def _lint_imports(root):
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as run; run()", "--no-cache"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


@pytest.fixture
def house(tmp_path):
    """A copy of the package, to be broken."""
    shutil.copytree(_PACKAGE, tmp_path / "lightning_tricks", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(_PACKAGE.parent / "pyproject.toml", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("file", "statement"),
    [
        ("new_room/functional.py", "import lightning"),
        ("new_room/callback.py", "import lightning_tricks.seeding.functional"),
        ("seeding/functional.py", "import lightning_tricks.seeding.callback"),
        ("seeding/callback.py", "import lightning_tricks.gradient_clipping.core.clipping"),
        ("gradient_clipping/callback.py", "import lightning_tricks.mixin"),
        ("_callback.py", "import lightning_tricks.seeding.functional"),
        ("_shared/checks.py", "import lightning_tricks.seeding.functional"),
        ("mixin.py", "import lightning_tricks.cli"),
    ],
)
@pytest.mark.sampled(3)  # `make check` sees that the rules are kept
def test_a_broken_import_rule_is_caught(house, file, statement):
    path = house / "lightning_tricks" / file
    path.parent.mkdir(parents=True, exist_ok=True)
    for folder in path.relative_to(house).parents[:-1]:
        (house / folder / "__init__.py").touch()
    with path.open("a") as source:
        source.write(f"\n{statement}\n")
    run = _lint_imports(house)
    assert run.returncode == 1
    assert "BROKEN" in run.stdout


def _imports_of(path):
    """Return the names of what a file imports anywhere; of an `__init__.py`, without its table of public names."""
    tree = ast.parse(path.read_text())
    if path.name == "__init__.py":
        tree.body = [node for node in tree.body if not isinstance(node, ast.If)]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def test_no_files_import_each_other_in_a_circle():
    """Imports for annotations alone and those within functions count as well: who reads one file has to read the other.

    What an `__init__.py` names under `if TYPE_CHECKING:` is its table of public names, which nothing in the package
    needs to understand it, and does not count; nor does that an import of a file runs the `__init__.py` above it.
    """
    paths = {".".join(path.relative_to(_PACKAGE.parent).with_suffix("").parts): path for path in _PACKAGE.rglob("*.py")}
    paths = {name.removesuffix(".__init__"): path for name, path in paths.items()}
    uses = {name: {*_imports_of(path)} & paths.keys() for name, path in paths.items()}
    assert uses["lightning_tricks.auto_resume.callback"]
    while free := {name for name, used in uses.items() if not used}:  # what is left uses only what is left
        uses = {name: used - free for name, used in uses.items() if name not in free}
    assert not uses, "these are in circles, or import one"


@pytest.mark.thorough
def test_a_room_that_is_broken_takes_no_other_along():
    """But those that use it: the mixin these three, and rooms what `pyproject.toml` lists."""
    run = subprocess.run(
        [sys.executable, "-c", _BREAKS, json.dumps(_ROOMS)], capture_output=True, text=True, check=True
    )
    project = (_PACKAGE.parent / "pyproject.toml").read_text()
    listed = re.findall(r'"lightning_tricks\.([a-z_]+)\.\S+ -> lightning_tricks\.([a-z]\w+)\.', project)
    uses = {room: {used for user, used in listed if user == room} for room in _ROOMS}
    uses["tricks"] = uses["mixin"] = {"checkpoint_remapping", "gradient_clipping", "lr_schedules"}
    for _ in _ROOMS:  # and what these use
        uses = {user: used.union(*map(uses.__getitem__, used)) for user, used in uses.items()}
    said = [json.loads(line) for line in run.stdout.splitlines() if line.startswith("[")]
    assert [room for room, *_ in said] == _ROOMS
    for room, failed, errors in said:
        assert room in failed
        assert {other for other in failed if other != room} <= {other for other in uses if room in uses[other]}, room
        assert all(f"lightning_tricks.{room}." in error for error in errors)


_BREAKS = """
import importlib, json, os, sys
import torch, torchmetrics
import lightning.pytorch
import lightning_tricks

class Breaks:
    def __init__(self, room):
        self.room = room

    def find_spec(self, name, path=None, target=None):
        if name.startswith(f"lightning_tricks.{self.room}.") and not name.endswith(".commands"):
            raise ImportError(f"{name} is broken")

for name in lightning_tricks.__all__:  # what others import is imported once
    getattr(lightning_tricks, name)
for name in [name for name in sys.modules if name.startswith("lightning_tricks")]:
    del sys.modules[name]
import lightning_tricks, lightning_tricks.cli
for room in json.loads(sys.argv[1]):
    if os.fork() == 0:
        sys.meta_path.insert(0, Breaks(room))
        failed, errors = set(), set()
        for other in (*map("lightning_tricks.{}".format, json.loads(sys.argv[1])), "lightning_tricks"):
            package = importlib.import_module(other)
            for name in package.__all__ if other != "lightning_tricks" else ("Tricks", "TricksMixin"):
                try:
                    getattr(package, name)
                except ImportError as error:
                    failed.add({"Tricks": "tricks", "TricksMixin": "mixin"}.get(name, other.rpartition(".")[2]))
                    errors.add(str(error))
        lightning_tricks.cli.main([])  # its help
        print()
        print(json.dumps([room, sorted(failed), sorted(errors)]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_make_test_runs_each_folder_of_tests_once():
    root = Path(__file__).parents[2]
    variables = dict(re.findall(r"^([\w-]+) := (.+)$", (root / "Makefile").read_text(), re.MULTILINE))
    patterns = [pattern for part in variables["PARTS"].split() for pattern in variables[part].split()]
    for folder in {path.parent for path in (root / "tests").glob("*/test_*.py")}:
        name = folder.relative_to(root).as_posix()
        assert sum(fnmatchcase(name, pattern) for pattern in patterns) == 1, name
