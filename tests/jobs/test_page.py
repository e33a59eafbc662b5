"""The service's page: its files, and what a browser does with them on a real server."""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("fastapi", reason="the service is not installed")
pytest.importorskip("httpx", reason="httpx is not installed")

from browser import Browser, browsing
from fastapi.testclient import TestClient
from pages import CHROMIUM
from planning_jobs import TWO_JOBS, plan_request, traced
from profiles import slow_after
from served import served

from stagewright.cli.solving import _row
from stagewright.client import JobState
from stagewright.executor.export import FORMATS
from stagewright.executor.export.layouts import EVERY_FORMAT
from stagewright.executor.export.runtimes import RUNTIMES
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents import documents
from stagewright.service.http.app import MEDIA_TYPES, create_app
from stagewright.service.http.guard import Service
from stagewright.service.http.tokens import Scope, Tokens
from stagewright.service.jobs.kinds import KINDS, parse_request
from stagewright.service.jobs.queue import Queue
from stagewright.service.jobs.records import JobEnding
from stagewright.service.jobs.store import ServiceStore
from stagewright.solvers.planning import PLANNERS

STORE = "stagewright-jobs.sqlite"
NO_WORKERS = ("--workers", "0")
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")

ENDED = "['optimal', 'feasible'].includes(document.querySelector('.state')?.textContent)"
CURVES = "document.querySelector('.gap .chart')?.chart?.data.series.length === 2"  # cost and bound
SMALL = {
    "model_type": "llama", "hidden_size": 512, "intermediate_size": 2048, "vocab_size": 32000,
    "num_hidden_layers": 4, "num_attention_heads": 8,
}  # fmt: skip
DRAWN = "document.querySelector('.timeline canvas')"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TestClient]:
    """A service that is only read."""
    store = ServiceStore(f"sqlite:///{tmp_path_factory.mktemp('client') / STORE}")
    with TestClient(create_app(Service(store))) as found:
        yield found
    store.close()


def test_the_page_loads_only_what_the_service_has(client: TestClient) -> None:
    text = client.get("/").text
    names = re.findall(r'(?:src|href)="([^"#]+)"', text)
    assert "page/main.js" in names
    for name in names:
        response = client.get(f"/{name}")
        assert response.status_code == 200, name
        assert response.headers["content-type"].startswith(MEDIA_TYPES[name.rpartition(".")[2]])
        if name.endswith(".js"):
            names += [f"page/{one}" for one in re.findall(r'from "\./([^"]+)"', response.text)]
    # The policy forbids scripts and styles inside the page.
    assert not re.search(r"<style|<script>|\son\w+=|\sstyle=", text)
    for name in ("render.py", "..%2Fpages.py", "base.html.jinja", "nothing.js"):
        assert client.get(f"/page/{name}").status_code == 404, name


def test_the_page_offers_all_planners_and_formats(client: TestClient) -> None:
    form, script = client.get("/").text, client.get("/page/job.js").text

    def options(name: str) -> set[str]:
        (inside,) = re.findall(rf'<select name="{name}">(.*?)</select>', form, flags=re.DOTALL)
        return set(re.findall(r"<option>([^<]+)", inside))

    assert options("planner") == set(PLANNERS)
    assert options("runtime") == set(RUNTIMES)
    formats, layouts = re.findall(r"FORMATS = (\[.*?\])", script, flags=re.DOTALL)
    assert json.loads(formats) == list(FORMATS)
    assert json.loads(layouts) == list(EVERY_FORMAT)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_has_an_example_that_is_a_request(kind: str, client: TestClient) -> None:
    parse_request(kind, client.get(f"/page/example-{kind}.json").text)


# --- In a browser ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Site:
    """A server, a browser that looks at it, and two jobs that have a plan."""

    url: str
    browser: Browser
    jobs: tuple[str, str]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("page")
    with served(folder) as (url, _), browsing(folder) as browser:
        browser.open(f"{url}/#/new", 1400)
        jobs = tuple(submitted(browser, "dp", count) for count in (8, 4))
        yield Site(url, browser, (jobs[0], jobs[1]))


