"""Timed layers: pieces add up, what was not timed is scaled and said, and other models refused."""

import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from layout_problems import DEEPSEEK, GPT2, LLAMA, MIXTRAL

from stagewright.executor.export.layouts.common import anchor_script
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layout import Layout, parse_layout
from stagewright.formulations.parallelism.ranges import causes
from stagewright.formulations.parallelism.switches import price_effects
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.timed_layers import (
    TimedCollective,
    TimedLayers,
    TimedUpdate,
    read_timed_layers,
)
from stagewright.graphs.machines.anchors import TimedLayer
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.rates import RateSet, rates_of
from stagewright.graphs.models.architecture import Architecture, FeedForward, GroupedAttention
from stagewright.service.layouts.anchoring import (
    AnchoredRequest,
    AnchorRequest,
    anchor_script_of,
    rates_of_timings,
)
from stagewright.service.layouts.problems import training_problem
from stagewright.solvers.parallelism.refining import search
from stagewright.solvers.parallelism.space import Space
from stagewright.solvers.parallelism.tree import compiled_walk

SEQUENCE = 1024
TIMES = {"embedding": (1.0, 0.0, 2.0), "dense": (5.0, 6.0, 7.0), "head": (3.0, 2.0, 4.0)}
"""Milliseconds of forward and gradients of one sample; of n samples sqrt(n) times as many."""
WAITED = 0.5  # milliseconds of an exchange
PARAMETERS = sum(LLAMA.parameters().values())
UPDATE = TimedUpdate(1_000_000, 1e-3)
LEVEL = (2e-6, 250e9)  # seconds, bytes/s


def layer(kind: str, tensor: int, samples: int, exchanges: bool, **others: object) -> TimedLayer:
    by = 1e-3 * math.sqrt(samples) / tensor
    forward, of_input, of_weight = (by * one for one in TIMES[kind])
    return TimedLayer(
        kind=kind, tensor=tensor, expert=1, sequence_parallel=False, samples=samples,
        exchanges=exchanges, forward_seconds=forward + 1e-3 * WAITED * exchanges,
        input_seconds=of_input + 1e-3 * WAITED * exchanges, weight_seconds=of_weight, low=0.9,
        high=1.1, saved_bytes=1e6 * samples, **others,
    )  # fmt: skip


def timed(samples: tuple[int, ...] = (1, 4)) -> TimedLayers:
    problem = training_problem(LLAMA, fabric_of_kind("h100", 8), sequence=SEQUENCE, batch=8)
    latency, bandwidth = LEVEL
    return TimedLayers(
        model=problem.timed_model, rates=problem.rates, stack="plan", machine="8 x H100",
        through="torch 2", update=UPDATE,
        layers=tuple(
            layer(kind, tensor, count, exchanges)
            for kind in TIMES
            for tensor, exchanges in ((1, False), (2, False), (2, True))
            for count in samples
        ),
        collectives=tuple(
            TimedCollective("all-reduce", 4, size, 6 * latency + 1.5 * size / bandwidth)
            for size in (1 << 16, 1 << 20, 1 << 27)
        ),
    )  # fmt: skip


def rates(samples: tuple[int, ...] = (1, 4)) -> RateSet:
    document = rates_of_timings(AnchoredRequest(timed=timed(samples))).document
    assert document is not None
    return document


def problem(
    gpus: int, batch: int = 8, own: RateSet | None = None, **others: object
) -> TrainingProblem:
    return training_problem(
        LLAMA, fabric_of_kind("h100", gpus), sequence=SEQUENCE, batch=batch,
        rates=own or rates(), **others,
    )  # fmt: skip


def milliseconds(samples: float = 1.0) -> float:
    """Of all layers, forward and backward."""
    layers = {"embedding": 1, "dense": LLAMA.layers, "head": 1}
    return sum(n * sum(TIMES[kind]) for kind, n in layers.items()) * samples


def test_on_one_device_an_iteration_is_the_sum_of_its_timed_pieces() -> None:
    found = evaluate(problem(1), parse_layout("b4"))
    whole = 2 * 2 * milliseconds() * 1e-3 + PARAMETERS * 1e-9
    assert found.seconds == pytest.approx(whole, rel=1e-12)
    assert causes(problem(1), found.layout) == ()


