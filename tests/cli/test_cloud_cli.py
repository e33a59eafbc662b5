"""``stagewright cloud`` on small prices: tables, JSON, pictures, exit codes, complaints."""

import json
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from markets import series
from tokens import After
from typer.testing import CliRunner, Result

from stagewright.cli import app, solving
from stagewright.graphs.workloads.prices import Market, load_market, save_market

DATA = Path(__file__).parents[3] / "shared" / "data" / "cloud"
RATES = "v100=1.0,k80=0.4"


def run(*arguments: object) -> Result:
    return CliRunner(env={"COLUMNS": "200"}).invoke(
        app, ["cloud", *(str(argument) for argument in arguments)]
    )


def answered(*arguments: object, code: int = 0) -> str:
    result = run(*arguments)
    assert result.exit_code == code, result.stderr or result.exception
    assert result.stderr == ""
    return result.stdout


def answered_json(*arguments: object, code: int = 0) -> Any:
    return json.loads(answered(*arguments, "--json", code=code))


@pytest.fixture
def prices(tmp_path: Path) -> Path:
    market = Market(
        (
            series([3.0] * 40, name="p3.2xlarge"),
            series([8.0] * 40, name="p3.8xlarge", gpus=4),
            series([0.9] * 40, name="p2.xlarge", gpu="k80"),
            series([0.9] * 4 + [0.2] * 36, name="NC6", gpu="k80", place=("azure", "us-east")),
        )
    )
    save_market(market, tmp_path / "prices.json")
    return tmp_path / "prices.json"


def test_all_strategies_stand_beside_the_optimum(prices: Path):
    found = answered_json(prices, "--rates", RATES, "--v100-hours", 6)
    dollars = {name: one["dollars"] for name, one in found["strategies"].items()}
    assert dollars == pytest.approx(
        {
            "1xv100": 18, "gpu-type": 13.5, "multi-gpu": 13.5, "multi-cloud": 13.5,
            "dynamic": 5.8, "rolling": 5.8, "optimal": 3,
        }
    )  # fmt: skip
    assert found["status"] == "optimal"
    assert found["gap"] < 1e-9
    assert found["bound_dollars"] == pytest.approx(3)
    (stay,) = found["plan"]  # fifteen hours of the NC6 from when it is cheap
    assert stay["instance"] == "azure/us-east/NC6"
    assert (stay["begin"], stay["end"]) == ("2020-02-24T04:00:00Z", "2020-02-24T19:00:00Z")


def test_a_job_of_several_gpus_rents_whole_instances(prices: Path):
    options = (prices, "--rates", RATES, "--v100-hours", 6)
    found = answered_json(*options, "--gpus", 4)
    dollars = {name: one["dollars"] for name, one in found["strategies"].items()}
    # Four instances of one V100, the p3.8xlarge, from the fourth hour on four NC6.
    assert (dollars["1xv100"], dollars["multi-gpu"]) == pytest.approx((4 * 18, 6 * 8))
    assert dollars["optimal"] == pytest.approx(4 * 3)
    assert (found["gpus"], found["plan"][0]["count"]) == (4, 4)
    text = answered(*options, "--gpus", 5, "--strategy", "multi-gpu")
    assert "6 V100-hours on 5 GPUs, 4 kinds of instance" in text
    assert re.search(r"aws/us-east-1/p2.xlarge +5 ", text)


def test_the_table_says_how_much_cheaper_and_what_is_proved(prices: Path):
    text = answered(prices, "--rates", RATES, "--v100-hours", 6)
    assert re.search(r"dynamic +5\.80 +3\.10x +0\.62 +1 *\n", text)
    assert "optimal: no plan costs less than 3.00 dollars, gap 0.00%" in text
    assert re.search(r"azure/us-east/NC6 +1 +2020-02-24T04:00:00Z", text)


def test_an_interrupted_comparison_keeps_the_strategies_so_far(
    prices: Path, monkeypatch: pytest.MonkeyPatch
):
    options = (prices, "--rates", RATES, "--v100-hours", 6)
    whole = answered_json(*options)["strategies"]
    for times in range(len(whole) - 2):
        monkeypatch.setattr(solving, "interruptible", lambda n=times: nullcontext(After(n)))
        found = answered_json(*options, code=0 if times else 1)
        assert found["status"] == "interrupted"
        assert list(found["strategies"].items()) == list(whole.items())[:times]
    assert "interrupted after the strategy multi-cloud" in answered(*options)
    monkeypatch.setattr(solving, "interruptible", lambda: nullcontext(After(0)))
    assert answered(*options, code=1).count("interrupted before the first strategy") == 1
    assert answered(*options, "--png", prices.with_suffix(".png"), code=1)
    monkeypatch.setattr(solving, "interruptible", lambda: nullcontext(After(999)))
    assert answered_json(*options)["status"] == "optimal"


