"""Write the share of lines and branches that tests reach, by folder of the package: `make coverage` runs this."""

from __future__ import annotations

import io
import platform
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from coverage import Coverage
    from coverage.results import Numbers


@dataclass
class Row:
    """The figures of a folder."""

    lines: int = 0
    reached_lines: int = 0
    branches: int = 0
    reached_branches: int = 0
    lowest: tuple[float, str] = (101.0, "")

    def add(self, numbers: Numbers, name: str) -> None:
        self.lines += numbers.n_statements
        self.reached_lines += numbers.n_executed
        self.branches += numbers.n_branches
        self.reached_branches += numbers.n_executed_branches
        self.lowest = min(self.lowest, (numbers.pc_covered, name))

    def text(self, name: str) -> str:
        share = 100 * (self.reached_lines + self.reached_branches) / max(self.lines + self.branches, 1)
        branches = 100 * self.reached_branches / max(self.branches, 1)
        lowest = "" if self.lowest[0] == 100 else f"`{self.lowest[1]}` {self.lowest[0]:.0f} %"
        return f"| {name} | {self.lines} | {self.branches} | {branches:.1f} % | {share:.1f} % | {lowest} |"


def table(measured: Coverage) -> str:
    """The table of what was measured."""
    package, rows, total = Path(__file__).parents[2] / "lightning_tricks", defaultdict(Row), Row()
    measured.report(file=io.StringIO())  # reads the data of files that no test imports as well
    for file in sorted(package.rglob("*.py")):
        numbers = measured._analyze(str(file)).numbers
        path = file.relative_to(package)
        folder = path.parts[0] if len(path.parts) > 1 else "(package)"
        for row in (rows[folder], total):
            row.add(numbers, path.as_posix())
    lines = [rows[name].text(name) for name in sorted(rows)]
    return "\n".join(
        [
            "# What the tests reach",
            "",
            f"Written by `make coverage` on {platform.system()}, Python {platform.python_version()}, without a GPU. "
            "Programs that tests start and forked ranks count; processes that were killed do not.",
            "",
            "| folder | statements | branches | branches reached | statements and branches reached | lowest file |",
            "| --- | --- | --- | --- | --- | --- |",
            *lines,
            total.text("**total**"),
            "",
        ]
    )


if __name__ == "__main__":
    from coverage import Coverage

    data = Coverage()
    data.load()
    Path(sys.argv[1]).write_text(table(data), encoding="utf-8")