def test_timings_are_interpolated_and_scaled_outside_which_is_said() -> None:
    own, update = problem(1), PARAMETERS * 1e-9
    between = evaluate(own, parse_layout("b2"))
    assert between.seconds - update == pytest.approx(4 * (4 / 3) * milliseconds() * 1e-3)
    beyond = evaluate(own, parse_layout("b8"))
    ratio = (beyond.seconds - update) / (2 * milliseconds() * 1e-3)
    assert 1.5 < ratio < 2.1
    said = causes(own, beyond.layout)
    assert "dense on 8 samples was not timed in anchored, but on 1 to 4: scaled" in said
    again = evaluate(own, parse_layout("b4 full"))
    repeated = 2 * LLAMA.layers * 2 * TIMES["dense"][0] * 1e-3
    assert again.repeated_seconds == pytest.approx(repeated)


def test_exchanges_are_timed_or_computed_over_timed_links() -> None:
    own = problem(2)
    found = evaluate(own, parse_layout("t2 b4"))
    waited = 2 * (LLAMA.layers + 2) * 2 * WAITED * 1e-3
    assert found.exchange_seconds == pytest.approx(waited)
    assert found.compute_seconds == pytest.approx(2 * 2 * milliseconds() / 2 * 1e-3)
    wide = problem(4)
    assert evaluate(wide, parse_layout("t4 b4")).seconds > 0
    assert "dense at tensor 4 was not timed in anchored: scaled from other degrees" in causes(
        wide, parse_layout("t4 b4")
    )
    (level,) = wide.fabric.levels
    assert (level.latency_seconds, level.bytes_per_second) == pytest.approx(LEVEL, rel=1e-6)


def test_timed_layers_have_no_prices_of_their_parts_and_a_switch_for_their_exchanges() -> None:
    own = problem(2)
    found = evaluate(own, parse_layout("t2 b4"))
    effects = {one.price: one for one in price_effects(own, found, compiled_walk())}
    assert effects["tensor exchange"].seconds == pytest.approx(found.exchange_seconds)
    assert effects["expert exchange"].seconds == 0
    assert effects["tensor exchange"].source.startswith("timed in anchored, or, where it was not")
    assert effects["optimizer step"].source == "timed in anchored"
    assert effects.keys().isdisjoint({"matrix products", "attention", "loss", "kernel launches"})


def test_between_servers_the_range_is_as_wide_as_that_of_computed_times() -> None:
    one, two, computed = problem(8), problem(16, 16), rates_of("h100")
    assert (one.spread.low, one.spread.high) == pytest.approx((0.9 / 1.1, 1.1 * 1.1))
    assert two.spread.low <= min(one.spread.low, computed.dense.low)
    assert two.spread.high >= max(one.spread.high, computed.dense.high)
    assert any("crosses servers" in cause for cause in causes(two, parse_layout("d16")))


def test_measured_bytes_replace_counted_ones() -> None:
    found = evaluate(problem(1), parse_layout("b4"))
    kept = 4e6 * (LLAMA.layers + 1)  # the analytic embedding keeps nothing
    share = evaluate(problem(1, own=rates_of("h100")), parse_layout("b4"))
    assert found.memory[0].activations != share.memory[0].activations
    assert found.memory[0].activations == pytest.approx(kept, rel=0.6)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"architecture": replace(LLAMA, layers=8)}, "this is llama (8 blocks"),
        ({"architecture": replace(LLAMA, tied=True)}, "another model of that name and size"),
        ({"sequence": 512}, "sequence 512"),
        ({"fabric": fabric_of_kind("a100", 8)}, "on a100"),
        ({"precision": "fp8"}, "in fp8"),
        ({"attention": "materialized"}, "materialized attention"),
    ],
)
def test_another_problem_is_refused(change: dict[str, object], said: str) -> None:
    given = {"architecture": LLAMA, "fabric": fabric_of_kind("h100", 8), "sequence": SEQUENCE}
    with pytest.raises(InputError, match="rates are of the timed layers of llama") as refused:
        training_problem(**(given | change), batch=8, rates=rates())  # type: ignore[arg-type]
    assert said in str(refused.value)


