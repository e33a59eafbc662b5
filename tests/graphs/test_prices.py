"""Markets, their documents, and the readers of three clouds' logs."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from markets import START, series

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.cloud_prices import (
    read_availability,
    read_aws,
    read_azure,
    read_cloud_logs,
    read_gcp,
    read_model_rates,
)
from stagewright.graphs.workloads.prices import (
    HOUR,
    Instance,
    Market,
    Preemptions,
    PriceSeries,
    Uptime,
    load_market,
    merge,
    save_market,
    useful_share,
)

DATA = Path(__file__).parents[3] / "shared" / "data" / "cloud"
needs_data = pytest.mark.skipif(
    not DATA.is_dir(), reason="the public price logs are not beside the checkout"
)


# --- Series and markets --------------------------------------------------------------------------


def test_a_series_is_a_step_function():
    found = series([1, 5, 2])
    assert [found.price(START + hour * HOUR) for hour in (0, 0.99, 1, 2, 3)] == [1, 1, 5, 2, 2]
    assert found.dollars(START + 0.5 * HOUR, START + 2.25 * HOUR) == pytest.approx(0.5 + 5 + 0.5)
    assert found.dollars(START, START) == 0
    for hour in (-0.1, 3.1):
        with pytest.raises(InputError, match="'aws/us-east-1/a' are known from"):
            found.price(START + hour * HOUR)
    with pytest.raises(InputError, match="are known from"):
        found.dollars(START, START + 4 * HOUR)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"seconds": (2.0, 1.0)}, "time 1 s does not follow 2 s"),
        ({"seconds": (1.0, 1.0)}, "does not follow"),
        ({"until_seconds": 2.0}, "time 2 s does not follow 2 s"),
        ({"seconds": (1.0,)}, "1 times and 2 prices"),
        ({"dollars_per_hour": (1.0, -1.0)}, "not negative, got -1"),
        ({"dollars_per_hour": (1.0, math.nan)}, "finite"),
    ],
)
def test_series_that_make_no_sense_are_refused(change: dict[str, object], word: str):
    good = PriceSeries(Instance("aws", "r", "n", "v100", 1), (1.0, 2.0), (1.0, 2.0), 3.0)
    with pytest.raises(InputError, match=word):
        replace(good, **change)


def test_a_market_is_written_and_read_back(tmp_path: Path):
    market = Market((series([1, 5]), series([0.1, 0.3], name="b", gpu="k80", gpus=8)))
    save_market(market, tmp_path / "prices.json")
    assert load_market(tmp_path / "prices.json") == market
    assert (market.from_seconds, market.until_seconds) == (START, START + 2 * HOUR)
    assert market.of(lambda one: one.gpu == "k80").series == market.series[1:]
    with pytest.raises(InputError, match="no price series"):
        market.of(lambda one: one.gpu == "tpu")
    with pytest.raises(InputError, match="appear twice"):
        merge([market, market])
    document = json.loads((tmp_path / "prices.json").read_text())
    document["series"][0]["instance"]["cost"] = 1
    (tmp_path / "prices.json").write_text(json.dumps(document))
    with pytest.raises(InputError, match=r"series\[0\].instance.cost: unknown field"):
        load_market(tmp_path / "prices.json")


# --- Preemptions ---------------------------------------------------------------------------------


def test_mean_time_to_preemption_counts_what_was_cut_off():
    seen = Preemptions(
        (
            Uptime("gcp", "z", "k80", 1, 0.0, 10.0, preempted=True),
            Uptime("gcp", "z", "k80", 1, 0.0, 30.0, preempted=False),
            Uptime("gcp", "z", "k80", 1, 5.0, 25.0, preempted=True),
            Uptime("gcp", "z", "k80", 8, 0.0, 99.0, preempted=False),
        )
    )
    assert seen.of("gcp", "k80", 1).mean_seconds == pytest.approx(30)
    assert seen.of("gcp", "k80", 8).mean_seconds == math.inf
    assert seen.of("gcp", "k80").count == 2


def test_useful_share_loses_checkpoints_half_an_interval_and_the_restore():
    assert useful_share(math.inf, 900, 100, 50) == pytest.approx(0.9)
    assert useful_share(10_000, 900, 100, 50) == pytest.approx(0.9 * (1 - 550 / 10_000))
    assert useful_share(100, 900, 100, 50) == 0
    with pytest.raises(InputError, match="more than 0 s apart"):
        useful_share(100, 0, 100, 50)


# --- AWS -----------------------------------------------------------------------------------------


def history(*rows: tuple[str, str, str, str]) -> str:
    names = ("AvailabilityZone", "InstanceType", "SpotPrice", "Timestamp")
    return json.dumps({"SpotPriceHistory": [dict(zip(names, row, strict=True)) for row in rows]})


def write(folder: Path, name: str, text: str) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return folder


def test_aws_files_that_overlap_are_one_series(tmp_path: Path):
    old = ("us-east-1b", "p3.2xlarge", "1.0", "2020-02-24T00:00:00.000Z")
    new = ("us-east-1b", "p3.2xlarge", "1.5", "2020-02-24T02:00:00.000Z")
    same = ("us-east-1b", "p3.2xlarge", "1.5", "2020-02-24T03:00:00.000Z")
    write(tmp_path, "us-east-1/a.json", history(new, old))
    write(tmp_path, "us-east-1/b.json", history(same, new))
    (found,) = read_aws(tmp_path).series
    assert found.instance == Instance(
        "aws", "us-east-1", "p3.2xlarge", "v100", 1, "us-east-1b", 3.06
    )
    assert found.seconds == (START, START + 2 * HOUR)
    assert found.dollars_per_hour == (1.0, 1.5)
    assert found.until_seconds == START + 3 * HOUR + 1


@pytest.mark.parametrize(
    ("row", "word"),
    [
        (("us-east-1b", "p4.huge", "1", "2020-02-24T00:00:00Z"), r"\[1\]: unknown .* 'p4.huge'"),
        (("us-east-1b", "p3.2xlarge", "-1", "2020-02-24T01:00:00Z"), "not negative, got -1"),
        (("us-east-1b", "p3.2xlarge", "dear", "2020-02-24T01:00:00Z"), "'dear' is not a price"),
        (("us-east-1b", "p3.2xlarge", "1", "yesterday"), "'yesterday' is not a time"),
        (("us-east-1b", "p3.2xlarge", "2", "2020-02-24T00:00:00Z"), "costs 2 .* 1 elsewhere"),
    ],
)
def test_broken_aws_entries_are_refused(tmp_path: Path, row: tuple[str, ...], word: str):
    good = ("us-east-1b", "p3.2xlarge", "1", "2020-02-24T00:00:00Z")
    write(tmp_path, "a.json", history(good, row))
    with pytest.raises(InputError, match=word):
        read_aws(tmp_path)


def test_files_that_are_no_aws_history_are_refused(tmp_path: Path):
    with pytest.raises(InputError, match="no spot prices"):
        read_aws(tmp_path)
    wrong = [("{", "complete JSON"), ("[]", "no list")]
    wrong.append(('{"SpotPriceHistory": [3]}', "expected Avail"))
    for text, word in wrong:
        write(tmp_path, "a.json", text)
        with pytest.raises(InputError, match=word):
            read_aws(tmp_path)


# --- Azure ---------------------------------------------------------------------------------------

MAPPING = "Instance,GPU type,# GPUs\nNC6,K80,1\nNC24s v2,P100,4"
DAYS = "Date,NC24s v2,NC6\n2/24/2020,$1.00,\n2/25/2020,$1.00,\n2/26/2020,$2.50,"


def test_azure_days_are_steps_and_empty_columns_are_not_offered(tmp_path: Path):
    write(tmp_path, "instance_mapping.csv", MAPPING)
    write(tmp_path, "cost/us_east.csv", DAYS)
    (found,) = read_azure(tmp_path).series
    assert found.instance == Instance("azure", "us-east", "NC24s v2", "p100", 4)
    assert found.seconds == (START, START + 48 * HOUR)
    assert found.dollars_per_hour == (1.0, 2.5)
    assert found.until_seconds == START + 72 * HOUR


@pytest.mark.parametrize(
    ("old", "new", "word"),
    [
        ("NC6", "NC7", "unknown instance type 'NC7'"),
        ("2/25/2020,$1.00", "2/25/2020,", ":3: NC24s v2: '' is not a price"),
        ("2/25/2020,$1.00,\n", "", ":3: days are missing"),
        ("2/25/2020", "soon", ":3: 'soon' is not a date"),
        ("2/25/2020,$1.00,", "2/25/2020,$1.00", ":3: the number of cells differs"),
        ("Date", "Day", "a column Date"),
        (DAYS, "", "a column Date"),
    ],
)
def test_broken_azure_files_are_refused(tmp_path: Path, old: str, new: str, word: str):
    write(tmp_path, "instance_mapping.csv", MAPPING)
    write(tmp_path, "cost/us_east.csv", DAYS.replace(old, new))
    with pytest.raises(InputError, match=word):
        read_azure(tmp_path)


# --- GCP and availability ------------------------------------------------------------------------

GCP = (
    "Zone: us-west1-b, GPU type: nvidia-tesla-v100, Number of GPUs: 8, Price per hour: $6.808\n"
    "[2020-02-24T00:10:00.000Z] Instance instance0 running in zone us-west1-b\n"
)


def test_gcp_prices_are_static(tmp_path: Path):
    write(tmp_path, "2020-02-24T00:00:00.000Z.out", GCP)
    (found,) = read_gcp(tmp_path).series
    assert found.instance == Instance("gcp", "us-west1", "v100x8", "v100", 8, "us-west1-b")
    assert (found.seconds, found.dollars_per_hour) == ((START,), (6.808,))
    write(tmp_path, "2020-02-25T00:00:00.000Z.out", GCP.replace("6.808", "7"))
    with pytest.raises(InputError, match=r"was 6.808 before; it is static"):
        read_gcp(tmp_path)


def test_an_instance_is_up_until_a_check_finds_it_down(tmp_path: Path):
    created = "Created instance a with 1 GPU(s) of type nvidia-tesla-k80 in zone z-b"
    events = [
        ("00", created),
        ("15", "Instance a running in zone z-b"),
        ("20", "Instance b creation failed"),
        ("20", "Instance b not running in zone z-c"),
        ("30", "Instance a not running in zone z-b"),
        ("31", "Successfully deleted instance a"),
        ("40", created),
        ("50", "Instance a running in zone z-b"),
    ]
    log = "".join(f"[2020-02-24T00:{minute}:00Z] {what}\n" for minute, what in events)
    write(tmp_path, "gcp/availability/log.out", log)
    assert read_availability(tmp_path).uptimes == (
        Uptime("gcp", "z-b", "k80", 1, START, START + 1800, preempted=True),
        Uptime("gcp", "z-b", "k80", 1, START + 2400, START + 3000, preempted=False),
    )
    write(tmp_path, "gcp/availability/log.out", log + "later it stopped\n")
    with pytest.raises(InputError, match=r":9: expected '\[time\]"):
        read_availability(tmp_path)
    with pytest.raises(InputError, match="no instance is created"):
        read_availability(tmp_path / "gcp")
    with pytest.raises(InputError, match="no price logs"):
        read_cloud_logs(tmp_path)


def test_rates_are_read_under_plain_names_and_gavels(tmp_path: Path):
    lm = {"('LM', 1)": {"null": 2}, "('LM', 2)": {"null": 3}}
    table = {"v100": {"A3C": {"null": 4, "LM": [1, 2]}, **lm}, "k80": {"A3C": {"null": 1.0}}}
    write(tmp_path, "rates.json", json.dumps(table))
    assert read_model_rates(tmp_path / "rates.json") == {
        "A3C": {"v100": 4.0, "k80": 1.0},
        "LM": {"v100": 2.0},
    }
    for text, word in (
        ("{", "complete JSON"),
        ("[]", "object"),
        ('{"v100": {"A": {}}}', "no rate"),
    ):
        write(tmp_path, "rates.json", text)
        with pytest.raises(InputError, match=word):
            read_model_rates(tmp_path / "rates.json")


# --- The public logs -----------------------------------------------------------------------------


@needs_data
def test_table_6_3_of_the_thesis():
    """Best-case cost reduction from on-demand to spot of instances with one GPU."""
    market = read_cloud_logs(DATA / "logs")
    assert len(market.series) == 159
    printed = {
        ("aws", "us-east-1"): {"k80": 2.7, "v100": 3.3},
        ("azure", "us-east"): {"k80": 7.3, "p100": 8.0, "v100": 5.1},
    }
    for (provider, region), by_gpu in printed.items():
        for gpu, times in by_gpu.items():
            best = max(
                one.instance.on_demand / min(one.dollars_per_hour)
                for one in market.series
                if (one.instance.provider, one.instance.region) == (provider, region)
                and (one.instance.gpu, one.instance.gpus) == (gpu, 1)
            )
            assert best == pytest.approx(times, abs=0.05)


@needs_data
def test_preemptions_are_as_in_figure_6_2():
    """GCP preempts within a day; AWS within hours or never; eight GPUs less often on GCP."""
    seen = read_availability(DATA / "logs")
    longest = max(up.end_seconds - up.begin_seconds for up in seen.of("gcp", "v100").uptimes)
    assert 23 * HOUR < longest < 25 * HOUR
    assert seen.of("aws", "v100").count == 0
    assert seen.of("aws", "k80").mean_seconds > 3 * HOUR
    for gpu in ("k80", "v100"):
        assert seen.of("gcp", gpu, 8).mean_seconds > 4 * seen.of("gcp", gpu, 1).mean_seconds
