"""``train-plan``, ``memory`` and ``check`` of layouts: tables, files, exit codes, refusals."""

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from commands import answered, answered_json, refused, rewrite, run

import stagewright
from stagewright.cli import interruptible, solving
from stagewright.formulations.parallelism.document import load_layout, violations
from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.graphs.documents.errors import InputError
from stagewright.solvers.parallelism.refining import work_alike

PNG = b"\x89PNG\r\n\x1a\n"
LLAMA = {
    "model_type": "llama",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "tie_word_embeddings": True,
}


@pytest.fixture(autouse=True)
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(json.dumps(LLAMA))


MACHINES = ("--device", "h100", "--gpus", 16)
RUN = ("--global-batch", 32, "--sequence", 2048)
NARROW = ("--chunks", 2, "--schedule", "1f1b")
"""Without most of the layouts with stages in parts, which take most of a search's time."""
PLAN = ("train-plan", "config.json", *MACHINES, *RUN, "--top", 1, *NARROW)
FOUR = ("--pipeline", 4, "--replicas", 4)


def test_table_document_and_check() -> None:
    shown = answered(*PLAN, "-o", "layout.json", "--top", 3)
    assert "(optimal by the model), bound" in shown
    assert "of all layouts of 16 devices with at most 2 chunks" in shown
    plan = load_layout("layout.json")
    assert violations(plan) == ()
    assert plan.layout.ranks == 16
    assert f"{str(plan.layout).split()[0]} " in shown
    assert "layout.json: valid" in answered("check", "layout.json")


def test_a_changed_document_is_invalid() -> None:
    answered(*PLAN, "-o", "layout.json", "--top", 1)
    seconds = load_layout("layout.json").iteration_seconds
    rewrite(Path("layout.json"), iteration_seconds=0.9 * seconds)
    found = answered_json("check", "layout.json", code=1)
    assert found["status"] == "invalid"
    assert "iteration_seconds is" in found["violations"][0]


def test_rows_are_ordered_and_their_parts_are_the_whole() -> None:
    found = answered_json(*PLAN, "--pipeline", "1,2", "--replicas", 8, "--top", 20, "--no-overlap")
    assert found["status"] == "optimal"
    times = [row["seconds"] for row in found["rows"]]
    assert times == sorted(times)
    assert found["bound_seconds"] == pytest.approx(times[0])
    for row in found["rows"]:
        kinds = ("compute", "exchange", "repeated", "zero", "bubble", "gradient", "update")
        assert sum(row[f"{kind}_seconds"] for kind in kinds) == pytest.approx(row["seconds"])
        memory = row["memory"]
        parts = [value for name, value in memory.items() if name not in ("rank", "total_bytes")]
        assert sum(parts) == pytest.approx(memory["total_bytes"])
        assert memory["total_bytes"] <= 80e9


TIGHT = ("--memory", "12GB", "--pipeline", 4, "--replicas", 2, "--chunks", 1, "--zero", "0,1")


def test_blocks_by_stage() -> None:
    alike = answered_json(*PLAN, *TIGHT, "--alike")
    assert alike["refined"] is None
    found = answered_json(*PLAN, *TIGHT, "-o", "layout.json")
    assert found["rows"] == alike["rows"]
    refined = found["refined"]
    best = refined["rows"][0]
    assert best["seconds"] < found["rows"][0]["seconds"]
    assert best["peak_bytes"] <= 12e9
    assert refined["bound_seconds"] <= refined["plain_bound_seconds"] <= best["seconds"]
    plan = load_layout("layout.json")
    assert plan.iteration_seconds == best["seconds"]
    assert plan.layout.blocks_by_stage is not None
    assert str(plan.layout) == best["layout"]
    assert violations(plan) == ()
    assert plan.bound is not None
    assert "any blocks and recomputed blocks of every stage" in plan.bound.space
    assert "Blocks and recomputed blocks by stage" in answered(*PLAN, *TIGHT)
    explained = answered_json(*PLAN, *TIGHT, "--explain", best["layout"])["explained"]
    assert explained["row"]["seconds"] == pytest.approx(best["seconds"])
    assert explained["row"]["loses_by"] == "as fast"


