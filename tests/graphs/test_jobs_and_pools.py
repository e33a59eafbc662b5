"""Jobs, pools and Gavel's files: round trips, and one line for everything that is wrong in them."""

import copy
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from strategies_allocation import Case, random_case

from stagewright.formulations.clusters.allocation import problem_of
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.gavel import read_gavel, read_throughputs, read_trace
from stagewright.graphs.machines.cluster import Device, from_matrix
from stagewright.graphs.workloads.jobs import (
    Entity,
    Job,
    PairRate,
    Rate,
    Throughputs,
    Workload,
    load_workload,
    save_workload,
)
from stagewright.graphs.workloads.pool import (
    Accelerator,
    Pool,
    parse_pool,
    pool_of_cluster,
    read_pool,
)

DATA = Path(__file__).parents[3] / "shared" / "data" / "gavel"
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="Gavel's public traces are not beside the checkout"
)
small = examples(25, derandomize=True)

WORKLOAD = Workload(
    (
        Job("first", "a", 5.0, 1, 2.0, 0.0, 9.0, "red", (1, 2)),
        Job("second", "b", 7.0, arrival_seconds=3.0, entity="blue"),
    ),
    Throughputs(
        (Rate("a", 1, "v100", 3.0, 2.0), Rate("b", 1, "v100", 4.0)),
        (PairRate(("a", "b"), 1, "v100", (1.0, 2.0), (1.0, 1.0)),),
    ),
    (Entity("all"), Entity("red", parent="all"), Entity("blue", 2.0, "fifo", "all")),
)
POOL = Pool((Accelerator("v100", 8, 4, 2.48), Accelerator("k80", 3)))
TABLE = {
    "v100": {
        "('a', 1)": {"null": 4.0, "('a', 1)": [3.0, 3.0], "('b', 1)": [2.0, 1.0]},
        "('b', 1)": {"null": 2.0, "('a', 1)": [1.0, 2.0]},
        "('b', 2)": {"null": 5.0},
    },
    "v100_unconsolidated": {
        "('a', 1)": {"null": 3.5, "('b', 1)": [1.5, 0.5]},
        "('b', 2)": {"null": 2.5},
    },
}
LINE = ("a", "command", "directory", "--steps", "1", "100", "1", "1.0", "-1.0", "0.0")


def refusal(call: Callable[..., object], *arguments: Any) -> str:
    """The message of an InputError, which is one line."""
    with pytest.raises(InputError) as raised:
        call(*arguments)
    assert "\n" not in str(raised.value)
    return str(raised.value)


def write(tmp_path: Path, content: Any, name: str = "file.json") -> Path:
    file = tmp_path / name
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return file


def plain(document: Workload | Pool) -> dict[str, Any]:
    read: dict[str, Any] = json.loads(documents.to_json(document))
    return read


# Round trips.


@examples(8, parent=small)
@given(case=random_case())
def test_what_is_saved_is_loaded(tmp_path: Path, case: Case):
    for thing, save, load in ((case.workload, save_workload, load_workload),):
        save(thing, tmp_path / "file.json")
        assert load(tmp_path / "file.json") == thing


@pytest.mark.parametrize(
    ("counts", "scale", "wrong"),
    [
        ((2, 1), 1, "counts must ascend, each once, got \\[2, 1\\]"),
        ((1, 1), 1, "counts must ascend, each once"),
        ((0, 1), 1, "counts must be at least 1"),
        ((1, 2), 2, "give either scale, one number, or counts, several"),
    ],
)
def test_counts_are_whole_numbers_in_order(counts: tuple[int, ...], scale: int, wrong: str):
    with pytest.raises(InputError, match=f"job 'x': {wrong}"):
        Job("x", "a", 1.0, scale, counts=counts)


def test_all_fields_come_back(tmp_path: Path):
    save_workload(WORKLOAD, tmp_path / "jobs.json")
    assert load_workload(tmp_path / "jobs.json") == WORKLOAD