def submitted(browser: Browser, planner: str, count: int, seconds: int = 10) -> str:
    """Submit the example by the form; the job, once it is shown."""
    go(browser, *VIEWS["new"])
    browser.run("document.querySelector('[name=example]').click()")
    browser.await_that("document.querySelector('#cluster-told').textContent.includes('4 devices')")
    given = {"planner": planner, "count": count, "time_limit": seconds}
    for name, value in given.items():
        browser.run(f"document.querySelector('form.request').elements.{name}.value = '{value}'")
    browser.run("document.querySelector('form.request').requestSubmit()")
    browser.await_that(f"/^#\\/jobs\\/\\w+$/.test(location.hash) && {DRAWN}")
    if seconds <= 10:
        browser.await_that(ENDED)
    return str(browser.run("location.hash")).removeprefix("#/jobs/")


def go(browser: Browser, place: str, until: str) -> None:
    """Go to a view, and wait until it is there."""
    for step, there in (("nothing", "!document.querySelector('#view *')"), (place, until)):
        browser.run(f"location.hash = '#/{step}'")
        browser.await_that(there)


VIEWS = {  # the place of each, and what is true once it is there
    "new": ("new", "document.querySelector('form.request')"),
    "jobs": ("jobs", "document.querySelectorAll('.list tbody tr').length >= 2"),
    "job": ("jobs/{0}", f"{DRAWN} && {CURVES}"),
    "kind": ("new/schedule", "document.querySelector('[name=microbatches]')"),
    "admin": ("admin", "document.querySelector('.admin .state.idle')"),
    "two": ("compare/{0}/{1}", "document.querySelectorAll('.timeline canvas').length === 2"),
}
QUICK = [("job", 360, True), ("two", 360, False)]
LOOKS = [*product(VIEWS, (1400, 768, 360), (False, True))]


@in_a_browser
@pytest.mark.parametrize(
    ("view", "width", "dark"),
    slow_after(len(QUICK), [*QUICK, *(one for one in LOOKS if one not in QUICK)]),
)
def test_every_view_fits_its_window(
    view: str, width: int, dark: bool, site: Site, tmp_path: Path
) -> None:
    browser = site.browser
    browser.look(width, dark)
    place, until = VIEWS[view]
    go(browser, place.format(*site.jobs), until)
    browser.picture(tmp_path / f"{view}-{width}-{'dark' if dark else 'light'}.png")
    assert browser.run("document.documentElement.scrollWidth") <= width
    background = "rgb(14, 18, 23)" if dark else "rgb(245, 246, 248)"
    assert browser.run("getComputedStyle(document.body).backgroundColor") == background
    # Everything that is operated has a name, and what is drawn is said.
    nameless = """[...document.querySelectorAll("#view :is(input, select, button, canvas)")].filter(
        (one) => !(one.labels?.length || one.ariaLabel || one.closest("[aria-label]")
          || one.textContent.trim())).length"""
    assert browser.run(nameless) == 0
    assert browser.run("document.querySelectorAll('h1').length") == 1
    assert browser.run("document.getAnimations().length") == 0  # for those who get sick by motion
    assert browser.run("document.querySelector('#problem').textContent") == ""
    assert browser.errors == []


@pytest.mark.parametrize(
    "part", ["chain", "cluster", "graph", "workload", "pool", "market", "tuning"]
)
def test_the_schema_of_every_document_says_its_format(part: str, client: TestClient) -> None:
    """So that the page refuses another document where it is dropped."""
    components = client.get("/v1/openapi.json").json()["components"]["schemas"]
    requests = [kind.request for kind in KINDS.values() if part in kind.request.model_fields]
    (first, *_) = [one for one in requests if one.__name__ != "DivideRequest"]
    found = components[first.__name__]["properties"][part]
    while "$ref" not in found:
        found = found["anyOf"][0]
    properties = components[found["$ref"].rpartition("/")[2]]["properties"]
    assert properties["format"]["const"].startswith("stagewright-")