@pytest.mark.parametrize(
    ("framework", "memory"), [("megatron", "12.75GB"), ("torchtitan", "11GB"), ("plan", "9GB")]
)
def test_blocks_by_stage_that_a_framework_can_express(framework: str, memory: str) -> None:
    Path("config.json").write_text(json.dumps(LLAMA | {"tie_word_embeddings": False}))
    tight = (*TIGHT, "--memory", memory, "--top", 10, "--schedule", "1f1b,zero-bubble")
    found = answered_json(*PLAN, *tight, "--for", framework, "-o", "layout.json")
    assert found["refined"]["rows"]
    answered("export", "layout.json", "--to", framework, "-o", "exported")


def test_explanations() -> None:
    slower = answered_json(*PLAN, "--explain", "p2 t8 d1 b1 full sp")["explained"]
    assert slower["refused"] is None
    longer = max(slower["parts"], key=lambda part: part["seconds"] - part["best_seconds"])
    assert longer["seconds"] > longer["best_seconds"]
    broken = answered(*PLAN, "--explain", "p5 t1 d4 b1")
    assert "not possible: p x t x c x d = 5 x 1 x 1 x 4 is 20 ranks; there are 16" in broken
    broken = answered(*PLAN, "--explain", "p1 t16 d1 b1 v1")
    assert "tensor degree 16 and 8 key-value heads" not in broken
    large = answered(*PLAN, "--memory", "24GB", "--explain", "p1 t1 d16 b2")
    assert "more than a device has" in large


RULES = [
    ("torchtitan", ("--precision", "fp8"), "p1 t1 d16 b1 zero3", "products in fp8: TorchTitan"),
    ("deepspeed", ("--precision", "fp8"), "p1 t1 d16 b1 zero3", "products in fp8: DeepSpeed"),
    (
        "torchtitan",
        ("--pipeline", 2, "--replicas", 8, "--chunks", 1, "--zero", 3),
        "p2 t1 d8 b1 zero3",
        "ZeRO 3 in a pipeline: TorchTitan keeps whole weights",
    ),
    ("torchtitan", ("--tensor", 16), "p1 t16 d1 b1 sp", "tensor degree 16 with 8 key-value heads"),
]


@pytest.mark.parametrize(("framework", "options", "layout", "rule"), RULES)
def test_a_rule_of_the_framework_is_named(
    framework: str, options: tuple[object, ...], layout: str, rule: str
) -> None:
    """Without a layout in the table, in an explanation, and by an export."""
    Path("config.json").write_text(json.dumps(LLAMA | {"tie_word_embeddings": False}))
    asked = (*PLAN, *options, "--for", framework)
    assert rule in refused(*asked)
    found = answered_json(*asked, "--explain", layout, code=1)
    assert found["status"] == "infeasible"
    assert rule in found["reason"]
    assert found["explained"]["row"] is None
    explained = found["explained"]["refused"]
    assert explained.startswith(f"{framework} cannot express it: {rule}")
    answered(*PLAN, *options, "--alike", "--top", 1, "-o", "layout.json")
    assert rule in refused("export", "layout.json", "--to", framework, "-o", "out")


def test_the_run_that_one_has_is_explained() -> None:
    """An export is such a run: its layout is explained with the same prices, and bettered."""
    own = ("--pipeline", 4, "--tensor", 2, "--replicas", 2, "--for", "megatron")
    answered(*PLAN, *own, "-o", "layout.json")
    answered("export", "layout.json", "--to", "megatron", "-o", "megatron.sh")
    given = ("train-plan", "--from", "megatron.sh", "--device", "h100", "--top", 1)
    found = answered_json(*given)
    plan = load_layout("layout.json")
    assert found["explained"]["layout"] == str(plan.layout)
    assert found["explained"]["seconds"] == pytest.approx(plan.iteration_seconds)
    best = found["rows"][0]
    assert best["seconds"] < plan.iteration_seconds
    assert "pipeline 4 -> 1" in found["explained"]["differs"]
    assert "the best differs in pipeline 4 -> 1" in answered(*given, "--gpus", 32)
    assert "leave one of them out" in refused(*given, "--explain", "p2 d8")
    assert "give a model, for example its config.json" in refused("train-plan", *MACHINES)
    assert "--global-batch is missing" in refused(*PLAN[:2], *MACHINES, "--sequence", 2048)


