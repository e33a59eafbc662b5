"""The site is built without a warning, fetches nothing, and is legible on a screen and a phone."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest
import typer
from documentation import ROOT

from stagewright.cli import app
from stagewright.service.schemas import DOCUMENTS, json_schema

pytestmark = pytest.mark.real

CHROMIUM = shutil.which("chromium")
HEADER = 60  # pixels
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
    "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND", "--virtual-time-budget=20000",
)  # fmt: skip


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("mkdocs", reason="the site needs mkdocs; pip install '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def browse(url: str, profile: Path, *flags: str) -> str:
    assert CHROMIUM is not None
    command = [CHROMIUM, *FLAGS, *flags, f"--user-data-dir={profile}", url]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def test_pages_fetch_nothing(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 20
    for page in pages:
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]*)"', text)
        fetched += re.findall(r'<link[^>]* href="([^"]*)"', text)
        assert fetched
        for target in fetched:
            assert "//" not in target, f"{page.name} fetches {target}"
            if page.name != "404.html":  # whose links are from the root of a server
                assert (page.parent / target).exists(), f"{page.name} lacks {target}"


def test_every_command_and_every_option_is_described(site: Path) -> None:
    text = (site / "reference/commands.html").read_text(encoding="utf-8")
    group = typer.main.get_command(app)
    for name, command in group.commands.items():  # type: ignore[attr-defined]
        assert f"stagewright {name} " in text
        for one in command.params:
            assert all(option in text for option in one.opts if option.startswith("--"))


def test_schemas_are_published(site: Path) -> None:
    listed = (site / "reference/documents.html").read_text(encoding="utf-8")
    for name in DOCUMENTS:
        assert json.loads((site / f"schemas/{name}.json").read_text()) == json_schema(name)
        assert f'href="../schemas/{name}.json"' in listed


def test_functions_are_described_with_the_types_of_their_parameters(site: Path) -> None:
    text = (site / "reference/python.html").read_text(encoding="utf-8")
    assert 'id="stagewright.plan"' in text
    assert not re.search(r":(func|class|meth):", text)
    described = text[text.index('id="stagewright.plan"') : text.index('id="stagewright.sweep"')]
    words = " ".join(re.sub(r"<[^>]+>", " ", described).split())
    assert re.search(r"Default .*? cluster (title=\S+ )?Cluster ", words)


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
@pytest.mark.parametrize("width", [1400, 400])
def test_the_start_page_is_drawn(width: int, site: Path, tmp_path: Path) -> None:
    picture = tmp_path / "start.png"
    browse(
        f"file://{site}/index.html", tmp_path / "profile",
        f"--window-size={width},1200", f"--screenshot={picture}",
    )  # fmt: skip
    pixels = matplotlib.image.imread(picture)[..., :3]
    assert pixels.shape[1] == width
    dark = pixels[HEADER:].mean(axis=2) < 0.5
    used = np.flatnonzero(dark.any(axis=0))
    assert 10 < used[0] < 0.1 * width  # margins on both sides: nothing is cut off
    assert 0.9 * width < used[-1] < width - 10
    assert 0.005 < dark.mean() < 0.3  # text and a picture


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
def test_search_needs_no_server(site: Path, tmp_path: Path) -> None:
    shown = browse(f"file://{site}/index.html?q=certificate", tmp_path / "profile", "--dump-dom")
    found = re.search(r'md-search-result__meta">(\d+) matching documents', shown)
    assert found is not None
    assert int(found[1]) > 3