def test_the_page_and_the_command_know_whose_costs_are_seconds(client: TestClient) -> None:
    (timed,) = re.findall(r"TIMED = new Set\((\[.*?\])\)", client.get("/page/dom.js").text)
    assert set(json.loads(timed)) == {name for name, kind in KINDS.items() if kind.timed}
    job = {field.name: None for field in fields(JobState)} | {"cost": 0.025, "bound": None}
    units = [_row(JobState(**job | {"kind": kind}), ())[4:6] for kind in ("plan", "jobshop")]
    assert units == [("25 ms", "-"), ("0.025 units", "-")]


@in_a_browser
def test_a_problem_is_said_at_its_place(site: Site, tmp_path: Path) -> None:
    browser = site.browser
    go(browser, *VIEWS["new"])
    browser.run("document.querySelector('[name=example]').click()")
    browser.await_that("document.querySelector('#chain-told').textContent.includes('layers')")
    drop = """(() => {
      const data = new DataTransfer();
      data.items.add(new File(['TEXT'], 'model.json'));
      document.querySelector('[data-part=chain]').dispatchEvent(
        new DragEvent('drop', {dataTransfer: data, cancelable: true}));
    })()"""
    said = "document.querySelector('form.request [role=alert]').textContent"
    browser.run(drop.replace("TEXT", "{"))
    browser.await_that(f"{said}.includes('model.json is no JSON')")
    assert browser.run("document.querySelector('#chain-told').textContent") == ""
    browser.run(drop.replace("'TEXT'", "new Uint8Array([31, 139, 8, 0])"))
    browser.await_that(f"{said}.includes('model.json is no text; unpack it')")
    browser.run(drop.replace("TEXT", '{"name": "one", "layers": 3}'))
    browser.await_that("document.querySelector('#chain-told').textContent === 'one'")
    browser.run(drop.replace("TEXT", '{"name": "one", "layers": [3]}'))
    browser.await_that("document.querySelector('#chain-told').textContent === 'one · 1 layer'")
    for document, told in (
        ('{"architectures": ["Llama"], "model_type": "llama"}', "is a Hugging Face configuration"),
        ('{"format": "stagewright-cluster"}', "stagewright-cluster document; it belongs under Cl"),
        ('{"format": "stagewright-trace"}', "no field of this job takes it, here a stagewri"),
    ):
        browser.run(drop.replace("TEXT", document))
        browser.await_that(f"{said}.startsWith('chain model.json') && {said}.includes('{told}')")
        assert browser.run("document.activeElement.id") == "chain-file"
        assert browser.run("document.querySelector('#chain-told').textContent") == ""
    browser.picture(tmp_path / "refused.png")
    browser.run(drop.replace("TEXT", '{"name": "one", "layers": 3}'))
    browser.await_that(f"{said} === ''")
    browser.run("document.querySelector('form.request').requestSubmit()")
    browser.await_that(f"{said}.startsWith('chain')")
    assert browser.run("document.activeElement.id") == "chain-file"
    # The browser itself notes that a request was refused.
    assert [one for one in browser.errors if " 422 " not in one] == []
    browser.errors.clear()