def test_front_and_what_if() -> None:
    found = answered_json(
        *PLAN, "--pipeline", 1, "--tensor", 1, "--front", "--what-if", "--png", "front.png"
    )
    peaks = [point["peak_bytes"] for point in found["front"]]
    times = [point["seconds"] for point in found["front"]]
    assert peaks == sorted(peaks, reverse=True)
    assert times == sorted(times)
    best = found["rows"][0]["seconds"]
    assert all(one["seconds"] <= best * (1 + 1e-9) for one in found["what_if"])
    assert Path("front.png").read_bytes().startswith(PNG)


def test_no_layout_fits() -> None:
    asked = (
        "--pipeline",
        "1,2",
        "--replicas",
        "8,16",
        "--memory",
        "3GB",
        "-o",
        "layout.json",
        "--explain",
        "p1 t1 d16 b1",
    )
    shown = answered(*PLAN, *asked, code=1)
    assert "infeasible" in shown
    assert "the best" not in shown
    assert "inf s" not in shown
    assert "no plain pipeline of any division is possible" in " ".join(shown.split())
    assert "would need" in shown
    assert not Path("layout.json").exists()


def test_memory_by_rank() -> None:
    answered(*PLAN, "-o", "layout.json", *FOUR)
    found = answered_json("memory", "layout.json", "--png", "bars.png")
    assert [one["rank"] for one in found["ranks"]] == [0, 1, 2, 3]
    assert found["shortages"] == []
    assert Path("bars.png").read_bytes().startswith(PNG)
    plan = load_layout("layout.json")
    totals = [one["total_bytes"] for one in found["ranks"]]
    assert totals == [pytest.approx(one.total) for one in plan.memory]
    asked = ("memory", "config.json", "--layout", "p4 t2 d2 b1", "--sequence", 4096)
    assert "a device has" not in answered(*asked)
    full = answered(*asked, "--memory", "4GB", code=1)
    assert "pipeline rank 0 needs" in full


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"--gpus": 12},
            "--gpus 12 are not whole servers of 8: give 8 or 16, or the GPUs in a server "
            "with --per-server, such as 6",
        ),
        ({"--device": "h1000"}, "device 'h1000' is not known; known are"),
        ({"--global-batch": 0}, "--global-batch must be at least 1"),
        ({"--sequence": 0}, "--sequence must be at least 1"),
        ({"--tensor": "two"}, "--tensor 'two': write for example 1,2,4"),
        ({"--zero": "4"}, "--zero: 4 is none of 0, 1, 2, 3"),
        (
            {"--recompute": "some"},
            "--recompute: 'some' is none of none, selective, full, modules, offload and",
        ),
        ({"--rates": "fast"}, "--rates 'fast' are not known; known are fsdp-a100"),
        ({"--rates": "none.json"}, "none.json"),
        ({"--for": "none"}, "--for 'none' is not known; there are megatron, "),
        (
            {"--for": "fsdp"},
            "nnscaler, plan; torch's FSDP is that of torchtitan, or of accelerate",
        ),
        ({"--schedule": "gpipe"}, "--schedule: 'gpipe' is none of 1f1b, zero-bubble"),
        ({"--explain": "p2 x3"}, "layout word 'x3' is not known; known are pN, tN"),
        ({"--explain": "p2 p3"}, "layout 'p2 p3': pipeline appears twice"),
        ({"--chunks": 2000}, "--chunks must be at most 1024, got 2000"),
        ({"--per-rack": 8}, "--per-rack and --rack-bandwidth belong together: give both"),
        (
            {"--tensor": "3"},
            "no degrees of the space are possible: 16 devices are no multiple of t x c = 3 x 1",
        ),
        ({"--device": "v100", "--precision": "fp8"}, "v100 has no fp8 arithmetic"),
    ],
)
def test_refusals(changed: dict[str, object], message: str) -> None:
    options = dict(zip((*MACHINES, *RUN)[::2], (*MACHINES, *RUN)[1::2], strict=True)) | changed
    assert message in refused(
        "train-plan", "config.json", *(x for pair in options.items() for x in pair)
    )


