"""Layouts as Calculon's executions, and back in words; needs no checkout of it."""

import pytest

from benchmarks.layout_calculon import executions, words
from stagewright.formulations.parallelism.layout import parse_layout

LAYOUTS = ("p8 t4 d2 b1 v3 zero1 selective sp", "p2 t8 d4 b2 v1 full", "p1 t2 d1 b4 v1")


@pytest.mark.parametrize("text", LAYOUTS)
def test_an_execution_is_its_layout_in_words(text: str) -> None:
    every = list(executions(parse_layout(text), 64))
    assert {words(one) for one in every} == {text}
    chosen = {
        (one["tensor_par_net"], one["pipeline_par_net"], one["data_par_net"]) for one in every
    }
    layout = parse_layout(text)
    dimensions = sum(k > 1 for k in (layout.tensor, layout.pipeline, layout.data))
    assert len(chosen) == len(every) == 2**dimensions


def test_a_tensor_rank_sends_its_part_where_there_is_something_to_send() -> None:
    kinds = [next(executions(parse_layout(one), 64))["tensor_par_comm_type"] for one in LAYOUTS]
    assert kinds == ["rs_ag", "p2p_rs_ag", "ar"]


def test_what_no_layout_has_is_told() -> None:
    plain = next(executions(parse_layout(LAYOUTS[0]), 64))
    changed = plain | {"tensor_par_overlap": "ring", "weight_offload": True}
    assert words(changed) == f"{LAYOUTS[0]}, tensor overlap ring, offloaded: weights"