@in_a_browser
def test_a_dropped_configuration_is_planned_and_a_layout_explained(
    site: Site, tmp_path: Path
) -> None:
    browser = site.browser
    browser.look(768, True)
    go(browser, *VIEWS["new"])
    config = json.dumps(SMALL)
    browser.run(f"""(() => {{
      const data = new DataTransfer();
      data.items.add(new File([{json.dumps(config)}], 'config.json'));
      document.querySelector('.any').dispatchEvent(
        new DragEvent('drop', {{dataTransfer: data, cancelable: true}}));
    }})()""")
    browser.await_that("document.querySelector('#config-told')?.textContent.includes('blocks')")
    assert browser.run("location.hash") == "#/new/train-plan"
    told = browser.run("document.querySelector('#config-told').textContent")
    assert re.fullmatch(r"llama: 4 blocks, [\d.]+ B parameters", told)
    given = {"device": "h100", "gpus": 8, "global_batch": 16, "sequence": 512, "tensor": "1,2"}
    for name, value in given.items():
        browser.run(f"document.querySelector('form.request').elements.{name}.value = '{value}'")
    browser.run("document.querySelector('form.request').requestSubmit()")
    for shown in ("td button", "section + section table"):
        browser.await_that(f"{ENDED} && document.querySelector('{shown}')")
        browser.picture(tmp_path / f"layouts-{shown[:2]}.png")
        assert browser.run("document.documentElement.scrollWidth") <= 768
        assert browser.run("document.querySelectorAll('.memory .room i').length") >= 6
        browser.run("[...document.querySelectorAll('td button')].at(-1).click()")
        browser.await_that("!document.querySelector('.memory')")
    browser.await_that("document.querySelector('h2')?.textContent.startsWith('Why not p')")
    assert browser.run("document.querySelector('#problem').textContent") == ""
    assert browser.errors == []


@in_a_browser
def test_a_job_of_an_allocation_is_chosen_to_be_explained(site: Site) -> None:
    browser = site.browser
    go(browser, "new/allocate", "document.querySelector('form.request')")
    browser.run("document.querySelector('[name=example]').click()")
    browser.await_that("document.body.innerText.includes('8 jobs')")
    browser.run("document.querySelector('form.request').requestSubmit()")
    browser.await_that("document.querySelector('td button')?.innerText === 'transformer-0'")
    browser.run("document.querySelector('td button').click()")
    browser.await_that("document.querySelector('h2')?.textContent === 'Why transformer-0?'")
    assert browser.run("document.querySelector('#problem').textContent") == ""
    assert browser.errors == []


@in_a_browser
def test_a_run_is_told_to_a_tuning(site: Site) -> None:
    browser = site.browser
    go(browser, "new/tune-read", "document.querySelector('form.request')")
    browser.run("document.querySelector('[name=example]').click()")
    trials, tables = "document.querySelector('[name=trials]')", "document.querySelectorAll('table')"
    browser.await_that(f"{trials}.value.split('\\n').length === 3")
    browser.run("document.querySelector('form.request').requestSubmit()")
    browser.await_that(f"{ENDED} && {tables}.length === 2")
    assert browser.run(f"{tables}[0].querySelectorAll('tbody tr').length") == 3
    add = "[...document.querySelectorAll('button')].find((one) => one.innerText === 'Add trials')"
    browser.run(f"{add}.click()")
    browser.await_that(f"{trials}?.value.endsWith(': ')")  # a line for the next layout
    for seconds, told in (("soon", "[role=alert]"), ("3.3", "output")):
        browser.run(f"{trials}.value = {trials}.value.replace(/: .*$/, ': {seconds}')")
        browser.run("document.querySelector('[name=validate]').click()")
        browser.await_that(f"document.querySelector('form.request {told}').textContent")
    assert [one for one in browser.errors if " 422 " not in one] == []
    browser.errors.clear()


@in_a_browser
def test_an_export_asks_for_what_its_format_needs(site: Site) -> None:
    browser = site.browser
    go(browser, f"jobs/{site.jobs[0]}", DRAWN)
    browser.run("""(() => {
      const plain = window.fetch;
      window.fetch = async (...asked) => {
        const found = await plain(...asked);
        if (String(asked[0]).includes('/export/')) window.exported = found.status;
        return found;
      };
      const place = document.querySelector('.export'), format = place.querySelector('select');
      format.value = 'kubernetes';
      format.dispatchEvent(new Event('change'));
      const [command, image] = [...place.querySelectorAll('input')].filter((one) => !one.hidden);
      command.value = 'python train.py';
      image.value = 'train:1';
      place.querySelector('button').click();
    })()""")
    browser.await_that("window.exported")
    assert browser.run("window.exported") == 200
    assert browser.run("document.querySelector('#problem').textContent") == ""
    assert browser.errors == []


