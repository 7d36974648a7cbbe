"""What people write, with `callbacks=[...]` as the only change: nothing else changes, and what is stopped resumes.

The scripts are tables of `frame.py`: each is trained bare, with all callbacks, and with all in two or three processes
that are stopped in the middle of an epoch, but for the last.
"""

import signal
from itertools import pairwise

import pytest

from tests.auto_resume import killing
from tests.styles import scripts  # noqa: F401  # which enters them
from tests.styles.frame import STOPS, STYLES, Job, begin_process, differences, is_expected, new_warnings, train

_BARE = {}


def bare(name, folder):
    """The run without the callbacks, once for all tests."""
    if name not in _BARE:
        _BARE[name] = train(STYLES[name].script, folder, {})
    return _BARE[name]


@pytest.mark.parametrize("name", STYLES)
@pytest.mark.sampled(2)
def test_all_callbacks_change_nothing_and_warn_of_what_is_so(tmp_path, name):
    style = STYLES[name]
    reference = bare(name, tmp_path / "bare")  # first: Lightning says some things once in a process
    run = train(style.script, tmp_path / "with", style.added(tmp_path / "with"))
    assert differences(run, reference) == []
    said = new_warnings(run, reference)
    assert [line for line in said if not is_expected(line, style.expected())] == []
    assert [words for words in style.expected() if not any(is_expected(line, [words]) for line in said)] == []


# What a run that has been resumed must carry on to the next: the rest is stopped once, by an error or a signal in turn
TWICE = ["state_that_is_no_tensor", "metrics_of_the_module", "several_loaders_at_once"]
STOPPED = [name for name in STYLES if "AutoResume" not in STYLES[name].left_out]


@pytest.mark.parametrize("name", STOPPED)
@pytest.mark.sampled(2, 1)
def test_stopped_in_the_middle_it_ends_as_the_bare_run(tmp_path, name):
    stops = STOPS if name in TWICE else [(STOPS[STOPPED.index(name) % 2][0], 5)]
    style = STYLES[name]
    run = train(style.script, tmp_path / "with", style.added(tmp_path / "with"), stops)
    assert differences(run, bare(name, tmp_path / "bare")) == []
    assert len(run.starts) == len(stops) + 1
    assert run.starts[0] == 0
    assert all(before < after for before, after in pairwise(run.starts)), "it resumed where it was stopped"
    said = [line for line in run.warnings if "AutoResume" in line]
    assert [line for line in said if not is_expected(line, style.resumed)] == []
    assert [words for words in style.resumed if not any(is_expected(line, [words]) for line in said)] == []


def test_killed_in_the_middle_it_ends_as_the_bare_run(tmp_path):
    name, folder = "state_that_is_no_tensor", tmp_path / "with"
    style = STYLES[name]

    def script(folder, _):
        begin_process(0)
        style.script(Job(folder, style.added(folder), ("SIGKILL", 5)))

    assert killing.run(folder, {}, script=script) == -signal.SIGKILL
    run = train(style.script, folder, style.added(folder), first=1)
    assert differences(run, bare(name, tmp_path / "bare")) == []
    assert 0 == run.starts[0] < run.starts[1]
