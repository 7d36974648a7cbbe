"""What is missing is named with a command that works wherever it is run."""

import re
from importlib.metadata import PackageNotFoundError

import pytest
from packaging.requirements import Requirement

from lightning_tricks._shared import extras


@pytest.mark.parametrize("extra", ["cli", "devices", "finetune", "reports"])
def test_the_command_names_packages_of_an_index(extra):
    command = extras.install_command(extra)
    named = [Requirement(word) for word in re.findall('"(.*?)"', command)]
    assert named, command
    assert all(requirement.marker is None and requirement.specifier for requirement in named)
    assert "lightning-tricks" not in command


def test_an_error_names_it():
    with pytest.raises(
        ModuleNotFoundError, match=r'^Pictures need nothing, from the extra .reports.: pip install "'
    ) as raised:
        extras.import_extra("no_such_package.part", "reports", "Pictures need nothing")
    assert raised.value.name == "no_such_package"


def test_what_is_not_installed_is_installed_from_its_folder(monkeypatch):
    def missing(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(extras, "requires", missing)
    assert extras.install_command("reports") == "pip install .[reports]"


def test_an_error_within_the_package_is_its_own(tmp_path, monkeypatch):
    (tmp_path / "needy.py").write_text("import no_such_package")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_package'"):
        extras.import_extra("needy", "reports", "Pictures need needy")