@in_a_browser
def test_the_launch_files_of_a_round_are_downloaded(site: Site, tmp_path: Path) -> None:
    browser = site.browser
    rates = {"alone": [{"model": "m", "scale": 1, "accelerator": "h100", "steps_per_second": 1.0}]}
    run = {"name": "pretrain", "model": "m", "steps": 10.0, "command": "train"}
    pool = {"accelerators": [{"name": "h100", "count": 2, "per_server": 1}]}
    asked = {"workload": {"jobs": [run], "throughputs": rates}, "pool": pool, "rounds": 1}
    headers = {"Content-Type": "application/json"}
    download = (
        "[...document.querySelectorAll('button')].find((one) => /launch/.test(one.innerText))"
    )
    for more, hidden in (({}, True), ({"to": "slurm"}, False)):
        sent = json.dumps({"method": "POST", "headers": headers, "body": json.dumps(asked | more)})
        job = browser.run(f"fetch('v1/rounds', {sent}).then((told) => told.json())")["id"]
        go(browser, f"jobs/{job}", f"{ENDED} && {DRAWN}")
        assert browser.run(f"{download}.hidden") == hidden
    browser.picture(tmp_path / "round.png")
    browser.run("""(() => {
      const click = HTMLAnchorElement.prototype.click;
      HTMLAnchorElement.prototype.click = function () {
        window.saved = this.download;
        click.call(this);
      };
    })()""")
    browser.run(f"{download}.click()")
    browser.await_that("window.saved === 'round.zip'")
    assert browser.run("document.querySelector('#problem').textContent") == ""
    assert browser.errors == []


BROUGHT = "document.querySelectorAll('form.request [aria-invalid]').length === {}"
OTHERS = ["jobshop", *(kind for kind in KINDS if kind not in ("plan", "jobshop"))]


@in_a_browser
@pytest.mark.parametrize("kind", slow_after(1, OTHERS))
def test_every_kind_is_submitted_and_its_answer_shown(
    kind: str, site: Site, tmp_path: Path
) -> None:
    browser = site.browser
    browser.look(360, False)
    go(browser, f"new/{kind}", "document.querySelector('form.request')")
    browser.run("document.querySelector('form.request').requestSubmit()")
    browser.await_that(BROUGHT.format(1))  # what is missing is said there
    browser.run("document.querySelector('[name=example]').click()")
    browser.await_that(BROUGHT.format(0))
    browser.picture(tmp_path / f"{kind}-form.png")
    assert browser.run("document.documentElement.scrollWidth") <= 360
    browser.run("document.querySelector('form.request').requestSubmit()")
    shown = "document.querySelector('#view .timeline canvas, #view table')"
    browser.await_that(f"/^#\\/jobs\\/\\w+$/.test(location.hash) && {ENDED} && {shown}")
    for width in (360, 768, 1400):
        browser.look(width, width == 768)
        browser.picture(tmp_path / f"{kind}-{width}.png")
        assert browser.run("document.documentElement.scrollWidth") <= width
    assert kind in browser.run("document.querySelector('p.sub').textContent")
    assert browser.run("document.querySelector('#problem').textContent") == ""
    assert browser.errors == []


