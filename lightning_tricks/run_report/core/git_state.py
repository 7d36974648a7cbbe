"""The state of a folder's git checkout, by the `git` command."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from lightning_tricks.run_report.core.record import GitState
from lightning_tricks.run_report.core.secret_values import hide_in_text

_LONGEST_DIFF = 64_000  # characters
_MOST_FILES = 200
_SECONDS = 10
_QUIET = {"GIT_OPTIONAL_LOCKS": "0", "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
# All that is taken over from the configuration: how files are compared, and which are listed
_COMPARING = (
    *("core.autocrlf", "core.eol", "core.filemode", "core.symlinks", "core.ignorecase", "core.precomposeunicode"),
    *("core.checkstat", "core.trustctime", "status.showuntrackedfiles"),
)
_USER_FILES = {"core.excludesfile": "ignore", "core.attributesfile": "attributes"}  # with their default names
_EVERYTHING = "."  # stands for the whole checkout where git gives no answer


def read_git_state(folder: Path) -> GitState | None:
    """Return the commit, the changed files and the differences; None where there is no checkout or no `git`.

    It changes nothing, not even git's own files, and no program but git itself runs, whatever the configuration or
    the attributes name: files are compared from a git directory of its own, which lasts as long as the comparison and
    has none of the configuration. A file that only a filter program could compare is not compared.
    """
    commit = (_git(folder, {}, "rev-parse", "--verify", "HEAD") or "").strip()
    if not commit:
        return None
    state = GitState(commit, (_git(folder, {}, "symbolic-ref", "--short", "-q", "HEAD") or "").strip())
    names = ("objects", "index", "info/attributes", "info/exclude")
    top = _git(folder, {}, "rev-parse", "--show-toplevel")
    paths = _git(folder, {}, "rev-parse", *(word for name in names for word in ("--git-path", name)))
    settings = _git(folder, {}, "config", "--list", "-z")
    if top is None or paths is None or settings is None:
        return state
    with tempfile.TemporaryDirectory() as own:
        found = dict(zip(names, ((folder / path).absolute() for path in paths.splitlines()), strict=False))
        _compare(state, Path(top.removesuffix("\n")), found, _parsed(settings), Path(own))
    return state


def _compare(state: GitState, top: Path, paths: Mapping[str, Path], settings: Mapping[str, str], own: Path) -> None:
    """Add to a state what differs from its commit."""
    variables = _make_git_directory(own, state.commit, top, paths, settings.get("extensions.objectformat", ""))
    options = [f"{name}={settings[name]}" for name in _COMPARING if name in settings]
    home = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config", "git")
    options += [f"{name}={Path(settings.get(name, home / file)).expanduser()}" for name, file in _USER_FILES.items()]
    before = [word for option in options for word in ("-c", option)]
    same = ("--no-renames", "--ignore-submodules=dirty")
    status = _git(top, variables, *before, "status", "--porcelain", "-z", *same)
    lines = [line for line in (status or "").split("\0") if line]
    filters = [name for name in settings if name.startswith("filter.") and name.endswith((".clean", ".process"))]
    drivers = {name[7:].rpartition(".")[0] for name in filters}
    asked = "".join(f"{line[3:]}\0" for line in lines if not line.startswith("??"))
    attributes = _git(top, variables, *before, "check-attr", "-z", "--stdin", "filter", given=asked) if drivers else ""
    if status is None or attributes is None:
        state.not_compared = [_EVERYTHING]
        return
    words = attributes.split("\0")
    filtered = {path for path, driver in zip(words[::3], words[2::3], strict=False) if driver in drivers}
    # a file that was added or deleted has changed, whatever its filter makes of it
    unknown = [line[3:] for line in lines if line[3:] in filtered and line[:2] == " M"]
    changed = [line for line in lines if line[3:] not in unknown]
    without = [f":(exclude,top,literal){path}" for path in sorted(filtered)]
    plainly = ("--no-ext-diff", "--no-textconv", "--no-color")
    diff = _git(top, variables, *before, "diff", state.commit, *same, *plainly, "--", *without)
    state.changed = [name[:500] for name in changed[:_MOST_FILES]]
    state.not_compared = [name[:500] for name in unknown[:_MOST_FILES]] if diff is not None else [_EVERYTHING]
    state.diff = hide_in_text((diff or "")[: 2 * _LONGEST_DIFF])[:_LONGEST_DIFF]  # no secret is cut in two
    state.is_cut = len(diff or "") > _LONGEST_DIFF or max(len(changed), len(unknown)) > _MOST_FILES


def _make_git_directory(
    own: Path, commit: str, top: Path, paths: Mapping[str, Path], kind_of_hash: str
) -> dict[str, str]:
    """Make a git directory without configuration for a checkout; return the variables with which git uses it."""
    for name in ("refs", "info", "objects"):
        (own / name).mkdir()
    (own / "HEAD").write_text(f"{commit}\n")
    extension = f"[extensions]\n\tobjectFormat = {kind_of_hash}\n" if kind_of_hash.isalnum() else ""
    (own / "config").write_text(f"[core]\n\trepositoryFormatVersion = {int(bool(extension))}\n{extension}")
    with suppress(OSError):
        for shared in paths["index"].parent.glob("sharedindex.*"):  # of a split index
            shutil.copy(shared, own)
    for name in ("info/attributes", "info/exclude"):
        with suppress(OSError):
            shutil.copy(paths[name], own / name)
    return {
        "GIT_DIR": str(own),
        "GIT_WORK_TREE": str(top),
        "GIT_INDEX_FILE": str(paths["index"]),
        "GIT_OBJECT_DIRECTORY": str(paths["objects"]),
        "GIT_CONFIG_NOSYSTEM": "1",
        "HOME": str(own),
        "XDG_CONFIG_HOME": str(own),
    }


def _parsed(settings: str) -> dict[str, str]:
    """Return name -> value of what `git config --list -z` prints; a name without a value is a true one."""
    pairs = (entry.partition("\n") for entry in settings.split("\0") if entry)
    return {name: value if separator else "true" for name, separator, value in pairs}


def _git(folder: Path, variables: Mapping[str, str], *arguments: str, given: str = "") -> str | None:
    inherited = {name: value for name, value in os.environ.items() if not (variables and name.startswith("GIT_"))}
    try:
        done = subprocess.run(  # noqa: S603
            ["git", "--no-pager", *arguments],  # noqa: S607
            cwd=folder,
            env={**inherited, **_QUIET, **variables},
            input=given.encode("utf-8", "surrogateescape"),
            capture_output=True,
            timeout=_SECONDS,
            check=False,
        )
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return done.stdout.decode("utf-8", "surrogateescape" if variables else "replace") if done.returncode == 0 else None