def test_one_strategy_a_start_and_a_deadline(prices: Path, tmp_path: Path):
    options = ("--rates", RATES, "--v100-hours", 6, "--start", "2020-02-24T02:00")
    found = answered_json(prices, *options, "--strategy", "dynamic", "--deadline-hours", 8)
    assert list(found["strategies"]) == ["dynamic"]
    assert found["status"] == "feasible"
    assert found["deadline"] == "2020-02-24T10:00:00Z"
    late = answered_json(prices, *options, "--deadline-hours", 5, code=1)
    assert late["status"] == "infeasible"
    assert "at most 5 of 6 hours of work" in late["reason"]
    assert set(late["strategies"].values()) == {None}
    text = answered(prices, *options, "--strategy", "1xv100", "--deadline-hours", 5, code=1)
    assert "1xv100 does not end before the deadline" in text


def test_overheads_places_pictures_and_the_prices_as_a_file(prices: Path, tmp_path: Path):
    picture, written = tmp_path / "plan.png", tmp_path / "written.json"
    found = answered_json(
        prices, "--rates", RATES, "--v100-hours", 6, "--only", "aws", "--strategy", "optimal",
        "--checkpoint-seconds", 60, "--restore-seconds", 1800, "--egress-dollars", 1,
        "--dataset-dollars", 1, "--png", picture, "--save-prices", written,
    )  # fmt: skip
    assert found["strategies"]["optimal"]["dollars"] == pytest.approx(15.5 * 0.9)
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert {one.instance.provider for one in load_market(written).series} == {"aws"}


def test_rates_from_a_throughput_table(prices: Path, tmp_path: Path):
    table = {"v100": {"A3C": {"null": 5.0}}, "k80": {"A3C": {"null": 2.0}}, "tpu": {}}
    (tmp_path / "rates.json").write_text(json.dumps(table))
    options = ("--throughputs", tmp_path / "rates.json", "--v100-hours", 6)
    found = answered_json(prices, "--job-type", "A3C", *options)
    assert found["strategies"]["gpu-type"]["dollars"] == pytest.approx(13.5)
    result = run(prices, "--job-type", "B3C", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "no rate of 'B3C' on a v100; models: A3C" in result.stderr


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--v100-hours", "6"], "give --rates, or --job-type"),
        (["--rates", "v100"], "'v100' is no rate"),
        (["--rates", "v100=x"], "is no rate"),
        (["--rates", "v100=1,v100=2"], "appears twice"),
        (["--rates", "tpu=1"], "no instance has GPUs of kind 'tpu'"),
        (["--rates", RATES, "--strategy", "best"], "'best' is none of 1xv100"),
        (["--rates", RATES, "--home", "aws"], "'aws' is no place"),
        (["--rates", RATES, "--home", "gcp/us"], "no instance in gcp us"),
        (["--rates", RATES, "--only", "gcp"], "no prices of 'gcp'; known: aws, aws/us-east-1"),
        (["--rates", RATES, "--start", "soon"], "'soon' is no time"),
        (["--rates", RATES, "--start", "2019-01-01"], "'aws/us-east-1/p3.2xlarge' are known"),
        (["--rates", RATES, "--deadline-hours", "99"], "are known from"),
        (["--rates", RATES, "--deadline-hours", "-1"], "--deadline-hours must be more than zero"),
        (["--rates", RATES, "--v100-hours", "0"], "--v100-hours must be more than zero"),
        (["--rates", RATES, "--restore-seconds", "-1"], "restore_seconds must be finite"),
        (["--rates", RATES, "--gpus", "0"], "--gpus must be at least 1, got 0"),
        (["--rates", RATES, "--preempted", "600"], "--preempted needs a folder of logs"),
        (["--rates", RATES, "--png", "nowhere/x.png"], "does not exist"),
    ],
)
def test_bad_input_is_refused_in_one_line(prices: Path, options: list[str], word: str):
    result = run(prices, *options)
    assert (result.exit_code, result.stdout) == (2, ""), result.exception
    assert re.fullmatch(r"stagewright: [^\n]+\n", result.stderr)
    assert word in result.stderr


def test_a_missing_prices_file_is_refused(tmp_path: Path):
    result = run(tmp_path / "none.json", "--rates", RATES)
    assert result.exit_code == 2
    assert "none.json: No such file" in result.stderr


@pytest.mark.skipif(not DATA.is_dir(), reason="the public price logs are not beside the checkout")
def test_the_public_logs_are_read_as_they_are():
    found = answered_json(
        DATA / "logs", "--throughputs", DATA / "notebooks" / "oracle_throughputs.json",
        "--job-type", "A3C", "--only", "aws/us-east-1,azure", "--strategy", "optimal",
        "--preempted", 1800, "--restore-seconds", 120,
    )  # fmt: skip
    # The K80 of Azure, of whose preemptions no log tells; 96 h on a V100 are 206 h there.
    assert {stay["instance"].split("/")[0] for stay in found["plan"]} == {"azure"}
    assert found["strategies"]["optimal"]["dollars"] == pytest.approx(24.59, abs=0.05)
    assert found["gap"] < 1e-3
