"""The state of a folder's git checkout, by the `git` command."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from lightning_tricks.run_report.core.record import GitState

_LONGEST_DIFF = 64_000  # characters
_MOST_FILES = 200
_SECONDS = 10
# no program that the checkout's configuration names is run
_SAFELY = (
    "-c",
    "core.fsmonitor=false",
    "-c",
    "core.pager=cat",
    "-c",
    "diff.external=",
    "-c",
    "core.hooksPath=/dev/null",
)


def read_git_state(folder: Path) -> GitState | None:
    """Return the commit, the changed files and the differences; None where there is no checkout or no `git`.

    It changes nothing, not even git's own files.
    """
    commit = _git(folder, "rev-parse", "--verify", "HEAD")
    if not commit:
        return None
    branch = _git(folder, "symbolic-ref", "--short", "-q", "HEAD") or ""
    changed = (_git(folder, "status", "--short", "--no-renames", "--ignore-submodules") or "").splitlines()
    diff = _git(folder, "diff", "HEAD", "--no-ext-diff", "--no-textconv", "--no-color", "--ignore-submodules") or ""
    return GitState(
        commit.strip(),
        branch.strip(),
        [name[:500] for name in changed[:_MOST_FILES]],
        diff[:_LONGEST_DIFF],
        len(diff) > _LONGEST_DIFF or len(changed) > _MOST_FILES,
    )


def _git(folder: Path, *arguments: str) -> str | None:
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(  # noqa: S603
            ["git", *_SAFELY, *arguments],  # noqa: S607
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.decode("utf-8", "replace") if done.returncode == 0 else None
