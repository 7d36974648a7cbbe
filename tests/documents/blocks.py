"""The blocks of code in README.md and in the pages of docs/.

A block of `python` is a program: it runs in a process and a folder of its own, and what it prints ends with the block
of `text` that follows. `py` is a fragment, such as the code that everybody copies: it is shown, not run. `console`
holds commands after `$ `, `bash` a script, `yaml` a configuration for `lightning-tricks fit`.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

_ROOT = Path(__file__).parents[2]
README = _ROOT / "README.md"
PAGES = [README, *sorted((_ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"python", "py", "console", "bash", "yaml", "powershell", "ini"}

# A block may be a part of a list, and what it prints follows it
_BLOCK = re.compile(r"^ *```(\w+)[^\n]*\n(.*?)^ *```\n(?:\n```text\n(.*?)^```)?", re.MULTILINE | re.DOTALL)

_RUN_EACH = """
import json, os, sys, traceback
import lightning.pytorch  # once for all
for code, folder in json.loads(sys.stdin.read()):
    if os.fork() == 0:
        os.chdir(folder)
        for number, name in ((1, "output"), (2, "error")):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
        status = 1
        try:
            exec(compile(code, "<string>", "exec"), {"__name__": "__main__"})
            status = 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        os._exit(status)
    with open(os.path.join(folder, "status"), "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.wait()[1])))
"""


class Block(NamedTuple):
    """A block of code on a page, and what it prints if the page says so."""

    page: str  # its path from the root of the project
    line: int
    language: str
    code: str
    output: str | None

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"

    @property
    def commands(self) -> list[str]:
        return [line.strip().removeprefix("$ ") for line in self.code.splitlines()]


def blocks_of(*pages: Path, language: str | None = None) -> list[Block]:
    """Return the blocks of pages, those that show only what was printed aside."""
    found = []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        for match in _BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(Block(page.relative_to(_ROOT).as_posix(), line, *match.groups()))
    return [block for block in found if block.language != "text" and language in (None, block.language)]


def run_each(codes: Sequence[str], folder: Path) -> dict[str, Path]:
    """Run programs, each in a process that has imported Lightning; return the folder of each with what it printed."""
    folders = {code: folder / str(number) for number, code in enumerate(codes)}
    for path in folders.values():
        path.mkdir(parents=True)
    environment = {**os.environ, "LIGHTNING_TRICKS_LOCK_DIR": str(folder)}
    programs = json.dumps([(code, str(path)) for code, path in folders.items()])
    command = [sys.executable, "-W", "ignore", "-c", _RUN_EACH]
    subprocess.run(command, input=programs, text=True, env=environment, check=True)
    return folders


def our_arguments(command: str) -> Iterator[list[str]]:
    """Yield what follows each `lightning-tricks` in a command."""
    for part in re.findall(r"lightning-tricks ([^)|&#]*)", command):
        yield shlex.split(part)
