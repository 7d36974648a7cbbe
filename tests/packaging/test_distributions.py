"""What `pip install` gets: the wheel and the source distribution are complete, and work outside the checkout."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest
from markdown_it import MarkdownIt
from packaging.metadata import Metadata

import lightning_tricks

_ROOT = Path(__file__).parents[2]
_BUILD = "import sys; from hatchling import build; print(getattr(build, sys.argv[1])(sys.argv[2]))"


def _build(what, source, target):
    run = subprocess.run(
        [sys.executable, "-c", _BUILD, f"build_{what}", str(target)],
        cwd=source,
        capture_output=True,
        text=True,
        check=True,
    )
    return target / run.stdout.splitlines()[-1]


@pytest.fixture(scope="module")
def tracked():
    files = subprocess.run(["git", "ls-files"], cwd=_ROOT, capture_output=True, text=True, check=True).stdout
    return {file for file in files.splitlines() if (_ROOT / file).exists()}


@pytest.fixture(scope="module")
def sdist(tracked, tmp_path_factory):
    source, target = tmp_path_factory.mktemp("source") / "project", tmp_path_factory.mktemp("sdist")
    for file in tracked:
        (source / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_ROOT / file, source / file)
    return _build("sdist", source, target)


@pytest.fixture(scope="module")
def wheel(sdist, tmp_path_factory):
    """The wheel is built from the source distribution, as an installer does it."""
    folder = tmp_path_factory.mktemp("wheel")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return _build("wheel", next(folder.iterdir()), folder)


def _files(wheel):
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def _text_and_links(markdown):
    tokens = MarkdownIt().enable("table").parse(markdown)
    parts = [part for token in tokens for part in token.children or [token]]
    links = [part.attrs.get("href", part.attrs.get("src")) for part in parts if part.type in {"link_open", "image"}]
    return "".join(part.content for part in parts), links


def _of_dist_info(wheel, name):
    return next(data.decode() for path, data in _files(wheel).items() if path.endswith(f".dist-info/{name}"))


def test_the_wheel_holds_the_package_and_nothing_else(wheel):
    package = {
        path.relative_to(_ROOT).as_posix()
        for path in Path(lightning_tricks.__file__).parent.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    inside = {name for name in _files(wheel) if ".dist-info/" not in name}
    assert inside == package
    assert "lightning_tricks/py.typed" in inside


def test_the_metadata_is_valid_and_says_what_pyproject_says(wheel):
    metadata = Metadata.from_email(_of_dist_info(wheel, "METADATA"), validate=True)
    assert metadata.description_content_type == "text/markdown"
    required = {requirement.name for requirement in metadata.requires_dist if requirement.marker is None}
    assert {"lightning", "torch", "torchmetrics", "torchensemble", "thop"} <= required
    lightning = next(requirement for requirement in metadata.requires_dist if requirement.name == "lightning")
    assert not {"2.6.2", "2.6.3"} & {*lightning.specifier.filter(["2.6.1", "2.6.2", "2.6.3", "2.6.4"])}
    assert re.search(r"^lightning-tricks = lightning_tricks\.cli:main$", _of_dist_info(wheel, "entry_points.txt"), re.M)
    assert _of_dist_info(wheel, "licenses/LICENSE") == (_ROOT / "LICENSE").read_text()


def test_installed_from_the_wheel_it_runs_outside_the_checkout(wheel, tmp_path):
    place, elsewhere = tmp_path / "installed", tmp_path / "elsewhere"
    elsewhere.mkdir()
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--no-compile"]
    subprocess.run([*pip, "--target", str(place), str(wheel)], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(place)}
    code = "import lightning_tricks as t; [getattr(t, name) for name in t.__all__]; print(t.__file__, t.__version__)"
    ran = [
        subprocess.run(
            [sys.executable, *command], cwd=elsewhere, env=environment, capture_output=True, text=True, check=True
        ).stdout
        for command in (["-c", code], ["-m", "lightning_tricks", "--version"])
    ]
    file, version = ran[0].split()
    assert Path(file) == place / "lightning_tricks" / "__init__.py"
    assert wheel.name.split("-")[1] == version
    assert version in ran[1]


def test_the_long_description_is_the_readme_without_links_to_files(wheel):
    description = Metadata.from_email(_of_dist_info(wheel, "METADATA")).description
    (text, links), (readme, links_of_readme) = map(_text_and_links, (description, (_ROOT / "README.md").read_text()))
    assert text == readme + "The source distribution holds all files that are named here."
    assert links == [link for link in links_of_readme if link.startswith("https://")] != links_of_readme


def test_the_source_distribution_is_the_project_whole(sdist, tracked):
    with tarfile.open(sdist) as archive:
        assert {name.partition("/")[2] for name in archive.getnames()} == {*tracked, "PKG-INFO"}


def test_the_source_distribution_holds_what_the_readme_names(sdist):
    readme = (_ROOT / "README.md").read_text()
    with tarfile.open(sdist) as archive:
        files = [Path(name.partition("/")[2]) for name in archive.getnames()]
    inside = {*files, *(folder for file in files for folder in file.parents)}
    named = {*_text_and_links(readme)[1], *re.findall(r"\b(?:docs|examples|notebooks|tests)/[\w./-]*\w", readme)}
    assert {"docs/index.md", "examples/README.md", "notebooks", "CHANGELOG.md"} <= named
    assert not {name for name in named if not name.startswith("https://") and Path(name) not in inside}


def test_it_works_where_pytorch_lightning_alone_is_installed(wheel, tmp_path):
    """Of what is installed here, without the package `lightning`, and without the checkout."""
    place, program = tmp_path / "installed", tmp_path / "program.py"
    place.mkdir()
    for path in Path(sysconfig.get_path("purelib")).iterdir():
        if not path.name.startswith(("lightning-", "lightning_tricks")) and path.name != "lightning":
            (place / path.name).symlink_to(path)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(place)
    program.write_text(
        "import sys; from lightning_tricks import GradientClipping\n"
        "from pytorch_lightning import Trainer; from pytorch_lightning.demos.boring_classes import BoringModel\n"
        "arguments = {'accelerator': 'cpu', 'logger': False, 'enable_checkpointing': False}\n"
        "Trainer(max_steps=2, callbacks=[GradientClipping(1.0)], **arguments).fit(BoringModel())\n"
        "print('lightning' in sys.modules)"
    )
    ran = subprocess.run(
        [sys.executable, "-S", "-W", "ignore", program],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(place)},
        capture_output=True,
        text=True,
    )
    assert ran.stdout.splitlines()[-1:] == ["False"], ran.stderr