def test_plan_and_train_plan_name_each_other() -> None:
    assert "alone, which `stagewright plan` cuts layer by layer" in answered(*PLAN, "--tensor", 1)
    answered("model", "config.json", "--device", "h100", "--sequence", 2048, "-o", "model.json")
    answered("cluster", "1x2", "--device", "h100", "--memory", "4GB", "-o", "c.json")
    given = ("plan", "--model", "model.json", "--cluster", "c.json", "--microbatches", 4)
    shown = answered(*given, "--planner", "dp", code=1)
    assert "`stagewright train-plan` may find what fits" in " ".join(shown.split())


def test_what_a_cluster_file_says_is_not_said_again() -> None:
    answered(
        "cluster",
        "2x8",
        "--intra",
        "300GB/s",
        "--inter",
        "25GB/s",
        "--device",
        "a100",
        "-o",
        "c.json",
    )
    assert "(optimal by the model)" in answered(
        "train-plan", "config.json", "--cluster", "c.json", *RUN, "--top", 1
    )
    message = refused("train-plan", "config.json", "--cluster", "c.json", "--gpus", 8, *RUN)
    assert message == "--gpus: the cluster file says it; leave it out"


def test_offload_needs_the_way_to_the_host() -> None:
    assert (
        refused(*(one if one != "h100" else "mi300x" for one in PLAN), "--offload-optimizer")
        == "--offload-optimizer needs --host-bandwidth, for example 25GB/s"
    )
    assert (
        run(*PLAN, "--offload-optimizer", "--host-bandwidth", "25GB/s", "--top", 1).exit_code == 0
    )


@pytest.mark.parametrize(
    "text",
    [
        "p8 t8 c2 d2 e4 b1 v3 zero1 blocks2 first1 last1 full zero-bubble sp offload "
        "pipeline-inside",
        "p1 t1 d1 b1",
    ],
)
def test_layouts_are_read_as_they_are_written(text: str) -> None:
    assert str(parse_layout(text)) == text


@pytest.mark.parametrize("to", ["megatron", "nemo"])
def test_export_of_a_layout(to: str) -> None:
    shown = answered(*PLAN, "-o", "layout.json", "--pipeline", 2, "--replicas", 8, "--for", to)
    assert f"of all layouts of 16 devices that {to} can express with" in shown
    found = answered_json("export", "layout.json", "--to", to, "-o", ".")
    assert found["status"] == "written"
    assert all(Path(name).read_text().strip() for name in found["files"])
    message = refused("export", "layout.json", "--to", "torch-csv", "-o", "x.csv")
    assert message.startswith("--to 'torch-csv' is not known; there are megatron, ")
    message = refused("export", "layout.json", "--to", to, "-o", ".", "--partition-only")
    assert message == "--partition-only does not apply to a layout"
    assert (
        refused("export", "layout.json", "--to", to, "-o", ".", "--model", model_file())
        == "--model gives the names of layers, which only --to plan takes"
    )


def model_file() -> str:
    answered("model", "config.json", "--microbatch-size", 1, "--sequence", 2048, "-o", "model.json")
    return "model.json"


