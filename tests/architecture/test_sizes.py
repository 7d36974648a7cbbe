"""The house stays small by itself: what each room may have stands in a table, and raising a number is a decision."""

import ast
import json

import pytest

from tests.architecture import sizes

_COMMAND = "python -m tests.architecture.sizes"


@pytest.fixture(scope="module")
def now():
    return sizes.measure()


def test_no_room_is_larger_than_it_may_be(now):
    more = sizes.risen({name: count for name, count in now.items() if name not in sizes.MAY_ONLY_FALL}, sizes.allowed())
    found = "\n".join(f"{name}: {count:,}, and {most:,} are allowed" for name, (most, count) in more.items())
    assert not more, (
        f"{found}\nDelete as much: what is said twice, what one place alone uses and its name does not explain, a "
        "promise that costs more lines than it has users. If it is worth its lines, raise the number in a commit of "
        f"its own, whose message says what the reader gets: {_COMMAND} --raise {' '.join(more)}"
    )


@pytest.mark.parametrize("name", sizes.MAY_ONLY_FALL)
def test_tests_reach_for_what_is_private_less_and_less(now, name):
    most = sizes.allowed()[name]
    assert now[name] <= most, (
        f"{name}: {now[name]}, and {most} are allowed, a number that never rises. Test by what is public: import from "
        "the room itself, and look at what a user sees."
    )
    assert now[name] == most, f"{name} has fallen from {most} to {now[name]}. So that it stays there: {_COMMAND}"


def test_what_is_counted():
    docstrings = '"""One."""\n\n# why\nx = """a\n\nb"""  # 3 lines\n\n\ndef f():\n    """Two.\n\n    Three.\n    """\n'
    assert sizes.code_lines(f"{docstrings}    return (\n        1\n    )\n") == 7
    touches = "a._b; self._b; cls._b; super()._b; a.b._c = 1; a.__dict__; a._b._c"
    assert sizes.private_touches(ast.parse(touches)) == 4
    imports = """
import lightning_tricks.seeding, lightning_tricks.seeding.callback
from lightning_tricks import AutoResume, seeding
from lightning_tricks.seeding import SeedEverything, functional
from lightning_tricks.auto_resume.core.signals import EARLY_SIGNALS, StopRequest
from lightning_tricks._shared.text import counted
"""
    inner = ["seeding.callback", "seeding.functional", "auto_resume.core.signals"]
    assert [*sizes.inner_imports(ast.parse(imports))] == [f"lightning_tricks.{name}" for name in inner]


def test_a_number_rises_only_by_name(monkeypatch, tmp_path, capsys):
    table, now = tmp_path / "sizes.json", {"lines": 5, "private": 2, "room": 5}
    monkeypatch.setattr(sizes, "TABLE", table)
    monkeypatch.setattr(sizes, "measure", lambda: now)
    before = {"lines": 9, "private": 2, "room": 4, "gone": 3}
    table.write_text(json.dumps(before))
    assert sizes.main([]) == 1
    assert capsys.readouterr().err.startswith("room: 5, and 4 are allowed\n")
    assert sizes.allowed() == before
    assert sizes.main(["--raise", "room"]) == 0
    assert sizes.allowed() == now
    now["private"] = 3
    assert sizes.main(["--raise", "private"]) == 1, "never"
    now["private"] = 1
    assert sizes.main([]) == 0
    assert sizes.allowed()["private"] == 1
