"""What is installed: every module, and an import that stays light."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata

ROOT = Path(__file__).parents[2]
ROOMS = ("graphs", "formulations", "solvers", "executor", "service")
HEAVY = ("ortools", "cvxpy", "highspy", "pulp", "numba", "matplotlib", "torch")


def modules() -> set[str]:
    """Every module and data file of the package, as a path inside it."""
    ends = ("*.css", "*.html", "*.jinja", "*.js", "*.json", "*.py.txt", "*.svg")
    data = [path for room in ("executor", "graphs", "service") for end in ends
            for path in (ROOT / room).rglob(end)]  # fmt: skip
    inside = [*data, *(path for room in ROOMS for path in python(room))]
    files = {f"stagewright/{path.relative_to(ROOT)}" for path in inside}
    front = list((ROOT / "stagewright").glob("*.py"))
    front += [*python("stagewright/cli"), *python("stagewright/front")]
    files |= {str(path.relative_to(ROOT)) for path in front}
    return files | {"stagewright/py.typed"}


def python(folder: str) -> list[Path]:
    return list((ROOT / folder).rglob("*.py"))


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist and the wheel that is built from it, made outside the checkout."""
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("stagewright", *ROOMS):
        skip = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=skip)
    built = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(built), str(source)]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-2000:] + run.stderr[-2000:]
    return built


def test_every_package_is_named() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    named = {name.replace(".", "/") for name in project["tool"]["setuptools"]["packages"]}
    assert {str(Path(path).parent) for path in modules() if path.endswith(".py")} == named


@pytest.mark.slow
def test_the_wheel_holds_every_module_and_nothing_else(distributions: Path) -> None:
    with zipfile.ZipFile(next(distributions.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == modules()


@pytest.mark.slow
def test_the_wheel_holds_the_licence_and_the_command(distributions: Path) -> None:
    with zipfile.ZipFile(next(distributions.glob("*.whl"))) as wheel:
        files = {Path(name).name: name for name in wheel.namelist() if ".dist-info/" in name}
        assert "Apache License" in wheel.read(files["LICENSE"]).decode()
        entry = wheel.read(files["entry_points.txt"]).decode()
    assert "stagewright = stagewright.cli:main" in entry


@pytest.mark.slow
def test_the_source_distribution_holds_every_module_as_a_file(distributions: Path) -> None:
    with tarfile.open(next(distributions.glob("*.tar.gz"))) as archive:
        files = {m.name.split("/", 1)[1] for m in archive if m.isreg() or m.islnk()}
    assert modules() <= files


@pytest.mark.slow
def test_both_distributions_have_the_metadata_of_the_project(distributions: Path) -> None:
    """It is valid, down to the classes of its fields, and describes the project by the README."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for text in (wheel_metadata(distributions), sdist_metadata(distributions)):
        found = Metadata.from_email(text, validate=True)
        assert (found.name, str(found.version)) == ("stagewright", project["version"])
        assert found.license_expression == "Apache-2.0"
        assert {*(found.provides_extra or ())} == {*project["optional-dependencies"]}
        assert found.description_content_type == "text/markdown"
        assert (found.description or "").startswith("# Stagewright\n")


def wheel_metadata(folder: Path) -> bytes:
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        (name,) = (one for one in wheel.namelist() if one.endswith(".dist-info/METADATA"))
        return wheel.read(name)


def sdist_metadata(folder: Path) -> bytes:
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        (name,) = (one for one in archive.getnames() if re.fullmatch(r"[^/]+/PKG-INFO", one))
        file = archive.extractfile(name)
        assert file is not None
        return file.read()


def test_the_changelog_begins_with_the_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    headings = re.findall(r"^## (.*)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert re.fullmatch(rf"{re.escape(version)} \((unreleased|\d{{4}}-\d\d-\d\d)\)", headings[0])


@pytest.mark.parametrize("room", ROOMS)
def test_rooms_are_linked_relatively_into_the_package(room: str) -> None:
    link = ROOT / "stagewright" / room
    assert os.readlink(link) == f"../{room}"
    assert link.resolve() == ROOT / room


def test_import_loads_no_solver_plotter_or_torch() -> None:
    code = f"import sys, stagewright; print([n for n in {HEAVY} if n in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


def test_public_names_are_there() -> None:
    import stagewright

    for name in ("plan", "load_model", "load_cluster", "check", "simulate"):
        assert callable(getattr(stagewright, name))