def test_a_layout_becomes_a_plan() -> None:
    rewrite(Path("config.json"), tie_word_embeddings=False)
    degrees = ("--pipeline", 2, "--tensor", 2)
    one_server = ("train-plan", "config.json", "--device", "h100", "--gpus", 8, *RUN)
    shown = answered(*one_server, *degrees, "--for", "plan", "-o", "layout.json")
    assert "that plan can express with" in shown
    shown = answered("export", "layout.json", "--to", "plan", "-o", "out")
    assert "out/plan.json is written" in shown
    documents = ("out/plan.json", "--model", "out/model.json", "--cluster", "out/cluster.json")
    assert ": valid" in answered("check", *documents)
    layout = load_layout("layout.json")
    seconds = answered_json("simulate", *documents)["iteration_seconds"]
    assert seconds == pytest.approx(layout.iteration_seconds, rel=0.2)
    assert "tensor" in answered("show", "out/plan.json")
    answered("export", "out/plan.json", "--to", "torchrun", "--command", "train",
             "--cluster", "out/cluster.json", "-o", "launch.sh")  # fmt: skip


def test_names_of_a_plan_are_those_of_the_model() -> None:
    answered(*PLAN, "--for", "plan", "-o", "layout.json")
    given = ("--to", "plan", "-o", "out", "--model", model_file())
    answered("export", "layout.json", *given)
    layers = json.loads(Path("out/plan.json").read_text())["layers"]
    assert [one["name"] for one in layers][:2] == ["embedding", "block0"]
    rewrite(Path("config.json"), num_hidden_layers=2)
    model_file()
    assert refused("export", "layout.json", *given) == (
        "the layout's model has 18 layers (embedding, 16 blocks, head), the names are 4"
    )


@pytest.mark.parametrize("to", ["deepspeed", "accelerate"])
def test_whole_recomputation_where_a_framework_knows_no_other(to: str) -> None:
    """The explained layout fits, and is in the space: it cannot be faster than the best."""
    asked = (*PLAN, "--for", to, "--memory", "12GB", "--top", 1)
    found = answered_json(*asked, "--explain", "p1 t1 d16 b1 zero3 full")
    assert found["explained"]["shortages"] == []
    assert found["rows"][0]["seconds"] <= found["explained"]["row"]["seconds"] * (1 + 1e-9)


def test_a_layout_file_has_its_own_machines() -> None:
    answered(*PLAN, "-o", "layout.json", "--top", 1)
    message = refused("memory", "layout.json", "--memory", "40GB")
    assert message.endswith("of the options only --png, --json and --server apply")
    message = refused("train-plan", "config.json", "--device", "v100", "--gpus", 8, *RUN)
    assert message == "--precision bf16: v100 has no bf16 arithmetic; it may be fp16"


def test_layouts_that_do_the_same_work_are_folded() -> None:
    asked = (*PLAN, "--pipeline", 1)
    folded = answered_json(*asked, "--top", 10)["rows"]
    kinds = [work_alike(parse_layout(row["layout"])) for row in folded]
    assert len(set(kinds)) == len(kinds) == 10
    for row, kind in zip(folded, kinds, strict=True):
        assert all(work_alike(parse_layout(one)) == kind for one in row["alike"])
    number = sum(len(row["alike"]) for row in folded)
    assert f"folded: {number} evaluated layouts that differ from" in answered(*asked, "--top", 10)
    every = answered_json(*asked, "--unfolded", "--top", 10 + number)["rows"]
    assert len({work_alike(parse_layout(row["layout"])) for row in every}) < len(every)
    assert not any(row["alike"] for row in every)
    assert every[0]["seconds"] == pytest.approx(folded[0]["seconds"])
    assert "folded" not in answered(*asked, "--unfolded")


TABLE = re.compile("^ .*\\S", re.MULTILINE)


