"""Routes of the page that browsers show."""

from functools import cache
from importlib.resources import files

from fastapi import APIRouter, HTTPException, Response
from fastapi.responses import RedirectResponse

from stagewright.executor.drawing.web.render import FOLDER as DRAWING
from stagewright.service.http.guard import Serving
from stagewright.service.http.openapi import Html

OWN = "stagewright.service.http.page"
MEDIA_TYPES = {
    "css": "text/css", "html": "text/html", "js": "text/javascript", "json": "application/json",
    "svg": "image/svg+xml",
}  # fmt: skip

router = APIRouter(include_in_schema=False)  # the page holds nothing that needs a token


@router.get("/")
def show_page(service: Serving) -> Response:
    """The page; under a prefix it is also shown without the slash after it."""
    root = service.proxies.root_path
    if root:
        return Html(_content("index.html").replace(b'"page/', f'"{root}/page/'.encode()))
    return _response("index.html")


@router.get("/admin")
def show_administration() -> Response:
    """The page, where administrators see the queue, the workers and the users."""
    return RedirectResponse("./#/admin")


@router.get("/page/{name}")
def read_file(name: str) -> Response:
    """A file that the page loads; its names are those in the two folders alone."""
    return _response(name)


def _response(name: str) -> Response:
    if name not in _folders():
        raise HTTPException(404, f"there is no file {name!r}")
    return Response(_content(name), media_type=MEDIA_TYPES[name.rpartition(".")[2]])


@cache
def _folders() -> dict[str, str]:
    """The folder of each file that browsers load."""
    return {
        one.name: folder
        for folder in (DRAWING, OWN)
        for one in files(folder).iterdir()
        if one.name.rpartition(".")[2] in MEDIA_TYPES
    }


@cache
def _content(name: str) -> bytes:
    return files(_folders()[name]).joinpath(name).read_bytes()
