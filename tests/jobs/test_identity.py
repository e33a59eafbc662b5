"""Who a request is of: tokens that expire, proxies that are trusted, and what is noted of it."""

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
from asking import OTHER, Answer, Pairs, ask, asked, scope_of
from browser import browsing
from commands import answered, refused
from pages import CHROMIUM
from planning_jobs import TWO_JOBS, Clock
from served import behind, listening

pytest.importorskip("fastapi", reason="the service is not installed")

from sqlalchemy import event

from stagewright.client import Client
from stagewright.graphs.documents.errors import InputError
from stagewright.service.http import jobs, tokens
from stagewright.service.http.app import create_app
from stagewright.service.http.audit import audited
from stagewright.service.http.guard import Service
from stagewright.service.http.identity import Proxies, networks
from stagewright.service.http.limits import RequestRate
from stagewright.service.http.tokens import Scope, Tokens, id_of
from stagewright.service.jobs.store import ServiceStore

NAME = "X-Forwarded-User"
BEHIND = Proxies(networks(["10.0.0.2", "fd00::/16"]), NAME, frozenset({"root"}))
PROXY = "10.0.0.2"


def bearer(token: str) -> tuple[str, str]:
    """A header."""
    return "Authorization", f"Bearer {token}"


# --- The table of who is who ----------------------------------------------------------------------

# What a proxy's header may look like, and the user whom docs/serving.md says that it names: None
# where it names nobody, "" where it is refused.
HEADERS: list[tuple[Pairs, str | None]] = [
    ((), None),
    ([(NAME, "")], None),
    ([("X_Forwarded_User", "ann")], None),
    ([("X-Forwarded-Users", "ann")], None),
    ([("Forwarded", "for=ann")], None),
    ([(NAME, "ann")], "ann"),
    ([(NAME.upper(), "ann")], "ann"),
    ([(NAME, "root")], "root"),
    ([(NAME, "Root")], "Root"),
    ([(NAME, "ann@example.com")], "ann@example.com"),
    ([(NAME, "Zoë Ångström")], "Zoë Ångström"),
    ([(NAME, "\uff52oot")], "\uff52oot"),
    ([(NAME, "a" * 200)], "a" * 200),
    ([(NAME, "a" * 201)], ""),
    ([(NAME, "local")], ""),
    ([(NAME, "ann"), (NAME, "root")], ""),
    ([(NAME, "ann"), (NAME, "ann")], ""),
    ([(NAME, ""), (NAME, "ann")], ""),
    ([(NAME, "ann, root")], ""),
    ([(NAME, "ann,root")], ""),
    ([(NAME, b"zo\xeb")], ""),
    ([(NAME, "root\u200b")], ""),
    ([(NAME, "\u202etoor")], ""),
    ([(NAME, "root\u00a0")], ""),
    ([(NAME, "ro\tot")], ""),
    ([(NAME, " ann")], ""),
]
# Peers, and whether they are proxies that BEHIND names.
PEERS = [
    (PROXY, True), ("::ffff:10.0.0.2", True), ("fd00::1", True), ("10.0.0.3", False),
    (OTHER, False), ("::1", False), ("127.0.0.1", False), ("::10.0.0.2", False), (None, False),
]  # fmt: skip


@pytest.fixture
def made(store: ServiceStore) -> list[tuple[Pairs, tuple[str, Scope] | str | None]]:
    """Credentials, and whom they are of; "" where they are refused, None where they say nothing."""
    of, old = Tokens(store.engine), Tokens(store.engine, lambda: 0.0)
    revoked = of.create("tom", Scope.ADMIN)
    of.revoke(token=id_of(revoked))
    tom, local = of.create("tom", Scope.READ), of.create("local", Scope.SUBMIT)
    return [
        ([], None),
        ([("Authorization", "Basic cm9vdDpyb290")], None),
        ([bearer("eyJhbGciOiJub25lIn0.e30.")], None),
        ([("X-Authorization", f"Bearer {tom}")], None),
        ([bearer(tom)], ("tom", Scope.READ)),
        ([("authorization", f"bearer {tom}")], ("tom", Scope.READ)),
        ([bearer(of.create("ann", Scope.ADMIN, 60.0))], ("ann", Scope.ADMIN)),
        ([bearer(local)], ("local", Scope.SUBMIT)),
        ([bearer(revoked)], ""),
        ([bearer(old.create("tom", Scope.ADMIN, 60.0))], ""),
        ([bearer(tom[:-1])], ""),
        ([bearer(tom + ",")], ""),
        ([bearer(tom), bearer(tom)], ""),
        ([("Authorization", "Basic x"), bearer(tom)], ""),
    ]