@in_a_browser
def test_a_field_that_is_wrong_is_said_beside_it(site: Site) -> None:
    browser = site.browser
    go(browser, "new/jobshop", "document.querySelector('form.request')")
    browser.run("document.querySelector('[name=example]').click()")
    browser.await_that("document.querySelector('#jobs-told').textContent === '4 entries'")
    browser.run("document.querySelector('[name=time_limit]').value = -1")
    browser.run("document.querySelector('[name=validate]').click()")
    browser.await_that("document.querySelector('form.request [role=alert]').textContent")
    beside = "document.querySelector('label:has([name=time_limit]) + [role=alert]').textContent"
    assert browser.run(beside).startswith("time_limit")
    assert browser.run("document.activeElement.name") == "time_limit"
    # A document may be pasted; what is wrong in it is said below it.
    browser.run("document.querySelector('[name=time_limit]').value = ''")
    browser.run("""(() => {
      const text = document.querySelector('[data-part=jobs] textarea');
      text.value = '[[["a", 3]]]';
      text.dispatchEvent(new Event('change'));
      document.querySelector('[name=validate]').click();
    })()""")
    within = "document.querySelector('[data-part=jobs] [role=alert]')?.textContent"
    browser.await_that(f"{within}?.startsWith('jobs')")
    assert [one for one in browser.errors if " 422 " not in one] == []
    browser.errors.clear()


@in_a_browser
@pytest.mark.slow
def test_a_job_is_submitted_and_read_by_keys_alone(site: Site, tmp_path: Path) -> None:
    browser = site.browser
    browser.look(1400, True)

    def reach(what: str) -> None:
        for _ in range(80):
            if browser.run(f"document.activeElement.matches({what!r})"):
                return
            browser.press("Tab", 9)
        raise AssertionError(f"{what} is not reached")

    go(browser, "new/plan", "document.querySelector('form.request')")
    reach("[name=example]")
    browser.press(" ", 32)
    browser.await_that("document.querySelector('#cluster-told').textContent.includes('4 devices')")
    reach("button.main")
    browser.press(" ", 32)
    browser.await_that(f"/^#\\/jobs\\/\\w+$/.test(location.hash) && {ENDED} && {DRAWN}")
    job = browser.run("location.hash").removeprefix("#/")
    go(browser, job, f"{DRAWN} && document.querySelector('.topology canvas')")
    reach(".topology .scroller")
    said = "document.querySelector('.topology .status').textContent"
    browser.press("ArrowRight", 39)
    browser.await_that(f"{said}.startsWith('s0g0 ')")
    browser.press("ArrowRight", 39)
    browser.await_that(f"{said}.startsWith('s0g1 ')")
    browser.picture(tmp_path / "picked.png")
    reach(".topology ~ details summary")
    browser.press(" ", 32)
    rows = "document.querySelectorAll('.topology ~ details[open] tbody tr').length"
    browser.await_that(f"{rows} >= 1")
    assert browser.errors == []


@in_a_browser
@pytest.mark.slow
def test_a_run_is_shown_above_its_prediction(site: Site, tmp_path: Path) -> None:
    browser, job = site.browser, site.jobs[0]
    text = browser.run(f"fetch('v1/jobs/{job}/plan').then((found) => found.text())")
    plan = documents.parse(PipelinePlan, text, "plan")
    drop = """(() => {
      const data = new DataTransfer();
      data.items.add(new File([TEXT], 'trace.json'));
      document.querySelector('.measured .drop').dispatchEvent(
        new DragEvent('drop', {dataTransfer: data, cancelable: true}));
    })()"""
    browser.look(1400, False)
    go(browser, f"jobs/{job}", "document.querySelector('.measured')")
    browser.run(drop.replace("TEXT", "'{}'"))
    browser.await_that("document.querySelector('.measured [role=alert]').textContent")
    browser.run(drop.replace("TEXT", json.dumps(documents.to_json(traced(plan, 2.0)))))
    drawn = "[...document.querySelectorAll('.measured .timeline')].map((one) => one.timeline?.data)"
    browser.await_that(f"{drawn}.length === 2 && {drawn}.every(Boolean)")
    assert browser.run("document.querySelector('.measured [role=alert]').textContent") == ""
    measured, predicted = browser.run(f"{drawn}.map((one) => [one.end, one.unit])")
    assert measured == predicted  # on one scale
    said = browser.run("document.querySelector('.measured .facts').textContent")
    assert "2measured over predicted" in said
    for width, dark in ((1400, False), (360, True)):
        browser.look(width, dark)
        browser.picture(tmp_path / f"measured-{width}.png")
        assert browser.run("document.documentElement.scrollWidth") <= width
    assert [one for one in browser.errors if " 422 " not in one] == []
    browser.errors.clear()


