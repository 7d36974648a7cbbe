"""What git says of a checkout, asked without running any program that the checkout or the environment names."""

import os
import shlex
import subprocess
import sys

import pytest

from lightning_tricks.run_report.core.git_state import read_git_state
from tests.small import cases

ATTRIBUTES = "*.py filter=marked diff=marked merge=marked\n*.bin filter=marked\n*.gone filter=unknown\n"
NAMES = """
    core.alternateRefsCommand core.askPass core.editor core.fsmonitor core.pager core.sshCommand credential.helper
    diff.external diff.marked.command diff.marked.textconv filter.marked.clean filter.marked.process
    filter.marked.smudge gpg.program interactive.diffFilter merge.marked.driver pager.diff pager.status
    sequence.editor uploadpack.packObjectsHook
"""
PROGRAMS = {
    **dict.fromkeys(NAMES.split(), "{}"),
    **dict.fromkeys(("alias.status", "alias.diff"), "!{}"),
    **dict.fromkeys(("log.showSignature", "status.submoduleSummary"), "true"),
    "ssh.variant": "simple",
}


def git(folder, *arguments, **variables):
    identity = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
    command = ["git", *identity, "-c", "protocol.file.allow=always", *arguments]
    return subprocess.run(
        command, cwd=folder, check=True, capture_output=True, text=True, env={**os.environ, **variables}
    ).stdout


def commit_all(folder):
    git(folder, "add", "-A")
    git(folder, "commit", "-m", "some")


def make(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    git(folder, "init", "-b", "main")
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    commit_all(folder)
    return folder


@pytest.fixture
def marker(tmp_path):
    """A program that leaves a file, and passes its input on."""
    program = tmp_path / "program" / "marker"
    program.parent.mkdir()
    program.write_text(
        f"#!{sys.executable}\nimport sys, pathlib\n"
        f"pathlib.Path({str(tmp_path / 'ran')!r}).open('a').write(repr(sys.argv))\nprint(sys.stdin.read())\n"
    )
    program.chmod(0o755)
    return program


def is_run(marker):
    return (marker.parent.parent / "ran").exists()


@pytest.fixture
def checkout(tmp_path):
    """A checkout with attributes, two changed files and one that is new."""
    folder = make(tmp_path / "checkout", a_py="one\n", b_bin="one\n", c_txt="one\n", _gitattributes=ATTRIBUTES)
    for name in ("a.py", "c.txt", "new.py"):
        (folder / name).write_text("two\n")
    os.utime(folder / "b.bin", (1, 1))  # git has to read it
    return folder


def touch_all(folder):
    for path in folder.rglob("*.*"):
        if ".git" not in path.parts and path.is_file():
            os.utime(path, (1, 1))


@pytest.mark.skipif(os.name == "nt", reason="the marker is a script")
@pytest.mark.parametrize("place", ["checkout", "home", "included", "worktree", "environment"])
def test_no_program_of_the_configuration_runs(tmp_path, checkout, marker, monkeypatch, place):
    command = shlex.quote(str(marker))
    monkeypatch.setenv("HOME", str(tmp_path))
    target = {
        "checkout": ["--local"],
        "home": ["--file", str(tmp_path / ".gitconfig")],
        "included": ["--file", str(tmp_path / "included")],
        "worktree": ["--worktree"],
        "environment": ["--file", str(tmp_path / "config")],
    }[place]
    if place == "included":
        git(checkout, "config", f"includeIf.gitdir:{checkout}/.path", str(tmp_path / "included"))
    if place == "worktree":
        git(checkout, "config", "extensions.worktreeConfig", "true")
    if place == "environment":
        monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(tmp_path / "config"))
    for name, value in PROGRAMS.items():
        git(checkout, "config", *target, name, value.format(command))
    git(checkout, "config", *target, "filter.with=sign.clean", command)
    git(checkout, "config", *target, "filter.marked.required", "true")
    with (checkout / ".gitattributes").open("a") as file:
        file.write("c.txt filter=with=sign\n")
    hooks = tmp_path / "hooks"
    hooks.mkdir()
    for hook in ("post-index-change", "fsmonitor-watchman", "reference-transaction", "query-watchman"):
        os.link(marker, hooks / hook)
        os.link(marker, checkout / ".git" / "hooks" / hook)
    git(checkout, "config", *target, "core.hooksPath", str(hooks))
    (tmp_path / "ran").unlink(missing_ok=True)
    state = read_git_state(checkout)
    assert not is_run(marker), (tmp_path / "ran").read_text()
    assert state.changed == [" M .gitattributes", "?? new.py"]
    assert sorted(state.not_compared) == ["a.py", "c.txt"]  # b.bin has the content of the commit


@pytest.mark.skipif(os.name == "nt", reason="the marker is a script")
@cases(
    "variable",
    *("GIT_ASKPASS", "GIT_CONFIG_COUNT", "GIT_EDITOR", "GIT_EXTERNAL_DIFF", "GIT_PAGER", "GIT_PROXY_COMMAND"),
    *("GIT_SSH", "GIT_SSH_COMMAND", "PAGER", "SSH_ASKPASS"),
)
def test_no_program_of_the_environment_runs(checkout, marker, monkeypatch, variable):
    if variable == "GIT_CONFIG_COUNT":
        monkeypatch.setenv("GIT_CONFIG_KEY_0", "core.fsmonitor")
        monkeypatch.setenv("GIT_CONFIG_VALUE_0", str(marker))
    monkeypatch.setenv(variable, "1" if variable == "GIT_CONFIG_COUNT" else str(marker))
    state = read_git_state(checkout)
    assert not is_run(marker)
    assert state.changed == [" M a.py", " M c.txt", "?? new.py"]
    assert "-one\n+two" in state.diff