@pytest.mark.parametrize(("peer", "trusted"), PEERS)
def test_who_is_who(
    store: ServiceStore, made: list[tuple[Pairs, Any]], peer: str | None, trusted: bool
) -> None:
    app = create_app(Service(store, proxies=BEHIND))

    async def ask_all() -> None:
        for (header, named), (credentials, holder) in product(HEADERS, made):
            expected = holder
            if holder is None and trusted and named:
                expected = named, Scope.ADMIN if named == "root" else Scope.SUBMIT
            found = await asked(app, scope_of("/v1/jobs", [*header, *credentials], peer))
            who = found.caller and (found.caller.user, found.caller.scope)
            case = peer, header, credentials, found
            assert (found.status, who) == ((200, expected) if expected else (401, None)), case
            assert ("www-authenticate" in found.headers) == (found.status == 401)

    asyncio.run(ask_all())


def test_without_an_identity_header_nobody_is_named(store: ServiceStore) -> None:
    for proxies in (Proxies(), Proxies(networks([PROXY]))):
        app = create_app(Service(store, proxies=proxies))
        assert ask(app, "/v1/jobs", [(NAME, "ann")], peer=PROXY).status == 401


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--identity-header", NAME], "name the proxy that sets it"),
        (["--identity-header", "X_User", "--trusted-proxy", PROXY], "write a header"),
        (["--identity-header", "Authorization", "--trusted-proxy", PROXY], "write a header"),
        (["--trusted-proxy", "10.0.0.1/8"], "host bits"),
        (["--trusted-proxy", "proxy"], "write an address"),
        (["--trusted-proxy", "0.0.0.0/0"], "everybody is there"),
        (["--trusted-proxy", "::/0"], "everybody is there"),
        (["--trusted-proxy", "::ffff:10.0.0.0/104"], "write it as IPv4"),
        (["--admin", "ann"], "goes with --identity-header"),
        (["--root-path", "planner"], "write it as /planner"),
        (["--root-path", "/a/../b"], "write it as /planner"),
        (["--root-path", "/v1/jobs"], "write it as /planner"),
        (["--root-path", "//evil.example"], "write it as /planner"),
        (["--audit-log", "/no/such/folder/log"], "No such file"),
    ],
)
def test_settings_that_trust_the_wrong_are_refused(options: list[str], told: str) -> None:
    assert told in refused("serve", *options)


# --- Addresses ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("peer", "forwarded", "client"),
    [
        (OTHER, ["203.0.113.9"], OTHER),
        (PROXY, ["203.0.113.9"], "203.0.113.9"),
        ("::ffff:10.0.0.2", ["203.0.113.9"], "203.0.113.9"),
        (PROXY, ["1.1.1.1, 203.0.113.9"], "203.0.113.9"),
        (PROXY, ["1.1.1.1", "203.0.113.9"], "203.0.113.9"),
        (PROXY, ["1.1.1.1, 203.0.113.9, fd00::7"], "203.0.113.9"),
        (PROXY, ["10.0.0.2, 203.0.113.9"], "203.0.113.9"),
        (PROXY, ["203.0.113.9:4711"], "203.0.113.9"),
        (PROXY, [], PROXY),
    ],
)
def test_addresses_are_of_clients_and_never_spoofed(
    store: ServiceStore, peer: str, forwarded: list[str], client: str
) -> None:
    app = create_app(Service(store, proxies=BEHIND))
    given = [("X-Forwarded-For", one) for one in forwarded]
    found = ask(app, "/v1/jobs", [*given, ("X-Forwarded-Proto", "https")], peer=peer)
    assert found.scope["client"][0] == client
    assert found.scope["scheme"] == ("http" if peer == OTHER else "https")


