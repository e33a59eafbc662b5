"""How far an answer about layouts can be trusted: ranges, three answers to fits, known prices."""

from dataclasses import fields, replace
from pathlib import Path
from typing import get_args

import pytest
from layout_problems import LLAMA, MIXTRAL

from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layout import Layout, parse_layout
from stagewright.formulations.parallelism.ranges import causes, expected, ranges, unknown_prices
from stagewright.formulations.parallelism.switches import price_effects
from stagewright.formulations.parallelism.training import Price, SwitchedProblem, TrainingProblem
from stagewright.formulations.prices.computing import precision_named
from stagewright.graphs.documents.documents import write
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.rates import (
    OTHER_DEVICE,
    UNMEASURED,
    Beyond,
    Feature,
    RateSet,
    Reached,
    Spread,
    rates_named,
)
from stagewright.graphs.machines.stack_memory import PLAIN, STACK_MEMORY
from stagewright.graphs.models.architecture import Architecture
from stagewright.graphs.models.recurrences import Recurrence
from stagewright.service.layouts.explaining import layout_memory
from stagewright.service.layouts.problems import training_problem
from stagewright.service.layouts.requests import LayoutAnswer, LayoutRequest, MemoryRequest
from stagewright.service.layouts.searching import find_layouts
from stagewright.solvers.parallelism.space import Space
from stagewright.solvers.parallelism.tree import compiled_walk

OWN = replace(
    rates_named("megatron-h100-26.06"),
    name="mine",
    measured=("products in 8 bits", "products in 16 bits"),
    dense=Spread(0.9, 1.2),
    experts=Spread(0.8, 1.3),
    memory=Spread(0.95, 1.05),
)
FEATURES: tuple[Feature, ...] = (
    "ZeRO 2-3 between servers", "context parallelism", "experts between servers",
)  # fmt: skip
ALL = (*FEATURES, *OWN.measured)
FSDP = parse_layout("p1 t1 c2 d8 b1 zero3")


def problem_of(
    of: Architecture = LLAMA, rates: RateSet | str | None = OWN, gigabytes: float = 80.0,
    framework: str | None = None, device: str = "h100", reserve_bytes: float | None = None,
) -> TrainingProblem:  # fmt: skip
    """Two servers of eight devices."""
    fabric = fabric_of_kind(device, 16, memory_bytes=gigabytes * 1e9)
    return training_problem(
        of, fabric, sequence=2048, batch=16, rates=rates, framework=framework,
        reserve_bytes=reserve_bytes,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("memory", "fits"),
    [(1.06, "yes"), (1.04, "within the range"), (0.96, "within the range"), (0.94, "no")],
)
def test_a_layout_fits_or_not_or_within_the_range(memory: float, fits: str) -> None:
    peak = evaluate(problem_of(), FSDP).peak_bytes
    problem = problem_of(gigabytes=memory * peak / 1e9)
    answer = layout_memory(MemoryRequest.of(problem=problem, layout=FSDP))
    assert answer.fits == fits
    assert answer.rates.startswith("mine (fitted to")
    found = (answer.peak_bytes, answer.peak_bytes_low, answer.peak_bytes_high)
    assert found == pytest.approx((peak, 0.95 * peak, 1.05 * peak))


@pytest.mark.parametrize(("of", "low", "high"), [(LLAMA, 0.9, 1.2), (MIXTRAL, 0.8, 1.3)])
def test_seconds_have_the_range_of_the_rates_and_of_what_these_lack(
    of: Architecture, low: float, high: float
) -> None:
    lacks: dict[Feature | Beyond, RateSet] = {
        FEATURES[0]: replace(OWN, measured=(*OWN.measured, FEATURES[1])),
        FEATURES[1]: replace(OWN, measured=(*OWN.measured, FEATURES[0])),
        "products in 16 bits": replace(OWN, measured=FEATURES),
        "more GPUs": replace(OWN, measured=ALL, most_devices=15),
        "longer sequences": replace(OWN, measured=ALL, longest_sequence=2047),
    }
    for rates, widened in (
        (replace(OWN, measured=ALL), (1.0, 1.0)),
        *((one, UNMEASURED[lack]) for lack, one in lacks.items()),
    ):
        found = evaluate(problem_of(of, rates), FSDP)
        of_it = ranges(problem_of(of, rates), found)
        assert (of_it.seconds_low, of_it.seconds_high) == pytest.approx(
            (low / widened[0] * found.seconds, high * widened[1] * found.seconds)
        )
        assert len(causes(problem_of(of, rates), FSDP)) == (widened != (1.0, 1.0))