@in_a_browser
@pytest.mark.slow
def test_a_search_is_watched_stopped_and_discarded(site: Site, tmp_path: Path) -> None:
    browser = site.browser
    browser.look(1400, False)
    job = submitted(browser, "general", 16, seconds=600)
    browser.await_that(CURVES)
    browser.picture(tmp_path / "solving.png")
    buttons = "[...document.querySelectorAll('.buttons button')]"
    button = buttons + ".find((one) => one.textContent === '{}')"
    browser.run(f"{button.format('Stop, keep the best')}.click()")
    browser.await_that(ENDED)
    assert "stopped by user" in browser.run("document.querySelector('p.sub').textContent")
    assert not browser.run(f"{button.format('Try again')}.hidden")
    # What cannot be undone takes two presses.
    browser.run(f"{button.format('Discard')}.click()")
    browser.await_that(button.format("Discard for good?"))
    browser.run(f"{button.format('Discard for good?')}.click()")
    browser.await_that("location.hash === '#/jobs' && document.querySelector('.list table')")
    assert not browser.run(f"Boolean(document.querySelector('a[href$=\"{job}\"]'))")
    assert browser.errors == []


@in_a_browser
@pytest.mark.slow
def test_where_events_do_not_come_the_history_is_asked(site: Site) -> None:
    browser = site.browser
    browser.run("""window.fetch = ((real) => (path, ...more) => `${path}`.endsWith("/events")
      ? Promise.reject(new TypeError("no streams here")) : real(path, ...more))(window.fetch)""")
    job = submitted(browser, "dp", 2)
    browser.await_that(CURVES)
    go(browser, f"jobs/{job}", CURVES)  # and where it has ended before it is looked at
    browser.open(f"{site.url}/?again", 1400)  # with the browser's own again
    browser.await_that("document.querySelector('.list table')")
    assert browser.errors == []


@in_a_browser
@pytest.mark.slow
def test_older_jobs_are_on_further_pages(tmp_path: Path) -> None:
    store = ServiceStore(f"sqlite:///{tmp_path / STORE}")
    jobs = [store.submit("local", "jobshop", TWO_JOBS)[0].id for _ in range(21)]
    store.ask(jobs[0], JobEnding.STOP)
    store.close()
    links = "[...document.querySelectorAll('.list a')]"
    with served(tmp_path, *NO_WORKERS) as (url, _), browsing(tmp_path) as browser:
        browser.open(url, 360)
        browser.await_that(f"{links}.length === 20")
        browser.run("document.querySelector('.list + .buttons a').click()")
        browser.await_that(f"{links}.length === 1 && {links}[0].hash === '#/jobs/{jobs[0]}'")
        browser.run("document.querySelector('.list + .buttons a').click()")
        browser.await_that(f"{links}.length === 20")
        browser.run("""const states = document.querySelector('.tools select');
          states.value = 'failed'; states.dispatchEvent(new Event('change'))""")
        browser.await_that(f"{links}.length === 1")
        assert browser.errors == []