def test_bad_tokens_of_an_address_cost_no_look_and_lock_nobody_out(store: ServiceStore) -> None:
    clock = Clock()
    app = create_app(Service(store, proxies=BEHIND, rate=RequestRate(1.0, 3.0, clock)))
    good = [bearer(Tokens(store.engine).create(user, Scope.READ)) for user in ("ann", "bob")]
    looks: list[str] = []
    event.listen(store.engine, "before_cursor_execute", lambda *given: looks.append(given[2]))
    wrong = bearer("sw_" + "x" * 43)
    assert [ask(app, "/v1/jobs", [wrong]).status for _ in range(5)] == [401] * 3 + [429] * 2
    first = len(looks)
    missing = [(), [bearer("sw_y")], [bearer("x")], [(NAME, "ann")], [wrong, wrong]]
    assert {ask(app, "/v1/jobs", one).status for one in missing * 5} == {429}
    assert len(looks) - first <= 1  # all valid tokens at once, now and then
    assert [ask(app, "/v1/jobs", [one]).status for one in good] == [200, 200]
    assert ask(app, "/v1/jobs", [wrong]).status == 429  # good ones fill nothing
    # Behind one proxy others are asked as before; a /64 of IPv6 is one address.
    for one, status in (("203.0.113.9", 401), ("2001:db8::1", 401), ("2001:db8::ffff", 401)):
        given = [("X-Forwarded-For", one), wrong]
        assert ask(app, "/v1/jobs", given, peer=PROXY).status == status
    given = [("X-Forwarded-For", "2001:db8::2:1"), wrong]
    assert [ask(app, "/v1/jobs", given, peer=PROXY).status for _ in range(2)] == [401, 429]
    assert ask(app, "/v1/jobs", [(NAME, "ann")], peer=PROXY).status == 200


def test_good_tokens_are_not_counted_for_their_address(store: ServiceStore) -> None:
    app = create_app(Service(store, rate=RequestRate(1.0, 2.0, Clock())))
    users = [bearer(Tokens(store.engine).create(f"{number}", Scope.READ)) for number in range(5)]
    assert [ask(app, "/v1/jobs", [one]).status for one in users * 2] == [200] * 10
    assert [ask(app, "/v1/jobs").status for _ in range(3)] == [401, 401, 429]


# --- Hosts, prefixes, other sites -----------------------------------------------------------------


def test_no_answer_reflects_the_host(store: ServiceStore) -> None:
    evil = "evil.example"
    services = [Service(store, open_to_all=True), Service(store, proxies=BEHIND)]
    targets = ("/", "/v1/jobs", "/v1/jobs/", "/page/", "/v1/openapi.json", "//evil.example/%2e")
    for app, target in product(map(create_app, services), targets):
        for host in (evil, f"127.0.0.1@{evil}"):
            given = [("Host", host), ("X-Forwarded-Host", host), (NAME, "ann")]
            found = ask(app, target, given, peer=PROXY)
            assert evil not in json.dumps(found.headers)
            assert evil.encode() not in found.body.replace(b"//evil.example", b""), target


