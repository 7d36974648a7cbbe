"""Private symbols of Lightning are used where they can be repaired, and all of them are listed."""

import pytest

from tests.lightning_compat import private_symbols

_ELSEWHERE = {
    "_fabric": ["_shared/dry_run/model_copy.py"],  # a copy of a module belongs to none; it knows no Lightning
    "_forward_module": ["checkpoint_remapping/core/remapping.py"],  # a prefix of names in files
    "_generate_state_key": ["metrics/callback.py"],  # what Lightning's documentation tells a callback to call
}


def test_they_are_listed():
    assert private_symbols.text() == private_symbols.LISTED.read_text(encoding="utf-8")


@pytest.mark.oldest
def test_each_is_used_in_the_compat_folder_alone():
    elsewhere = {
        name: [file for file in files if not file.startswith("_lightning_compat/")]
        for name, files in private_symbols.used().items()
    }
    assert {name: files for name, files in elsewhere.items() if files} == _ELSEWHERE
