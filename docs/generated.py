"""What the site has besides the pages: start page, benchmarks, commands, schemas, decisions.

mkdocs calls the functions named ``on_...`` (its hooks).
"""

import csv
import json
import posixpath
import re
from collections.abc import Iterator
from inspect import cleandoc
from pathlib import Path
from typing import Any

import typer
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

from stagewright.cli import app
from stagewright.cli.pages import EXAMPLES
from stagewright.service.schemas import DOCUMENTS, json_schema

ROOT = Path(__file__).parents[1]
INDEXES = {"../README.md": "index.md", "../benchmarks/README.md": "benchmarks/index.md"}
FETCHED = "https://unpkg.com/iframe-worker/shim"
TABLE = re.compile(r"^\[[\w-]+\]\([./]+/(?P<path>benchmarks/results/.*)\)$", re.MULTILINE)
LINK = re.compile(r"\[(?P<text>[^\]]+)\]\((?P<target>[^)#:]*)(?P<anchor>#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the start page, which is the README, the benchmarks', the decisions and the schemas."""
    made = {"index.md": _start_page(), "decisions/index.md": _decisions()}
    benchmarks = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    made["benchmarks/index.md"] = benchmarks.replace("](../docs/benchmarks/", "](")
    for name in DOCUMENTS:
        made[f"schemas/{name}.json"] = json.dumps(json_schema(name), indent=1) + "\n"
    for path, content in made.items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Fill in what is generated, and point links to files outside of the site to what is in it."""
    folder = posixpath.dirname(page.file.src_uri)
    markdown = TABLE.sub(lambda link: _table(ROOT / link["path"]), markdown)
    markdown = LINK.sub(lambda link: _inside(link, folder), markdown)
    if page.file.src_uri == "reference/commands.md":
        markdown = markdown.replace("<!-- commands -->", "\n".join(_commands()))
    if page.file.src_uri == "reference/documents.md":
        markdown = markdown.replace("<!-- schemas -->", "\n".join(_schemas()))
    return markdown


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Search without a server, by a script of ours in place of one of another site."""
    path = posixpath.relpath("worker.js", posixpath.dirname(page.url) or ".")
    return output.replace(FETCHED, path)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """The same of the page for addresses that are not there, as of the root of a server."""
    return output_content.replace(FETCHED, "/worker.js")


def _start_page() -> str:
    """The README, with links as from a page in ``docs/``."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return re.sub(r"\]\((?![#/]|\w+:)(?:docs/)?", lambda link: _moved(link[0]), text)


def _moved(link: str) -> str:
    return "](" if link.endswith("docs/") else "](../"


def _inside(link: re.Match[str], folder: str) -> str:
    """The link as it is within the site; of a file that is not in it, its name."""
    path = posixpath.normpath(posixpath.join(folder, link["target"]))
    if not path.startswith("../"):
        return link[0]
    if path in INDEXES:
        start = posixpath.relpath(INDEXES[path], folder or ".")
        return f"[{link['text']}]({start}{link['anchor'] or ''})"
    name = f"`{path.removeprefix('../')}`"
    return name if link["text"] in (name, name.strip("`")) else f"{link['text']} ({name})"


def _table(path: Path) -> str:
    """A table of results in place of the link to its file."""
    title, run, *lines = path.read_text(encoding="utf-8").splitlines()
    columns, *rows = csv.reader(lines)
    cells = [columns, ["---"] * len(columns), *rows]
    body = "\n".join("| " + " | ".join(row) + " |" for row in cells)
    return f"**{title.lstrip('# ')}**\n\n{body}\n\n*{run.lstrip('# ')}*"


def _decisions() -> str:
    lines = ["# Decisions", "", "Why it is as it is, a page for each choice.", ""]
    for path in sorted((ROOT / "docs/decisions").glob("0*.md")):
        title = path.read_text(encoding="utf-8").splitlines()[0].removeprefix("# ")
        lines.append(f"- [{title.replace('. ', ' ', 1)}]({path.name})")
    return "\n".join(lines) + "\n"


def _schemas() -> Iterator[str]:
    """A row for each kind of document."""
    yield "| `format` | schema |"
    yield "|---|---|"
    for name in DOCUMENTS:
        yield f"| `stagewright-{name}` | [{name}.json](../schemas/{name}.json) |"


def _commands() -> Iterator[str]:
    """A section for each command: what it does, its arguments and options, examples."""
    group: Any = typer.main.get_command(app)
    panel = None
    for name, command in group.commands.items():
        if command.rich_help_panel != panel:
            panel = command.rich_help_panel
            yield f"## {panel}\n"
        yield from _command(name, command)


def _command(name: str, command: Any) -> Iterator[str]:
    context = command.make_context(f"stagewright {name}", [], resilient_parsing=True)
    yield f"### {name}\n"
    yield f"{_plain(command.help)}\n"
    yield f"```text\n{command.get_usage(context).removeprefix('Usage: ')}\n```\n"
    yield "| option | meaning |"
    yield "|---|---|"
    for one in command.params:
        if record := one.get_help_record(context):
            option, meaning = record
            yield f"| <code>{_cell(option)}</code> | {_cell(meaning)} |"
    yield f"\n```text\n{cleandoc(EXAMPLES[name])}\n```\n"


def _cell(text: str) -> str:
    return _plain(" ".join(text.split())).replace("|", "&#124;")


def _plain(text: str) -> str:
    """Help with words like ``<int>`` and ``a_b*c`` as they are."""
    marked = {"<": "&lt;", "*": "\\*", "_": "\\_", "[": "\\["}
    pieces = re.split(r"(`[^`]*`)", text)  # code stays as it is
    return "".join(
        piece if piece.startswith("`") else re.sub(r"[<*_[]", lambda one: marked[one[0]], piece)
        for piece in pieces
    )