@pytest.mark.parametrize("prefix", ["", "/planner", "/a/b"])
def test_a_prefix_is_in_every_place_stripped_or_not(store: ServiceStore, prefix: str) -> None:
    proxies = Proxies(networks([PROXY]), NAME, root_path=prefix)
    app, ann = create_app(Service(store, proxies=proxies)), (NAME, "ann")
    for before in {prefix, ""}:
        made = ask(app, f"{before}/v1/jobshop", [ann], peer=PROXY, body=TWO_JOBS)
        assert made.headers["location"] == f"{prefix}/v1/jobs/{json.loads(made.body)['id']}"
        assert ask(app, f"{before}/page/main.js").status == 200
        assert ask(app, f"{before}/health/live").status == 200
        page = ask(app, f"{before}/").body.decode()
        start = f"{prefix}/page/" if prefix else "page/"
        assert set(re.findall('"([^"]*page/)', page)) == {start}
    described = json.loads(ask(app, "/v1/openapi.json").body)
    assert described["components"]["securitySchemes"]["Proxy"]["name"] == NAME
    assert described["paths"]["/v1/plan"]["post"]["security"] == [{"Token": []}, {"Proxy": []}]
    assert "security" not in described["paths"]["/health/live"]["get"]
    assert described.get("servers", []) == ([{"url": prefix}] if prefix else [])
    for wrong in (f"{prefix}x/v1/jobs", f"{prefix}/../v1/jobs", f"{prefix}{prefix}/v1/jobs"):
        if prefix:
            assert ask(app, wrong, [ann], peer=PROXY).status == 404
            assert ask(app, prefix).status == 200  # without the slash, too


def test_page_and_client_live_under_a_prefix(store: ServiceStore, tmp_path: Path) -> None:
    proxies = Proxies(networks(["127.0.0.1"]), NAME, root_path="/planner")
    with (
        listening(create_app(Service(store, proxies=proxies)), proxy_headers=False) as port,
        behind(port, "/planner", {NAME: "ann"}) as url,
        Client(url) as client,
    ):
        job = client.submit("jobshop", TWO_JOBS).id
        client.stop(job)
        assert [one.name for one in client.events(job)] == ["queued", "failed"]
        assert client.job(job).user == "ann"
        if CHROMIUM is None:
            pytest.skip("chromium is not installed")
        with browsing(tmp_path) as browser:
            for place in (f"{url}/#/jobs", f"{url}/#/jobs/{job}", f"{url}/#/new/jobshop"):
                browser.open(place, 1400)
                browser.await_that("document.querySelector('#view h1')")
            browser.run("document.querySelector('[name=example]').click()")
            browser.await_that(
                "document.querySelector('form.request').innerText.includes('entries')"
            )
            browser.run("document.querySelector('form.request').requestSubmit()")
            browser.await_that("document.querySelector('.state')?.textContent === 'queued'")
            assert browser.errors == []


SITE, ORIGIN = "Sec-Fetch-Site", "Origin"
TAB = [("Sec-Fetch-Mode", "navigate"), ("Sec-Fetch-Dest", "document")]


@pytest.mark.parametrize(
    ("target", "given", "allowed"),
    [
        ("/", [(SITE, "cross-site"), *TAB], True),  # the end of signing in elsewhere
        ("/", [(SITE, "cross-site")], False),
        ("/v1/jobs", [(SITE, "cross-site"), *TAB], False),
        ("/v1/jobs", [(SITE, "same-site")], False),
        ("/v1/jobs", [(SITE, "same-origin")], True),
        ("POST", [(SITE, "cross-site"), *TAB], False),
        ("POST", [(ORIGIN, "https://evil.example")], False),
        ("POST", [(ORIGIN, "null")], False),
        ("POST", [(ORIGIN, "https://planner.example")], True),
        ("POST", [(SITE, "same-origin"), (ORIGIN, "https://planner.example")], True),
        ("POST", [], True),  # no browser
    ],
)
def test_other_sites_use_no_one_who_has_signed_in(
    store: ServiceStore, target: str, given: Pairs, allowed: bool
) -> None:
    app = create_app(Service(store, proxies=BEHIND))
    body = TWO_JOBS if target == "POST" else None
    path = "/v1/jobshop" if target == "POST" else target
    found = ask(app, path, [(NAME, "ann"), *given], peer=PROXY, body=body)
    assert (found.status < 300) == allowed
    assert allowed or found.status == 403
    assert (sum(store.counts().values()) > 0) == (allowed and target == "POST")


# --- Tokens ---------------------------------------------------------------------------------------


