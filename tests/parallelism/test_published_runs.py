"""Published runs that are compared in benchmarks; needs no data of others."""

import pytest
from model_sizes import active_parameters, total_parameters

from benchmarks.layout_experts import (
    AS_PRINTED,
    BATCH,
    GPUS,
    LAYOUTS,
    PARTS,
    SECONDS,
    SEQUENCE,
    TOKENS_PER_DAY,
    predicted,
    problem,
)
from benchmarks.layout_simumax import case_named, seconds
from benchmarks.layout_simumax_search import has_short_end, with_short_end
from benchmarks.models import QWEN_30B, QWEN_235B, V3
from stagewright.formulations.parallelism.layout import Layout, parse_layout
from stagewright.formulations.parallelism.ranges import ranges
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.rates import rates_of


def test_printed_parameters_in_billions() -> None:
    """DeepSeek-V3: 671 and 37; Qwen3: 30.5 and 3.3, 235 and 22."""
    for of, printed in ((V3, (671, 37)), (QWEN_30B, (30.5, 3.3)), (QWEN_235B, (235, 22))):
        found = (total_parameters(of) / 1e9, active_parameters(of) / 1e9)
        assert found == pytest.approx(printed, rel=0.02)


def test_the_printed_step_agrees_with_itself() -> None:
    """Its parts, the tokens of a day, and 180K GPU hours for 10^12 tokens."""
    assert sum(PARTS.values()) == pytest.approx(SECONDS, rel=0.005)
    tokens = BATCH * SEQUENCE
    daily, each = 86400 * tokens / SECONDS, 180e3 * 3600 / 1e12 * tokens / GPUS
    assert daily == pytest.approx(TOKENS_PER_DAY, rel=0.001)
    assert each == pytest.approx(SECONDS, rel=0.005)


def test_what_dualpipe_hides() -> None:
    """The step as printed is a fifth too fast: 20 of 132 multiprocessors send, which is not priced.

    The exchanges with experts that pairs hide are most of what 1F1B waits for, and the rank fits.
    """
    found, plain = predicted(AS_PRINTED), predicted(LAYOUTS[0])
    assert found.fits
    assert ranges(problem(), found).seconds_high > SECONDS
    assert found.exchange_seconds < plain.exchange_seconds / 2
    computed = found.compute_seconds + found.repeated_seconds
    assert found.seconds < SECONDS < 1.15 * (found.seconds + computed * (132 / 112 - 1))


def test_the_measured_step_is_in_the_range() -> None:
    """Of H800, which are of the H100's family; the best of the printed layouts in a line."""
    least = min(predicted(layout).seconds for layout in LAYOUTS if not layout.form.in_v)
    spread = rates_of("h800").experts
    assert least * spread.low < SECONDS < least * spread.high


def test_nvlink_of_the_h800_as_it_is_reached() -> None:
    inside, outside = fabric_of_kind("h800", 16).levels
    assert inside.bytes_per_second == pytest.approx(160e9, rel=0.03)
    assert outside.bytes_per_second == pytest.approx(40e9, rel=0.06)


def test_a_case_of_simumax_by_its_name() -> None:
    one = case_named("deepseekv3_l4_tp1_ep4_pp2_dp4_mbc8_cef")
    assert (one.model, one.layers, one.microbatches, one.sequence) == ("deepseekv3", 4, 8, 4096)
    assert one.layout == parse_layout("p2 t1 d4 e4 b1 zero1")
    assert one.problem().batch == 32
    long = case_named("llama3_70b_l12_tp2_cp4_pp1_dp1_seq32768_mbc4_cef")
    assert str(long.layout) == "p1 t2 c4 d1 b1 zero1 sp"
    assert long.sequence == 32768
    assert [seconds("1.5 s"), seconds("828.7645 ms")] == [1.5, 0.8287645]


def test_stages_of_its_search_are_equal_but_for_the_last() -> None:
    short = with_short_end(Layout(pipeline=4), 61)
    assert short.blocks_of_stages(61) == (16, 16, 16, 13)
    assert with_short_end(Layout(pipeline=4), 64) == Layout(pipeline=4)
    assert has_short_end(short, 61)
    assert has_short_end(parse_layout("p4 first16 last13"), 61)
    assert not has_short_end(parse_layout("p4 first13 last16"), 61)
    assert not has_short_end(parse_layout("p4 first15 last16"), 61)