@in_a_browser
def test_an_administrator_sees_the_queue_and_stops_a_job_by_keys(tmp_path: Path) -> None:
    store = ServiceStore(f"sqlite:///{tmp_path / STORE}")
    title = "a-name-that-never-ends-" * 8
    requests = [plan_request(microbatches=2 + i) for i in range(120)]
    jobs = [store.submit("u" * 90, "plan", one, title=title)[0].id for one in requests]
    rows = "[...document.querySelectorAll('section:nth-of-type(2) .admin tbody tr')]"
    with served(tmp_path, *NO_WORKERS) as (url, _), browsing(tmp_path) as browser:
        browser.open(f"{url}/admin", 1400)
        browser.await_that(f"{rows}.length === 20 && !document.querySelector('#admin').hidden")
        browser.run("document.querySelector('[data-key=more]').click()")
        browser.await_that(f"{rows}.length === 100")
        for width, dark in ((768, False), (360, True), (1400, False)):
            browser.look(width, dark)
            browser.picture(tmp_path / f"admin-{width}.png")
            assert browser.run("document.documentElement.scrollWidth") <= width
        assert "no worker is alive" in browser.run(f"{rows}[0].textContent")
        # What is pressed first only asks, and keeps the focus while the rows are drawn anew.
        browser.run(f"{rows}[0].querySelector('button').focus()")
        browser.press(" ", 32)
        store.submit("ann", "jobshop", TWO_JOBS, priority=5)
        browser.await_that(f"{rows}[1].textContent.includes('ann')")
        assert browser.run("document.activeElement.ariaLabel").endswith(f"{jobs[0][:8]}: sure?")
        assert store.get(jobs[0]).state == "queued"
        browser.press(" ", 32)
        browser.await_that("document.querySelector('.facts').textContent.includes('1failed')")
        assert store.get(jobs[0]).stopped_by == "user"
        # Nobody else is offered what they may not see.
        submit = Tokens(store.engine).create("ann", Scope.SUBMIT)
        browser.run(f"sessionStorage.setItem('stagewright-token', '{submit}')")
        browser.open(f"{url}/?again", 1400)
        browser.await_that("document.querySelector('.list table')")
        assert browser.run("document.querySelector('#admin').hidden")
        assert browser.errors == []
    store.close()


@in_a_browser
@pytest.mark.slow
def test_a_first_plan_of_which_nothing_is_heard_is_explained(tmp_path: Path) -> None:
    store = ServiceStore(f"sqlite:///{tmp_path / STORE}")
    job, _ = store.submit("local", "plan", plan_request())
    queue, warm = Queue(store), "[...document.querySelectorAll('p.told')].find((one) => "
    warm += "one.textContent.includes('compiles its kernels'))"
    queue.claim("w", 600.0)
    with served(tmp_path, *NO_WORKERS) as (url, _), browsing(tmp_path) as browser:
        browser.open(f"{url}/#/jobs/{job.id}", 768)
        browser.await_that(f"{warm} && !{warm}.hidden")
        queue.improve(job.id, "w", None, 0.5)
        browser.await_that(f"{warm}.hidden")
        assert browser.errors == []
    store.close()


@in_a_browser
@pytest.mark.slow
def test_a_token_is_asked_for_and_kept_for_the_session(tmp_path: Path) -> None:
    store = ServiceStore(f"sqlite:///{tmp_path / STORE}")
    token = Tokens(store.engine).create("ann", Scope.SUBMIT)
    store.close()
    give = """document.querySelector('#token-text').value = '{}';
      document.querySelector('#token').requestSubmit()"""
    with served(tmp_path) as (url, _), browsing(tmp_path) as browser:
        browser.open(url, 360)
        asked = "document.querySelector('#token:not([hidden])')"
        browser.await_that(asked)
        browser.run(give.format("wrong"))
        browser.await_that("document.querySelector('#problem').textContent.includes('token')")
        browser.await_that(asked)
        browser.run(give.format(token))
        browser.await_that("document.querySelector('.list p')")
        assert not browser.run(f"Boolean({asked})")
        assert browser.run("sessionStorage.length") == 1
        assert browser.run("localStorage.length") == 0
        job = submitted(browser, "dp", 4)
        assert job in browser.run("location.hash")
        assert [one for one in browser.errors if " 401 " not in one] == []