def test_tokens_are_listed_used_and_revoked_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAGEWRIGHT_AUDIT_LOG", "audit.log")
    first = answered("token", "ann", "--expires", "90d").strip()
    second = json.loads(answered("token", "ann", "--scope", "read", "--json"))
    store = ServiceStore("sqlite:///stagewright-jobs.sqlite")
    with store.engine.connect() as database:
        assert first not in str(database.exec_driver_sql("SELECT * FROM tokens").all())
    assert ask(create_app(Service(store)), "/v1/jobs", [bearer(first)]).status == 200
    listed = json.loads(answered("token", "--list", "--json"))["tokens"]
    assert [one["id"] for one in listed] == [id_of(first), second["id"]]
    assert listed[0]["expires"] - listed[0]["created"] == pytest.approx(90 * 86400)
    assert (listed[0]["used"] is None, listed[1]["used"]) == (False, None)
    table = answered("token", "--list", "ann")
    assert id_of(first) in table
    assert first not in table
    assert "no tokens" in answered("token", "--list", "bob")
    assert answered("token", "--revoke", "--id", id_of(first)).strip() == "1 token deleted"
    assert ask(create_app(Service(store)), "/v1/jobs", [bearer(first)]).status == 401
    assert ask(create_app(Service(store)), "/v1/jobs", [bearer(second["token"])]).status == 200
    store.close()
    lines = [json.loads(line) for line in Path("audit.log").read_text().splitlines()]
    assert [(one["event"], one["made"]) for one in lines] == [
        ("token made", id_of(first)), ("token made", second["id"]),
        ("token revoked", id_of(first)),
    ]  # fmt: skip
    assert Path("audit.log").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "options",
    [
        ["--revoke"], [], ["--revoke", "--list"], ["ann", "--id", "abc"], ["a,b"], [""],
        ["ann", "--expires", "0s"], ["ann", "--expires", "4e4d"], ["ann", "--expires", "soon"],
        ["ann", "--revoke", "--id", "abc"], ["x" * 201], ["a\nb"], [" ann"],
    ],
)  # fmt: skip
def test_what_makes_no_sense_of_a_token_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    refused("token", *options)


def test_a_token_that_is_used_is_written_once_in_an_hour(store: ServiceStore) -> None:
    clock = Clock()
    of = Tokens(store.engine, clock)
    token, began = of.create("ann", Scope.READ), clock.now
    for seconds in (0.0, 10.0, 3595.0, 10.0):
        clock.now += seconds
        of.caller(token)
    assert [one.used for one in of.all()] == [began + 3605.0]


@pytest.mark.parametrize("of_job", [True, False])
@pytest.mark.parametrize("how", ["revoked", "expired", "closed"])
def test_a_stream_ends_with_its_token(
    store: ServiceStore, monkeypatch: pytest.MonkeyPatch, how: str, of_job: bool
) -> None:
    """Soon, though nothing happens to its job; that of a service that is open, with the first."""
    for module in (tokens, jobs):
        monkeypatch.setattr(module, "SEEN_SECONDS", 0.05)
    monkeypatch.setattr(jobs, "LEAST_SECONDS", 0.05)
    job, _ = store.submit("local" if how == "closed" else "ann", "plan", "{}")
    of = Tokens(store.engine)
    token = None if how == "closed" else of.create("ann", Scope.ADMIN, 3600.0)
    app = create_app(Service(store, open_to_all=how == "closed"))
    given = [("Host", "localhost")] if token is None else [bearer(token)]

    sent: list[Any] = []

    async def run() -> Answer:
        told = asyncio.create_task(stream())
        while not any(b"event:" in message.get("body", b"") for message in sent):
            await asyncio.sleep(0.01)
            assert not told.done()
        await asyncio.sleep(0.5)
        assert not told.done()
        if how == "revoked":
            of.revoke("ann")
        elif how == "expired":
            store.clock = lambda: 1e12
            app.state.service.tokens._clock = store.clock
        else:
            of.create("ann", Scope.READ)
        return await told

    async def stream() -> Answer:
        path = f"/v1/jobs/{job.id}/events" if of_job else "/v1/admin/events"
        return await asked(app, scope_of(path, given, "127.0.0.1"), sent=sent)

    found = asyncio.run(run())
    assert found.status == 200
    told = found.body.count(b"event:")
    assert told == 1 if of_job else told >= 1
    assert not app.state.service.streams