def test_the_search_finds_the_fastest_of_all_layouts() -> None:
    gpus = 8
    own = problem(gpus, 16)
    space = Space(chunks=1, schedules=("1f1b",), recompute=("none",), context=(1,), zero=(0, 1))
    found = search(own, space, keep=1).best[0]
    every = []
    for tensor in (1, 2, 4, 8):
        for pipeline in (1, 2, 4, 8):
            for samples in (1, 2, 4, 8, 16):
                for zero in (0, 1):
                    layout = Layout(
                        pipeline=pipeline, tensor=tensor, data=max(1, gpus // tensor // pipeline),
                        microbatch=samples, zero=zero, sequence_parallel=tensor > 1,
                    )  # fmt: skip
                    try:
                        every.append(evaluate(own, layout))
                    except InputError:
                        continue
    fastest = min(one.seconds for one in every if one.fits)
    assert found.seconds <= fastest * (1 + 1e-9)
    assert evaluate(own, found.layout).seconds == pytest.approx(found.seconds)


def test_the_script_times_all_degrees_that_are_searched() -> None:
    mixture = training_problem(
        MIXTRAL, fabric_of_kind("h100", 16), sequence=SEQUENCE, batch=12, framework="torchtitan"
    )
    answer = anchor_script_of(AnchorRequest(problem=mixture, framework="torchtitan"))
    assert answer.samples == (1, 2, 3, 4)
    assert set(answer.degrees) == {"embedding", "experts", "head"}
    assert answer.degrees["head"] == ((1, 1, False), (2, 1, True), (4, 1, True), (8, 1, True))
    assert {(1, 8, False), (2, 4, True), (8, 1, True)} <= set(answer.degrees["experts"])
    compile(answer.script, "anchor.py", "exec")
    assert "Qwen3TransformerBlock" in answer.script


@pytest.mark.parametrize(("architecture", "what"), [(DEEPSEEK, "latent"), (GPT2, "dropout")])
def test_models_that_the_script_has_not_are_refused(architecture: Architecture, what: str) -> None:
    other = TrainingProblem(architecture, SEQUENCE, 8, fabric_of_kind("h100", 8), rates_of("h100"))
    with pytest.raises(InputError, match=f"{what}.*use calibrate"):
        anchor_script_of(AnchorRequest(problem=other))


def test_timings_of_no_block_are_refused() -> None:
    lacking = replace(timed(), layers=tuple(one for one in timed().layers if one.kind != "dense"))
    with pytest.raises(InputError, match="no dense was timed alone"):
        rates_of_timings(AnchoredRequest(timed=lacking))


@pytest.mark.real
@pytest.mark.parametrize("stack", ["plan", "torchtitan", "megatron"])
def test_the_script_runs_on_two_ranks_and_its_sum_is_the_prediction(
    tmp_path: Path, stack: str
) -> None:
    if stack != "plan":
        pytest.importorskip(stack, exc_type=ImportError)
    tiny = Architecture("tiny", 2, 32, 64, GroupedAttention(2, 2, 16), FeedForward(64))
    wide = training_problem(tiny, fabric_of_kind("h100", 2), sequence=16, batch=2)
    degrees = dict.fromkeys(("embedding", "dense", "head"), ((1, 1, False), (2, 1, False)))
    script = anchor_script(wide.timed_model, wide.rates, stack, degrees, (1,))
    (tmp_path / "anchor.py").write_text(script)
    run = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for _ in range(3):  # another test may take the port that torchrun has chosen
        done = subprocess.run(
            [*run, "anchor.py", "measured.json", "--rounds", "1"], cwd=tmp_path, check=False,
            capture_output=True, text=True, timeout=300,
        )  # fmt: skip
        if "EADDRINUSE" not in done.stderr:
            break
    assert done.returncode == 0, done.stderr
    measured = read_timed_layers(tmp_path / "measured.json")
    assert len(measured.layers) == 9
    assert measured.skipped == ()  # a layer of a stack has as many parameters as ours
    assert measured.through.startswith("torch" if stack == "plan" else stack)
    assert {one.operation for one in measured.collectives} == {
        "all-reduce", "all-gather", "reduce-scatter", "all-to-all"
    }  # fmt: skip
    own = rates_of_timings(AnchoredRequest(timed=measured)).document
    alone = training_problem(tiny, fabric_of_kind("h100", 1), sequence=16, batch=2, rates=own)
    layers = {"embedding": 1, "dense": 2, "head": 1}
    once = sum(
        layers[one.kind] * (one.forward_seconds + one.input_seconds + one.weight_seconds)
        for one in measured.layers
        if one.tensor == 1
    )
    step = sum(tiny.parameters().values()) * measured.update.seconds / measured.update.parameters
    found = evaluate(alone, parse_layout("b1"))
    assert found.seconds == pytest.approx(2 * once + step, rel=1e-9)