# Anything else in the place of any value, in all of the files.

HOSTILE = (
    None, "", "x", "1.5", "line\nline", -1, -0.5, 0, True, False, [], {}, [1], {"a": 1},
    float("nan"), float("inf"), 1e308, 10**400, [None, None], ["x", "y"], [1, 2, 3],
)  # fmt: skip
KEYS = ("", "x", "5", "null", "('a', True)", "('a', 1, 2)", "('a', -1)", "(1, 1)", "{[]: 1}")
READERS: dict[str, tuple[Callable[[Path], object], Any]] = {
    "jobs": (load_workload, plain(WORKLOAD)),
    "pool": (partial(documents.read, Pool), plain(POOL)),
    "throughputs": (read_throughputs, TABLE),
}


def places(document: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths to all values below ``document``."""
    inside = document.items() if isinstance(document, dict) else enumerate(document)
    for part, value in inside:
        yield (*above, part)
        if isinstance(value, dict | list):
            yield from places(value, (*above, part))


def owner(document: Any, place: tuple[Any, ...]) -> Any:
    for part in place[:-1]:
        document = document[part]
    return document


def read_or_refused(read: Callable[[Path], object], file: Path) -> None:
    message = ""
    try:
        read(file)
    except InputError as error:
        message = str(error)
    assert "\n" not in message
    assert message == "" or message.startswith(f"{file}: ")


@pytest.mark.parametrize("name", READERS)
@examples(40, parent=small)
@given(choice=st.randoms(use_true_random=False))
def test_hostile_values_are_read_or_refused_in_one_line(tmp_path: Path, name: str, choice: Any):
    read, document = READERS[name]
    place = choice.choice(list(places(document)))
    broken = copy.deepcopy(document)
    owner(broken, place)[place[-1]] = choice.choice(HOSTILE)
    read_or_refused(read, write(tmp_path, broken))


@pytest.mark.parametrize("name", READERS)
def test_missing_and_misnamed_fields_are_read_or_refused(tmp_path: Path, name: str):
    read, document = READERS[name]
    for number, place in enumerate(list(places(document))[::2]):
        broken = copy.deepcopy(document)
        value = owner(broken, place).pop(place[-1])
        read_or_refused(read, write(tmp_path, broken))
        if isinstance(place[-1], str):
            owner(broken, place)[KEYS[number % len(KEYS)]] = value
            read_or_refused(read, write(tmp_path, broken))


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize(
    "text",
    ["", " ", "[", "null", "[]", "NaN", '"x"', "1", "9" * 5000, "[" * 99_999, '{"a":' * 9999],
)
def test_files_that_are_no_document_are_refused(tmp_path: Path, name: str, text: str):
    file = write(tmp_path, text)
    assert refusal(READERS[name][0], file).startswith(f"{file}: ")


@pytest.mark.parametrize("name", READERS)
def test_cut_off_and_absent_files_are_refused(tmp_path: Path, name: str):
    read, document = READERS[name]
    text = json.dumps(document)
    for length in range(0, len(text), 7):
        assert "not a complete JSON document" in refusal(read, write(tmp_path, text[:length]))
    assert refusal(read, tmp_path / "absent").endswith("absent: No such file or directory")
    assert "is a folder" in refusal(read, tmp_path)
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    assert "not a text file" in refusal(read, tmp_path / "binary")


@pytest.mark.parametrize("name", ["jobs", "pool"])
def test_other_formats_and_versions_are_refused(tmp_path: Path, name: str):
    read, document = READERS[name]
    assert "version 2" in refusal(read, write(tmp_path, {**document, "version": 2}))
    assert "expected a" in refusal(read, write(tmp_path, {**document, "format": "other"}))
    text = json.dumps(document).replace('"version": 1', '"version": 1, "version": 1')
    assert "'version' appears twice" in refusal(read, write(tmp_path, text))


# Rules of a workload.

RULES: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no jobs": (lambda d: d["jobs"].clear(), "the workload has no jobs"),
    "names": (lambda d: d["jobs"][1].update(name="first"), "two jobs are named 'first'"),
    "order": (
        lambda d: d["jobs"][0].update(arrival_seconds=4.0),
        "job 'second' arrives at 3 s, before job 'first' at 4 s: list jobs in order",
    ),
    "weight 0": (
        lambda d: d["jobs"][0].update(weight=0.0),
        "jobs[0]: job 'first': weight must be more than zero",
    ),
    "weight below 0": (
        lambda d: d["jobs"][0].update(weight=-2.0),
        "job 'first': weight must be finite and not negative, got -2",
    ),
    "steps 0": (lambda d: d["jobs"][1].update(steps=0.0), "steps must be more than zero"),
    "slo 0": (lambda d: d["jobs"][1].update(slo_seconds=0), "slo_seconds must be more than zero"),
    "early": (lambda d: d["jobs"][0].update(arrival_seconds=-1.0), "arrival_seconds must be"),
    "scale 0": (lambda d: d["jobs"][0].update(scale=0), "scale must be at least 1, got 0"),
    "scale 1.5": (lambda d: d["jobs"][0].update(scale=1.5), "jobs[0].scale: "),
    "huge scale": (lambda d: d["jobs"][0].update(scale=10**9), "scale must be at most"),
    "text": (lambda d: d["jobs"][0].update(steps="5"), "jobs[0].steps: "),
    "unknown": (lambda d: d["jobs"][0].update(stepz=5), "jobs[0].stepz: unknown field"),
    "negative rate": (
        lambda d: d["throughputs"]["alone"][0].update(steps_per_second=-3.0),
        "throughputs.alone[0]: rate of 'a' x1 on 'v100': steps_per_second must be finite",
    ),
    "negative pair rate": (
        lambda d: d["throughputs"]["pairs"][0].update(steps_per_second=[1.0, -1.0]),
        "rate of a with b x1 on 'v100': steps per second must be",
    ),
    "null rate": (
        lambda d: d["throughputs"]["alone"][0].update(steps_per_second=None),
        "throughputs.alone[0].steps_per_second: ",
    ),
    "three rates": (
        lambda d: d["throughputs"]["pairs"][0].update(steps_per_second=[1.0, 1.0, 1.0]),
        "throughputs.pairs[0].steps_per_second",
    ),
    "a rate twice": (
        lambda d: d["throughputs"]["alone"].append(d["throughputs"]["alone"][0]),
        "('a', 1, 'v100') appears twice",
    ),
    "a pair twice, turned": (
        lambda d: d["throughputs"]["pairs"].append(
            {**d["throughputs"]["pairs"][0], "models": ["b", "a"]}
        ),
        "('a', 'b', 1, 'v100') appears twice",
    ),
    "entity twice": (
        lambda d: d["entities"].append(d["entities"][0]),
        "two entities are named 'all'",
    ),
    "entity's weight": (lambda d: d["entities"][0].update(weight=0.0), "entity 'all': weight must"),
    "discipline": (lambda d: d["entities"][0].update(discipline="lifo"), "entities[0].discipline"),
    "no such parent": (
        lambda d: d["entities"][1].update(parent="none"),
        "entity 'red': its parent 'none' is not an entity",
    ),
    "its own parent": (
        lambda d: d["entities"][1].update(parent="red"),
        "entity 'red' is among its own owners",
    ),
    "owners in a circle": (
        lambda d: d["entities"][0].update(parent="red"),
        "entity 'all' is among its own owners",
    ),
    "owned by a queue": (
        lambda d: d["entities"][0].update(discipline="fifo"),
        "entity 'all' serves jobs in order; it cannot own 'red'",
    ),
    "no such owner": (
        lambda d: d["jobs"][0].update(entity="none"),
        "job 'first': entity 'none' is not one of",
    ),
    "no owner": (lambda d: d["jobs"][0].update(entity=None), "entity None is not one of"),
    "jobs beside entities": (
        lambda d: d["jobs"][0].update(entity="all"),
        "entity 'all' owns both entities and job 'first'",
    ),
}


@pytest.mark.parametrize("name", RULES)
def test_rules_of_a_workload(tmp_path: Path, name: str):
    breaks, message = RULES[name]
    document = plain(WORKLOAD)
    breaks(document)
    file = write(tmp_path, document)
    assert refusal(load_workload, file).startswith(f"{file}: ")
    assert message in refusal(load_workload, file)


# Pools.


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("v100=36", (Accelerator("v100", 36),)),
        ("p100=9x4", (Accelerator("p100", 36, 4),)),
        ("k80=16@0.45", (Accelerator("k80", 16, None, 0.45),)),
        ("a-1.b=1x1@1e-1, c=2", (Accelerator("a-1.b", 1, 1, 0.1), Accelerator("c", 2))),
    ],
)
def test_spelled_pools(text: str, expected: tuple[Accelerator, ...]):
    assert parse_pool(text) == Pool(expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is not an accelerator type; write name=count"),
        ("v100", "'v100' is not an accelerator type"),
        ("v100=4,", "'' is not an accelerator type"),
        ("=4", "'=4' is not an accelerator type"),
        ("v100=-1", "is not an accelerator type"),
        ("v100=1.5", "is not an accelerator type"),
        ("v100=0x4", "'v100=0x4': the number of servers must be at least 1, got 0"),
        ("v100=4x0", "'v100=4x0': the number per server must be at least 1, got 0"),
        ("v100=4x", "is not an accelerator type"),
        ("v100=4x4x4", "is not an accelerator type"),
        ("v100=4@", "is not an accelerator type"),
        ("v100=4@nan", "is not an accelerator type"),
        ("v100=4@1.2.3", "'1.2.3' is not a price per hour"),
        ("v100=4@-1", "accelerator 'v100': dollars_per_hour must be finite and not negative"),
        ("v100=4@1e999", "dollars_per_hour must be finite"),
        ("v100=0", "accelerator 'v100': count must be at least 1, got 0"),
        ("v100=3x0", "the number per server must be at least 1"),
        ("v100=99999999", "count must be at most 10000000"),
        ("v100=4,v100=4", "two types of accelerators are named 'v100'"),
    ],
)
def test_misspelled_pools_are_refused(text: str, message: str):
    assert message in refusal(parse_pool, text)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"name": ""}, "an accelerator has an empty name"),
        ({"count": 0}, "accelerator 'k80': count must be at least 1"),
        ({"count": True}, "accelerators[1].count: "),
        ({"per_server": 2}, "3 do not fill servers of 2; make the accelerators"),
        ({"per_server": 6}, "per_server must be at most 3, got 6"),
        ({"dollars_per_hour": -1.0}, "dollars_per_hour must be finite and not negative"),
        ({"name": "v100"}, "two types of accelerators are named 'v100'"),
    ],
)
def test_rules_of_a_pool(tmp_path: Path, values: dict[str, Any], message: str):
    document = plain(POOL)
    document["accelerators"][1].update(values)
    file = write(tmp_path, document)
    assert message in refusal(read_pool, str(file))
    assert "the pool has no accelerators" in refusal(
        read_pool, str(write(tmp_path, {**document, "accelerators": []}))
    )


def test_the_pool_of_a_cluster_counts_servers_of_one_size():
    devices = [Device(str(n), kind, 16e9) for n, kind in enumerate(("v100", "v100", "k80", "k80"))]
    links = np.full((4, 4), 1e9)
    even = from_matrix(devices, links, servers=[["0", "1"], ["2"], ["3"]])
    assert pool_of_cluster(even) == Pool((Accelerator("v100", 2, 2), Accelerator("k80", 2, 1)))
    odd = from_matrix(devices, links, servers=[["0", "2"], ["1", "3"]])
    assert pool_of_cluster(odd) == Pool((Accelerator("v100", 2, 1), Accelerator("k80", 2, 1)))
    mixed = from_matrix(devices, links, servers=[["0", "1", "2"], ["3"]])
    assert pool_of_cluster(mixed) == Pool((Accelerator("v100", 2, 2), Accelerator("k80", 2, 1)))
    uneven = from_matrix(
        [replace(device, kind="v100") for device in devices],
        links,
        servers=[["0", "1", "2"], ["3"]],
    )
    assert pool_of_cluster(uneven) == Pool((Accelerator("v100", 4),))


# Jobs that the cluster cannot serve.


@pytest.mark.parametrize(
    ("pool", "job", "options", "message"),
    [
        ("k80=4", Job("j", "a", 1.0), {}, "unknown accelerator 'k80': the throughputs know v100"),
        ("v100=4", Job("j", "c", 1.0), {}, "no throughput of 'c' on 1 x 'v100': add it, or 0"),
        ("v100=4", Job("j", "a", 1.0, 2), {}, "no throughput of 'a' on 2 x 'v100'"),
        ("v100=4", Job("j", "b", 1.0, 8), {}, "asks for 8 accelerators of one type, the cluster"),
        ("v100=4", Job("j", "slow", 1.0), {}, "'slow' on 1 accelerators runs nowhere"),
        ("v100=4", Job("j", "a", 1.0), {"placement": True}, "placement needs servers; write"),
    ],
)
def test_jobs_that_the_cluster_cannot_serve(
    pool: str, job: Job, options: dict[str, bool], message: str
):
    rates = (Rate("a", 1, "v100", 1.0), Rate("b", 8, "v100", 1.0), Rate("slow", 1, "v100", 0.0))
    workload = Workload((job,), Throughputs(rates))
    assert message in refusal(lambda: problem_of(workload, parse_pool(pool), **options))


# Gavel's files.


def trace_of(*lines: dict[int, str]) -> str:
    """Lines of a trace with some of their fields changed."""
    return "".join(
        "\t".join(changed.get(number, field) for number, field in enumerate(LINE)) + "\n"
        for changed in lines
    )


def test_a_trace_and_a_table_make_a_workload(tmp_path: Path):
    trace = trace_of({8: "30.0"}, {0: "b", 6: "2", 7: "5.0", 9: "4.5"})
    workload = read_gavel(
        write(tmp_path, trace, "jobs.trace"), write(tmp_path, TABLE, "table.json")
    )
    assert workload.jobs == (
        Job("0", "a", 100.0, slo_seconds=30.0),
        Job("1", "b", 100.0, 2, 5.0, 4.5),
    )
    # What no job of the trace is, at its scale, is left out.
    assert workload.throughputs == Throughputs(
        (Rate("a", 1, "v100", 4.0, 3.5), Rate("b", 2, "v100", 5.0, 2.5)),
        (PairRate(("a", "a"), 1, "v100", (3.0, 3.0)),),
    )


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        (5, "many", "steps 'many' is not a number"),
        (5, "nan", "steps 'nan' is not a number"),
        (5, "inf", "steps 'inf' is not a number"),
        (5, "", "steps '' is not a number"),
        (5, "0", "steps must be more than zero"),
        (5, "-4", "steps must be finite and not negative"),
        (6, "1.5", "scale factor '1.5' is not a whole number"),
        (6, "0", "scale must be at least 1"),
        (6, "1e400", "scale factor '1e400' is not a whole number"),
        (7, "0", "weight must be more than zero"),
        (7, "-1", "weight must be finite and not negative"),
        (8, "soon", "SLO 'soon' is not a number"),
        (9, "-1", "arrival_seconds must be finite and not negative"),
        (9, "1\t2", "11 tab-separated fields, a trace has 10"),
    ],
)
def test_broken_lines_of_a_trace(tmp_path: Path, field: int, value: str, message: str):
    file = write(tmp_path, trace_of({}, {9: "0.0", field: value}))
    found = refusal(read_trace, file)
    assert found.startswith(f"{file}:2: ")
    assert message in found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "file.json: the trace has no jobs"),
        ("\n", "file.json:1: the line is empty"),
        (trace_of({}) + "\n" + trace_of({}), "file.json:2: the line is empty"),
        (trace_of({9: "5"}, {9: "4"}), "file.json:2: arrives at 4 s, before the line above at 5 s"),
        (trace_of({})[:-9], "file.json:1: 9 tab-separated fields"),
    ],
)
def test_broken_traces(tmp_path: Path, text: str, message: str):
    assert message in refusal(read_trace, write(tmp_path, text))


def test_a_type_without_throughputs_is_named_with_its_line(tmp_path: Path):
    trace = write(tmp_path, trace_of({}, {0: "c"}), "jobs.trace")
    found = refusal(read_gavel, trace, write(tmp_path, TABLE))
    assert found.startswith(f"{trace}:2: ")
    assert "has no throughput of 'c' on 1 accelerators" in found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["v100"]["('a', 1)"].update(null=None), "v100: ('a', 1): None is not a rate"),
        (lambda t: t["v100"]["('a', 1)"].update(null="4"), "v100: ('a', 1): '4' is not a rate"),
        (lambda t: t["v100"]["('a', 1)"].update(null=True), "v100: ('a', 1): True is not a rate"),
        (lambda t: t["v100"]["('a', 1)"].update(null=-4), "'a' x1 on 'v100': steps_per_second"),
        (lambda t: t["v100"]["('a', 1)"].update(null=float("nan")), "must be finite"),
        (lambda t: t["v100"]["('a', 1)"].pop("null"), "('a', 1) has no rate alone ('null')"),
        (lambda t: t["v100"]["('a', 1)"].update({"('b', 1)": None}), "expected two rates"),
        (lambda t: t["v100"]["('a', 1)"].update({"('b', 1)": [1]}), "expected two rates"),
        (lambda t: t["v100"]["('a', 1)"].update({"('b', 1)": ["1", 1]}), "'1' is not a rate"),
        (lambda t: t["v100"]["('b', 1)"].update({"('a', 1)": ["1", 1]}), "'1' is not a rate"),
        (lambda t: t["v100"].update({"a": {"null": 1}}), "v100: 'a' is not a job type"),
        (lambda t: t["v100"].update({"('a', 1)": 3}), "v100: expected an object of job types"),
        (lambda t: t.update(v100=None), "v100: expected an object of job types"),
        (lambda t: t.update(v100_unconsolidated=[]), "v100_unconsolidated: expected an object"),
        (
            lambda t: t["v100_unconsolidated"].update({"('a', 1)": 3}),
            "v100_unconsolidated: expected an object",
        ),
        (lambda t: t["v100_unconsolidated"]["('a', 1)"].update(null="x"), "'x' is not a rate"),
    ],
)
def test_broken_throughput_tables(
    tmp_path: Path, change: Callable[[dict[str, Any]], object], message: str
):
    table = copy.deepcopy(TABLE)
    change(table)
    file = write(tmp_path, table)
    found = refusal(read_throughputs, file)
    assert found.startswith(f"{file}: ")
    assert message in found


@needs_data
@pytest.mark.parametrize("name", ["small_test", "artifact_evaluation", "minimize_makespan"])
def test_public_traces(tmp_path: Path, name: str):
    trace = DATA / "traces" / f"{name}.trace"
    workload = read_gavel(trace, DATA / "simulation_throughputs.json")
    assert len(workload.jobs) == len(trace.read_text().splitlines())
    assert {rate.accelerator for rate in workload.throughputs.alone} == {"v100", "p100", "k80"}
    save_workload(workload, tmp_path / "jobs.json")
    assert load_workload(tmp_path / "jobs.json") == workload