def test_tables_fit_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line is longer, and no word, heading or figure is broken or lost."""
    asked = (*PLAN, "-o", "layout.json", *FOUR, "--alike", "--chunks", 2, "--top", 12)
    found = answered_json(*asked)
    ranks = answered_json("memory", "layout.json")["ranks"]
    for width in ("80", "200"):
        monkeypatch.setenv("COLUMNS", width)
        shown = TABLE.findall(answered(*asked))
        assert max(map(len, shown)) <= int(width)
        words = set(" ".join(shown).split())
        for row in found["rows"]:
            assert {*row["layout"].split(), *row["loses_by"].split()} <= words
        heads = {"layout", "time", "MFU", "TFLOP/s", "memory", "weights", "optimizer"}
        assert heads | {"activations", "loses", "by"} <= words
        shown = TABLE.findall(answered("memory", "layout.json"))
        assert len(shown) == len(ranks) + 2
        assert max(map(len, shown)) <= int(width)
        kinds = {"weights", "gradients", "optimizer", "activations", "buffers", "total", "free"}
        assert kinds <= set(shown[0].split())


def test_tokens_per_second_and_days() -> None:
    asked = (*PLAN, *FOUR, "--alike", "--chunks", 1)
    found = answered_json(*asked, "--tokens", "15e12")
    for row in found["rows"]:
        assert row["tokens_per_second"] == pytest.approx(32 * 2048 / row["seconds"])
    days = 15e12 / found["rows"][0]["tokens_per_second"] / 86_400
    assert found["training_days"] == pytest.approx(days)
    shown = answered(*asked, "--tokens", "15e12")
    assert f"all tokens take {days:,.1f} days without interruptions" in shown
    # One token more than ten iterations are eleven.
    one = answered_json(*asked, "--tokens", 10 * 32 * 2048 + 1)
    assert one["training_days"] == pytest.approx(11 * one["rows"][0]["seconds"] / 86_400)
    assert refused(*asked, "--tokens", 0).startswith("--tokens: ")


def test_samples_longer_than_the_model_knows_are_a_warning() -> None:
    rewrite(Path("config.json"), max_position_embeddings=2048)
    assert answered(*PLAN, "--top", 1)
    rewrite(Path("config.json"), max_position_embeddings=2047)
    for asked in (PLAN, ("memory", "config.json", "--layout", "p1 t1 d8 b1", "--sequence", 2048)):
        result = run(*asked)
        assert result.exit_code == 0
        assert re.fullmatch(
            r"stagewright: warning: --sequence 2048 is more than the max_position_embeddings of "
            r"config.json, 2047; [^\n]+\n",
            result.stderr,
        )


def test_a_configuration_without_layout_or_sequence_is_refused_by_what_it_lacks() -> None:
    lacks = "--sequence is missing: the tokens in a sample, for example 4096"
    assert refused("memory", "config.json", "--layout", "d8 b1") == lacks
    lacks = '--layout is missing: for example "p2 t4 d8 b1"'
    assert refused("memory", "config.json", "--sequence", 4096) == lacks


def test_ranges_and_rates_are_printed() -> None:
    shown = " ".join(answered(*PLAN, "--rates", "torchtitan-h100").split())
    assert "when measured; peak memory" in shown
    assert "on a machine as fast as the fastest measured" in shown
    assert "rates: torchtitan-h100 (fitted to" in shown
    asked = ("memory", "config.json", "--layout", "p4 t2 d2 b1", "--sequence", 4096)
    peak = answered_json(*asked, "--for", "fsdp")["peak_bytes"]
    near = answered(*asked, "--for", "fsdp", "--memory", f"{0.99 * peak / 1e9}GB")
    assert "fits within the range, not at its upper end" in " ".join(near.split())


def test_an_interrupted_search_answers_with_a_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even before the first layout was evaluated; its bound holds, and it is not called optimal."""
    best = answered_json(*PLAN, "--top", 1)["rows"][0]["seconds"]

    @contextmanager
    def stopped() -> Iterator[threading.Event]:
        with interruptible() as stop:
            stop.set()
            yield stop

    monkeypatch.setattr(solving, "interruptible", stopped)
    found = answered_json(*PLAN, "-o", "layout.json")
    assert found["status"] == "interrupted"
    assert found["bound_seconds"] <= best * (1 + 1e-9)
    assert found["rows"][0]["seconds"] >= best * (1 - 1e-9)
    assert violations(load_layout("layout.json")) == ()
    assert "(not proved: interrupted), bound" in answered(*PLAN)


