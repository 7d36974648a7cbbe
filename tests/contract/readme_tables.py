"""The generated tables of README.md; `python -m tests.contract.readme_tables` (`make fix`) writes them."""

import inspect
import re
import textwrap

import lightning_tricks
from tests.contract.cases import CASES
from tests.contract.lab import SETTINGS
from tests.documents.blocks import README

_MARKS = {"tested": "✓", "refuses": "refuses", "untested": "untested"}


def tricks_table() -> str:
    """One line for each public name: the callbacks first, with the first line of their docstrings."""
    names = [*CASES, *(name for name in lightning_tricks.__all__ if name not in CASES)]
    rows = ["| Name | What it does |", "| --- | --- |"]
    for name in names:
        rows.append(f"| `{name}` | {inspect.getdoc(getattr(lightning_tricks, name)).splitlines()[0]} |")
    return "\n".join(rows)


def support_table() -> str:
    """Trick x setting, from the contract's cases."""
    columns = [*SETTINGS, "resume", "YAML"]
    rows = ["| | " + " | ".join(columns) + " |", "| --- |" + " :-: |" * len(columns)]
    for name, case in CASES.items():
        marks = [_MARKS[case.support(column)] for column in columns]
        rows.append(f"| `{name}` | " + " | ".join(marks) + " |")
    meanings = [f"*{setting.name}*: {setting.meaning}" for setting in SETTINGS.values()]
    meanings += ["*resume*: from a checkpoint at an epoch's end", "*YAML*: built by LightningCLI and saved again"]
    legend = (
        "✓ a test trains there and compares the result; refuses: says so, with the remedy, before training starts; "
        f"untested: nobody has run it there yet. {'; '.join(meanings)}."
    )
    return "\n".join([*rows, "", *textwrap.wrap(legend, 119, break_on_hyphens=False)])


def rewritten(text: str) -> str:
    """README.md's text with its tables as they should be."""
    for name, table in (("tricks", tricks_table()), ("support", support_table())):
        pattern = rf"(<!-- {name}: .*? -->\n).*?(<!-- end of {name} -->)"
        text, count = re.subn(pattern, lambda m, t=table: f"{m[1]}{t}\n{m[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"README.md needs one table between the marks of {name!r}, it has {count}")
    return text


if __name__ == "__main__":
    README.write_text(rewritten(README.read_text()))
