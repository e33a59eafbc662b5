"""The pages' commands run, and what the README and the pages link to is there."""

import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from commands import answered
from documentation import (
    EXAMPLES,
    PAGES,
    README,
    ROOT,
    as_a_script,
    blocks,
    in_this_process,
    require_schemas,
)
from profiles import slow_after

import stagewright

# Blocks that the README has too run in its own test.
SCRIPTS = {
    page: "".join(block for block in blocks(page, "sh") if block not in blocks(README, "sh"))
    for page in PAGES
}
EXECUTED = [page for page in PAGES if SCRIPTS[page]]
WRITTEN = {
    "operators-of-a-step": {"graph", "operators"},
    "share-a-cluster": {"allocation", "jobs", "round"},
    "what-fits": {"profiled-plan"},
}
LINKED = (README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md")))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with model.json, cluster.json and plan.json as the README makes them."""
    folder = tmp_path_factory.mktemp("made")
    (model,) = blocks(README, "json")
    (folder / "model.json").write_text(model, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        machines, plan = blocks(README, "sh")[:2]
        answered(*machines.split()[1:])
        answered(*plan.splitlines()[0].split()[1:], "--time-limit", 1)
    return folder


@pytest.mark.real
@pytest.mark.parametrize("page", EXECUTED, ids=lambda page: page.stem)
@pytest.mark.parametrize("execute", slow_after(1, [in_this_process, as_a_script]))
def test_commands_of_a_page_run(
    page: Path,
    made: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    execute: Callable[[str], str],
) -> None:
    """The documents they write keep their schemas."""
    if "capture" in SCRIPTS[page]:
        pytest.importorskip("torch", reason="capturing needs torch")
    (tmp_path / "examples").symlink_to(EXAMPLES)
    for file in made.iterdir():
        shutil.copy(file, tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)  # the width without a terminal
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    printed = execute(SCRIPTS[page])
    assert require_schemas(tmp_path) >= {"model", "cluster", "plan", *WRITTEN.get(page.stem, ())}
    if page.stem == "which-schedule":
        require_published_schedules_on_the_curve(printed)


def require_published_schedules_on_the_curve(printed: str) -> None:
    """As the page says: all points are proved, and V-Min, V-Half and ZBV are among them."""
    curve = printed[printed.index(" memory   makespan ") :]
    points = re.findall(r"^ +([\d.]+) +([\d.]+) .* (\w+) *$", curve, re.MULTILINE)
    assert {status for _, _, status in points} == {"optimal"}
    for kind in ("v-min", "v-half", "zbv"):
        told = re.search(rf"{kind} has makespan (\S+) with peak memory (\S+)", curve)
        assert told is not None
        assert (told[2], told[1], "optimal") in points


def anchors(file: Path) -> set[str]:
    """The anchors of a file's headings, as they are made of the words."""
    text = re.sub(r"^```.*?^```$", "", file.read_text(), flags=re.MULTILINE | re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("file", LINKED, ids=lambda file: str(file.relative_to(ROOT)))
def test_links_lead_to_what_is_there(file: Path) -> None:
    for target, anchor in re.findall(r"\]\((?!\w+:)([^)#\s]*)(?:#([^)]*))?\)", file.read_text()):
        found = (file.parent / target) if target else file
        if target != "decisions/index.md":  # the site's own list
            assert found.exists(), target
        if anchor:
            assert anchor in anchors(found), f"{target}#{anchor}"


def test_the_readme_is_short_and_names_every_page() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 420
    for page in PAGES:
        assert f"](docs/{page.relative_to(ROOT / 'docs')})" in text


def test_gpt2_of_hugging_face_is_trained_by_five_lines() -> None:
    five, _ = blocks(README, "py")
    assert len(five.splitlines()) == 5
    assert "GPT2LMHeadModel" in five
    for block in blocks(README, "py"):
        compile(block, "README.md", "exec")


def test_every_public_name_is_on_the_page_of_python() -> None:
    text = (ROOT / "docs/reference/python.md").read_text(encoding="utf-8")
    named = re.findall(r"^::: stagewright\.(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(stagewright.__all__)


def test_training_on_pages_is_that_of_the_readme_or_has_a_test() -> None:
    tested = {"operators-of-a-step", "layouts"}  # tests/cli/test_examples.py
    known = blocks(README, "bash")
    for page in PAGES:
        assert page.stem in tested or set(blocks(page, "bash")) <= set(known)