def test_two_layouts_are_compared() -> None:
    answered(*PLAN, *FOUR, "--alike", "-o", "four.json")
    answered(*PLAN, "--pipeline", 1, "--zero", "2,3", "--alike", "-o", "one.json")
    found = answered_json("diff", "four.json", "one.json")
    first, second = load_layout("four.json"), load_layout("one.json")
    whole = found["iteration"]
    for name, plan in (("first", first), ("second", second)):
        assert whole[f"{name}_seconds"] == pytest.approx(plan.iteration_seconds)
        parts = sum(part[f"{name}_seconds"] for part in found["parts"])
        assert parts == pytest.approx(plan.iteration_seconds)
    peaks = [[one.total for one in plan.memory] for plan in (first, second)]
    assert found["memory_bytes"] == [pytest.approx(one) for one in peaks]
    assert {"pipeline 4 -> 1", "data 4 -> 16"} <= set(found["changes"])
    moved = {part["cause"]: part for part in found["prices"]}
    assert moved["pipeline transfers"]["second_seconds"] == 0
    assert "pipeline 4 -> 1" in answered("diff", "four.json", "one.json")
    assert "nothing is different" in answered("diff", "one.json", "one.json")
    assert "expected a 'stagewright-layout'" in refused("diff", "one.json", "config.json")
    told = stagewright.diff(first, replace(second, problem=replace(second.problem, sequence=1024)))
    assert "sequence 2048 -> 1024" in told.changes
    other = replace(second.problem, architecture=replace(second.problem.architecture, layers=8))
    with pytest.raises(InputError, match="only layouts of one model"):
        stagewright.diff(first, replace(second, problem=other))


KINDS = ("train-plan", "config.json", "--servers", "a100:1x2,h100:1x4", *RUN)


def test_servers_of_several_kinds() -> None:
    shown = answered(*KINDS, "-o", "mixed.json", "--time-limit", 5)
    assert "when measured, if each kind is within its rates' range" in shown
    assert "valid" in answered("check", "mixed.json")
    assert "--gpus does not apply to a config.json on --servers" in refused(*KINDS, "--gpus", 8)
    assert "--servers" in refused(*PLAN[:2], "--servers", "a200:1x2", *RUN)
    assert "--precision must be fp32, fp16, bf16" in refused(
        *KINDS[:3], "h100:1x4", *RUN, "--precision", "fp8"
    )


SIZES = (*PLAN[:2], "--device", "h100", "--gpus", "8-32", *RUN, "--alike")


def test_several_numbers_of_gpus_and_a_deadline() -> None:
    few = (*NARROW, "--pipeline", "1,2", "--tensor", 1, "--context", 1, "--microbatch-sizes", 1,
           "--zero", "0,1")  # fmt: skip
    asked = (*SIZES, *few, "--tokens", "1e11", "--price", "2.5")
    found = answered_json(*asked, "--png", "front.png")
    rows = found["rows"]
    assert [row["gpus"] for row in rows] == [8, 16, 32]
    for row in rows:
        one = answered_json(*asked[:5], row["gpus"], *asked[6:-2])
        assert row["layout"] == one["rows"][0]["layout"]
        assert row["days"] == pytest.approx(one["training_days"])
        assert row["bound_days"] <= row["days"] <= row["days_high"]
        assert row["dollars"] == pytest.approx(2.5 * row["gpus"] * 24 * row["days"])
        assert row["is_pareto"] == all(
            other is row or other["days"] > row["days"] or other["dollars"] > row["dollars"]
            for other in rows
        )
    assert Path("front.png").read_bytes().startswith(PNG)
    limit = (rows[1]["days"] + rows[0]["days"]) / 2
    shown = answered(*asked, "--deadline", f"{limit}d", "-o", "chosen.json")
    able = [row for row in rows if row["days"] <= limit]
    cheapest = min(able, key=lambda row: row["dollars"])
    assert f"chosen: {cheapest['gpus']} GPUs" in shown
    assert str(load_layout("chosen.json").layout) == cheapest["layout"]
    none = answered(*asked, "--deadline", "1min", code=1)
    assert "(proved by the bounds); the nearest takes" in none
    assert "on 32 GPUs" in none


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--deadline", "3d"), "--deadline needs --tokens"),
        (("--server", "http://127.0.0.1:1"), "--server: it plans one size, without --price"),
        (("-o", "layout.json"), "-o keeps the layout that --deadline chooses"),
        (("--price", "cheap"), "--price 'cheap' is neither a number of dollars nor a file"),
        (("--price", "-1"), "--price: "),
        (("--what-if",), "--from, --explain, --front and --what-if are of one number of GPUs"),
        (("--gpus", "32-8"), "--gpus '32-8' goes down"),
        (("--sequence", "2048,0"), "--sequence must be at least 1"),
    ],
)
def test_refusals_of_several_sizes(options: tuple[object, ...], message: str) -> None:
    assert message in refused(*SIZES, *options)