def test_a_token_in_a_url_is_refused_and_not_logged(
    store: ServiceStore, caplog: pytest.LogCaptureFixture
) -> None:
    token = Tokens(store.engine).create("ann", Scope.ADMIN)
    app = create_app(Service(store))
    caplog.set_level(logging.INFO, "stagewright.service")
    escaped = token.replace("_", "%5F")
    for target in (f"/v1/jobs?token={token}", f"/v1/jobs?a=b&access_token={escaped}"):
        found = ask(app, target, [bearer(token)])
        assert (found.status, b"revoke it" in found.body) == (403, True)
    assert ask(app, f"/v1/jobs/{token}", [bearer(token)]).status == 404
    assert ask(app, "/v1/jobs?access_token=x").status == 401
    logged = [json.dumps(one.__dict__, default=str) for one in caplog.records]
    assert logged
    assert not any(token in one or escaped in one for one in logged)


# --- The audit log --------------------------------------------------------------------------------


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Path]:
    """The file of an audit log."""
    with audited(tmp_path / "audit.log"):
        yield tmp_path / "audit.log"


def test_the_audit_log_says_who_did_what(store: ServiceStore, log: Path) -> None:
    app = create_app(Service(store, proxies=BEHIND))
    token = Tokens(store.engine).create("bob", Scope.READ)
    ann, root, bob = [(NAME, "ann")], [(NAME, "root")], [bearer(token)]

    def send(target: str, who: Pairs, body: str | None = None) -> Answer:
        return ask(app, target, [("X-Forwarded-For", "203.0.113.9"), *who], peer=PROXY, body=body)

    def lines() -> list[dict[str, Any]]:
        found = [json.loads(line) for line in log.read_text().splitlines()]
        log.write_text("")
        return found

    job = json.loads(send("/v1/jobshop", ann, TWO_JOBS).body)["id"]
    [made] = lines()
    assert {"what": "audit", "event": "submit", "user": "ann", "made": job}.items() <= made.items()
    assert (made["address"], made["path"]) == ("203.0.113.9", "/v1/jobshop")
    for target in (f"/v1/jobs/{job}", "/v1/jobs", "/health/live", "/"):
        send(target, ann)
    send("/v1/jobshop/validate", ann, TWO_JOBS)
    assert lines() == []  # nothing is changed, and nothing of another read
    for target in (f"/v1/jobs/{job}", "/v1/jobs?all_users=true", f"/v1/jobs/{job}/request"):
        send(target, root)
    assert [(one["user"], one["owners"]) for one in lines()] == [("root", "ann")] * 3
    send("/v1/jobshop", bob, TWO_JOBS)
    send("/v1/jobs", [bearer("sw_unknown")])
    send("/v1/jobs?all_users=true", ann)
    send("/v1/jobs", [*ann, (SITE, "cross-site")])
    found = [(one["event"], one["user"], one["token"], one["code"]) for one in lines()]
    assert found == [
        ("refused", "bob", id_of(token), 403), ("refused", None, id_of("sw_unknown"), 401),
        ("refused", "ann", None, 403), ("refused", None, None, 403),
    ]  # fmt: skip
    send(f"/v1/jobs/{job}/abort", root, "")
    send(f"/v1/jobs/{job}/retry", ann, "")
    send(f"/v1/jobs/{job}/discard", root, "")  # it has not ended: nothing is done
    found = [(one["event"], one["user"], one.get("owners")) for one in lines()]
    assert found == [("abort_job", "root", "ann"), ("retry_job", "ann", None)]


def test_names_of_users_are_no_lines_of_a_log() -> None:
    for name in ("ann\nroot", "ann\x00", "ann\u2028root", ""):
        with pytest.raises(InputError, match="the name of the user"):
            tokens.require_user(name)