def test_no_run_has_recurrent_mixers() -> None:
    of = replace(LLAMA, attention=Recurrence("ssd", 8, 16, 8, 2, chunk=16, kernel_size=4))
    problem = problem_of(of, replace(OWN, measured=ALL))
    assert causes(problem, Layout(data=16)) == ("Mamba-2 mixers not measured in mine",)
    assert expected(problem, ()) == problem.spread.widened(*UNMEASURED["recurrent mixers"])


@pytest.mark.parametrize("precision", ["fp32", "tf32"])
def test_products_in_32_bits_are_not_those_in_16(precision: str) -> None:
    problem = problem_of(rates=replace(OWN, measured=ALL))
    found = causes(replace(problem, precision=precision_named(precision)), Layout(data=16))
    assert found[0] == "products in 32 bits not measured in mine"
    assert any("allow_tf32" in one for one in found) == (precision == "tf32")
    wide = expected(replace(problem, precision=precision_named(precision)), ())
    assert wide == problem.spread.widened(*UNMEASURED["products in 32 bits"])


def test_every_price_has_a_source_and_a_switch() -> None:
    """Without all of them an iteration takes the launches' time, which is none here."""
    layout = parse_layout("p2 t2 c2 d2 e2 b1 zero1 full sp")
    problem = problem_of(MIXTRAL)
    found = evaluate(problem, layout)
    effects = {one.price: one for one in price_effects(problem, found, compiled_walk())}
    assert {"matrix products", "tensor exchange", "bubble", "recomputation"} <= effects.keys()
    for one in effects.values():
        assert one.source
        assert one.seconds == pytest.approx(found.seconds - one.without_seconds)
        assert -1e-12 <= one.seconds < found.seconds
    seen = ("matrix products", "tensor exchange", "expert exchange", "optimizer step", "bubble")
    assert all(effects[name].seconds > 0 for name in seen)
    assert "365 GB/s" in effects["tensor exchange"].source
    assert f"matmul {problem.reached.matmul:.3g}, half_flops" in effects["matrix products"].source
    rates = replace(OWN, reached=Reached(0.6, 0.0, 0.7, 1e-12))
    given = {one.name: getattr(problem, one.name) for one in fields(problem)} | {"rates": rates}
    free = SwitchedProblem(**given, free=frozenset(get_args(Price)))
    assert evaluate(free, layout).seconds < 1e-6


@pytest.mark.parametrize("framework", ["torchtitan", "megatron", "deepspeed", "plan", None])
def test_the_framework_decides_rates_and_memory(framework: str | None) -> None:
    problem = problem_of(framework=framework, rates=None)
    assert problem.memory == (STACK_MEMORY[framework] if framework else PLAIN)
    assert problem.reserve_bytes == problem.memory.reserve_bytes
    assert problem_of(framework=framework, reserve_bytes=3e9).reserve_bytes == 3e9
    others = {"torchtitan", "megatron", "deepspeed"} - {framework}
    seconds = evaluate(problem, FSDP).seconds
    for other in others if framework in ("torchtitan", "megatron", "deepspeed") else ():
        assert evaluate(problem_of(framework=other, rates=None), FSDP).seconds != seconds


def test_rates_by_name_say_what_is_borrowed(tmp_path: Path) -> None:
    name, path = "megatron-h100-26.06", str(tmp_path / "own.json")
    own, far = problem_of(rates=name), problem_of(rates=name, device="b200")
    assert own.rates.borrowed is None
    assert str(far.rates).startswith(f"{name}, not measured on b200 (fitted to")
    assert far.spread == own.spread.widened(OTHER_DEVICE)
    both = problem_of(rates=name, device="b200", framework="torchtitan")
    assert causes(both, Layout(data=16)) == (
        "rates not measured with torchtitan", "rates not measured on b200",
    )  # fmt: skip
    write(RateSet, OWN, path)
    assert problem_of(rates=path, framework="nemo").rates == OWN
    with pytest.raises(InputError, match="stack 'mesh' is not known; known are"):
        problem_of(rates=None, framework="mesh")


@pytest.mark.parametrize(
    ("layout", "of", "unknown"),
    [
        ("p1 t1 c2 d8 b1 zero1", LLAMA, {"context parallelism"}),
        ("p1 t1 d16 b1 zero2", LLAMA, {"ZeRO 2-3 between servers"}),
        ("p2 t1 d8 b1 zero3", LLAMA, set()),
        ("p1 t1 d16 e8 b1 zero1", MIXTRAL, set()),
        ("p1 t1 d16 e16 b1 zero1", replace(MIXTRAL, experts=None), {"experts between servers"}),
    ],
)
def test_prices_that_were_not_measured(layout: str, of: Architecture, unknown: set[str]) -> None:
    problem, layout_of = problem_of(of), parse_layout(layout)
    assert set(unknown_prices(problem, layout_of)) == unknown
    assert len(causes(problem, layout_of)) == len(unknown)
    measured = replace(problem, rates=replace(OWN, measured=ALL))
    assert unknown_prices(measured, layout_of) == ()
    borrowed = replace(problem, rates=replace(OWN, measured=ALL, borrowed="not on this"))
    assert set(unknown_prices(borrowed, layout_of)) == unknown