def test_sequences_are_swept_and_prices_are_of_the_market() -> None:
    spot = {"provider": "aws", "region": "us", "name": "p5", "gpu": "H100", "gpus": 8}
    series = [
        {"instance": spot | {"on_demand": 32.0}, "seconds": [0.0], "dollars_per_hour": [9.0],
         "until_seconds": 10.0},
    ]  # fmt: skip
    market = {"series": series, "format": "stagewright-prices", "version": 1}
    Path("prices.json").write_text(json.dumps(market))
    asked = (*PLAN, "--alike", "--pipeline", 1, "--price", "prices.json")
    found = answered_json(*asked, "--sequence", "1024,2048")
    assert [row["sequence"] for row in found["rows"]] == [1024, 2048]
    for row in found["rows"]:
        assert row["dollars"] == pytest.approx(4.0 * row["gpu_hours"])
        assert row["days"] == pytest.approx(1e9 / row["tokens_per_second"] / 86_400)
        assert row["is_pareto"]
    assert "no a100 on demand, only H100" in refused(*asked, "--device", "a100")


FAILING = (*PLAN, *FOUR, "--alike", "--mtbf", "2000h", "--checkpoint-bandwidth", "100MB/s")


def test_failures_rank_layouts_and_take_their_time() -> None:
    asked = (*FAILING, "--top", 3, "--repair", "12h", "--tokens", "1e11")
    found = answered_json(*asked, "--simulate", 5)
    rows, failures = found["rows"], found["failures"]
    times = [row["effective_seconds"] for row in rows]
    assert times == sorted(times)
    assert all(
        row["goodput"] == pytest.approx(row["seconds"] / row["effective_seconds"]) for row in rows
    )
    assert failures["bound_effective_seconds"] <= times[0] == failures["effective_seconds"]
    assert failures["simulated_low"] <= failures["goodput"] <= failures["simulated_high"]
    days = 1e11 / (32 * 2048) * times[0] / 86_400
    assert found["training_days"] == pytest.approx(days, rel=1e-5)
    shown = answered(*asked, "--explain", rows[2]["layout"])
    assert f"goodput {failures['goodput']:.2%}; bound" in shown
    assert f"goodput {rows[2]['goodput']:.2%}" in shown
    assert f"all tokens take {days:,.1f} days with failures" in shown
    assert "with servers too few " in shown


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--spares", 2), "--spares: needs --mtbf, for example 50000h"),
        (("--mtbf", "9h"), "--mtbf needs --checkpoint-bandwidth, for example 2GB/s"),
        ((*FAILING[-4:], "--mtbf", 9), "--mtbf '9' has no unit; write for example 90s"),
        ((*FAILING[-4:], "--spares", 1), "--spares need --repair: without it no server is away"),
        (("--simulate", 5), "--simulate must be 2 or more, of runs with failures"),
    ],
)
def test_refusals_of_failures(options: tuple[object, ...], message: str) -> None:
    assert message in refused(*PLAN, *options)