@pytest.mark.skipif(os.name == "nt", reason="the marker is a script")
def test_no_program_of_a_submodule_runs_and_its_commit_is_compared(tmp_path, checkout, marker):
    inner = make(tmp_path / "inner", d_py="one\n", _gitattributes=ATTRIBUTES)
    commit_all(checkout)
    git(checkout, "submodule", "add", str(inner), "inner")
    commit_all(checkout)
    for name, value in PROGRAMS.items():
        git(checkout / "inner", "config", name, value.format(shlex.quote(str(marker))))
    touch_all(checkout / "inner")
    (checkout / "inner" / "d.py").write_text("two\n")
    clean = read_git_state(checkout)
    assert (clean.changed, clean.diff, is_run(marker)) == ([], "", False)
    other = git(inner, "commit", "--allow-empty", "-m", "other") and git(inner, "rev-parse", "HEAD").strip()
    git(checkout / "inner", "fetch")
    (tmp_path / "ran").unlink(missing_ok=True)
    (checkout / ".git" / "modules" / "inner" / "HEAD").write_text(f"{other}\n")
    state = read_git_state(checkout)
    assert (state.changed, is_run(marker)) == ([" M inner"], False)
    assert f"+Subproject commit {other}" in state.diff


@pytest.mark.skipif(os.name == "nt", reason="the marker is a script")
def test_missing_objects_are_not_fetched(tmp_path, checkout, marker):
    git(checkout, "config", "remote.origin.url", "ssh://nowhere/nothing")
    git(checkout, "config", "remote.origin.promisor", "true")
    git(checkout, "config", "remote.origin.uploadpack", str(marker))
    git(checkout, "config", "extensions.partialClone", "origin")
    git(checkout, "config", "core.sshCommand", shlex.quote(str(marker)))
    blob = git(checkout, "rev-parse", "HEAD:c.txt").strip()
    (checkout / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    state = read_git_state(checkout)
    assert not is_run(marker)
    assert (state.changed, state.not_compared) == ([" M a.py", " M c.txt", "?? new.py"], ["."])


def test_filtered_file_is_compared_as_far_as_git_can(tmp_path):
    folder = make(tmp_path / "a", a_py="one\n", b_py="one\n", c_py="one\n", d_py="one\n", _gitattributes=ATTRIBUTES)
    git(folder, "config", "filter.marked.clean", "cat")
    git(folder, "update-index", "--refresh")
    assert read_git_state(folder).not_compared == []
    (folder / "a.py").write_text("another\n")
    os.utime(folder / "b.py", (1, 1))
    (folder / "c.py").unlink()
    (folder / "d.py").write_text("two\n")
    git(folder, "add", "d.py")
    state = read_git_state(folder)
    assert state.changed == [" D c.py", "M  d.py"]
    assert state.not_compared == ["a.py"]  # the others have the content of the commit
    assert "a.py" not in state.diff


@pytest.mark.parametrize("setup", ["split index", "worktree", "subfolder", "sha256", "autocrlf", "odd names", "info"])
def test_answer_is_that_of_git_status(tmp_path, setup):
    folder = tmp_path / "a"
    folder.mkdir()
    git(folder, "init", "-b", "main", *(["--object-format=sha256"] if setup == "sha256" else []))
    asked = folder
    if setup == "autocrlf":
        git(folder, "config", "core.autocrlf", "true")
    names = ["a", "b", "ü \n\"'", ":(top)x"] if setup == "odd names" and os.name != "nt" else ["a", "b"]
    for name in names:
        (folder / name).write_bytes(b"one\r\ntwo\r\n" if setup == "autocrlf" else b"one\ntwo\n")
    commit_all(folder)
    if setup == "split index":
        git(folder, "update-index", "--split-index")
        assert list((folder / ".git").glob("sharedindex.*"))
    if setup == "worktree":
        git(folder, "worktree", "add", "../b")
        asked = tmp_path / "b"
    if setup == "info":
        (folder / ".git" / "info" / "exclude").write_text("new\n")
        (folder / ".git" / "info" / "attributes").write_text("b binary\n")
    if setup == "subfolder":
        (asked := folder / "sub").mkdir()
    top = asked.parent if setup == "subfolder" else asked
    assert read_git_state(asked).changed == []
    for name in names:
        (top / name).write_bytes(b"one\r\n2\r\n" if setup == "autocrlf" else b"one\n2\n")
    (top / "new").write_text("new\n")
    state = read_git_state(asked)
    git_says = git(top, "status", "--porcelain", "-z", "--no-renames").rstrip("\0").split("\0")
    assert state.changed == git_says
    assert state.diff == git(top, "diff", "HEAD", "--no-renames")
    assert state.not_compared == []


def test_state_has_commit_and_branch_and_a_bounded_difference_and_leaves_the_index_alone(tmp_path):
    assert read_git_state(tmp_path) is None
    git(tmp_path, "init", "-b", "main")
    assert read_git_state(tmp_path) is None, "no commit yet"
    make(tmp_path, a="a\n")
    clean = read_git_state(tmp_path)
    assert (len(clean.commit), clean.branch, clean.changed, clean.diff) == (40, "main", [], "")
    (tmp_path / "a").write_text("b\n" * 100_000)
    index = (tmp_path / ".git" / "index").read_bytes()
    state = read_git_state(tmp_path)
    assert (len(state.diff), state.is_cut) == (64_000, True)
    assert (tmp_path / ".git" / "index").read_bytes() == index


def test_git_that_does_not_answer_is_not_taken_for_no_change(checkout):
    (checkout / ".git" / "index").write_bytes(b"damaged")
    state = read_git_state(checkout)
    assert (state.changed, state.not_compared) == ([], ["."])