def answer_of(problem: TrainingProblem, **fields: object) -> LayoutAnswer:
    """Of a space in which the fastest layout of so little memory has ZeRO 3."""
    space = Space(tensor=(1, 2), chunks=2, schedules=("1f1b",), recompute=("full",))
    return find_layouts(
        LayoutRequest.of(problem=problem, **{"space": space, "by_stage": False} | fields)
    )


def test_the_surest_layout_beside_the_fastest() -> None:
    problem = problem_of(gigabytes=4.0)
    fastest = answer_of(problem, explain=FSDP)
    row, sure = fastest.rows[0], fastest.surest
    assert sure is not None
    assert "zero3" in row.layout.split()
    assert row.seconds < sure.seconds
    assert unknown_prices(problem, parse_layout(sure.layout)) == ()
    (remark,) = fastest.remarks
    assert (
        f"not measured (ZeRO 2-3 between servers); the fastest with known prices is {sure.layout}"
        in remark
    )
    low = 0.9 / UNMEASURED[FEATURES[0]][0] / UNMEASURED[FEATURES[1]][0]
    assert fastest.bound_fastest_seconds == pytest.approx(low * (fastest.bound_seconds or 0))
    one = fastest.explained
    assert one is not None
    assert one.row is not None
    assert (one.seconds, one.peak_bytes, one.fits) == (
        one.row.seconds,
        one.row.peak_bytes,
        one.row.fits,
    )
    assert one.causes == tuple(f"{each} not measured in mine" for each in FEATURES[:2])
    part = replace(problem.architecture, left_out="its other tower")
    surest = answer_of(replace(problem, architecture=part), prefer="surest")
    assert surest.surest is None
    assert surest.remarks == ("without its other tower",)
    assert surest.rows[0].layout == sure.layout
    assert surest.plan is not None
    assert str(surest.plan.layout) == sure.layout
    measured = replace(problem, rates=replace(OWN, measured=ALL))
    assert answer_of(measured).remarks == ()
    assert answer_of(measured, prefer="surest").rows[0].layout == row.layout


def test_no_layout_with_known_prices() -> None:
    problem = problem_of()
    for only, price in (
        (Space(zero=(3,), tensor=(1,), context=(1,), pipeline=(1,)), "ZeRO 2-3 between servers"),
        (Space(zero=(0,), context=(2,), pipeline=(1,)), "context parallelism"),
    ):
        (remark,) = answer_of(problem, space=only).remarks
        assert remark.endswith("no layout with known prices fits")
        with pytest.raises(InputError, match=f"mine knows; most .* by an unknown price: {price}"):
            answer_of(problem, space=only, prefer="surest")


def test_zero_within_a_server_is_sure_and_a_tie_is_said() -> None:
    """Two pipeline ranks, one in each server, so that ZeRO exchanges inside of them alone."""
    problem = problem_of()
    inside = Space(pipeline=(2,), tensor=(1,), zero=(3,), chunks=1, placements=("data-inside",))
    answer = answer_of(problem, space=replace(inside, context=(1,)), prefer="surest")
    assert answer.rows[0].layout.startswith("p2 t1 d8 b1 zero3")
    assert "zero of 3" in answer.plan_class
    assert "whose prices mine knows" in answer.plan_class
    tied = Space(pipeline=(1,), tensor=(1,), context=(1,), microbatch=(1,), zero=(2, 1))
    given = {one.name: getattr(problem, one.name) for one in fields(problem)}
    free = SwitchedProblem(**given, free=frozenset({"data exchange"}))
    both = answer_of(free, space=tied, top=1)
    (remark,) = both.remarks
    assert both.surest is not None
    assert both.surest.seconds == both.rows[0].seconds
    assert (both.rows[0].layout[-5:], both.surest.layout[-5:]) == ("zero2", "zero1")
    assert f"as fast with known prices is {both.surest.layout} (--prefer surest)" in remark


def test_context_parallelism_costs_something() -> None:
    problem = problem_of(rates="megatron-h100-26.06")
    seconds = [
        evaluate(problem, parse_layout(f"p1 t1 c{c} d{16 // c} b{c} zero1")).seconds
        for c in (1, 2, 4, 8)
    ]
    assert seconds == sorted(seconds)
    assert seconds[-1] > 1.001 * seconds[0]
