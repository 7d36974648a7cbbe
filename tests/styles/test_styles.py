"""What people write, with `callbacks=[...]` as the only change: nothing else changes, and what is stopped resumes.

The scripts are tables of `frame.py`: each is trained bare, with all callbacks, and with all in three processes of
which the first two are stopped in the middle of an epoch.
"""

import pytest

from tests.styles import agents, batches, configs, habits, images, language, loaders
from tests.styles.frame import STOPS, STYLES, differences, is_expected, new_warnings, train

FILES = (agents, batches, configs, habits, images, language, loaders)
_BARE = {}


def bare(name, folder):
    """The run without the callbacks, once for all tests."""
    if name not in _BARE:
        _BARE[name] = train(STYLES[name].script, folder, {})
    return _BARE[name]


@pytest.mark.parametrize("name", STYLES)
def test_all_callbacks_change_nothing_and_warn_of_what_is_so(tmp_path, name):
    style = STYLES[name]
    reference = bare(name, tmp_path / "bare")  # first: Lightning says some things once in a process
    run = train(style.script, tmp_path / "with", style.added(tmp_path / "with"))
    assert differences(run, reference) == []
    said = new_warnings(run, reference)
    assert [line for line in said if not is_expected(line, style.expected())] == []
    assert [words for words in style.expected() if not any(is_expected(line, [words]) for line in said)] == []


@pytest.mark.parametrize("name", [name for name in STYLES if "AutoResume" not in STYLES[name].left_out])
def test_stopped_twice_in_the_middle_it_ends_as_the_bare_run(tmp_path, name):
    style = STYLES[name]
    run = train(style.script, tmp_path / "with", style.added(tmp_path / "with"), STOPS)
    assert differences(run, bare(name, tmp_path / "bare")) == []
    assert 0 == run.starts[0] < run.starts[1] < run.starts[2], "it resumed where it was stopped"
    assert [line for line in run.warnings if "AutoResume" in line] == []
