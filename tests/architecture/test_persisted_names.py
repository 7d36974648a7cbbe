"""Names in checkpoints, files, logs and configurations stay what they are."""

from difflib import unified_diff

from tests.architecture.persisted_names import LISTING, listing


def test_persisted_names_are_those_that_are_listed():
    lines = (LISTING.read_text().splitlines(), listing().splitlines())
    difference = "\n".join(unified_diff(*lines, "listed", "found", n=0, lineterm=""))
    assert not difference, (
        f"{difference}\n\nA name that is gone can not be read, set or found by those who have it in a checkpoint, "
        "a file or a configuration: bring it back, or read it in its old form as well. Where it is meant, or a name is "
        f"new, `python -m tests.architecture.persisted_names` writes {LISTING.name} anew; say in "
        "CHANGELOG.md what changed."
    )
