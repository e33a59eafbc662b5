"""Which layouts are refused, with the rule and what would work; fabrics of clusters; the front."""

from dataclasses import replace

import pytest

import stagewright
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layout import Layout, parse_layout
from stagewright.formulations.parallelism.training import (
    TrainingProblem,
)
from stagewright.formulations.prices.computing import Precision
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Link, from_matrix, uniform_servers
from stagewright.graphs.machines.fabric import Fabric, Level, fabric_of
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.topology import dgx1, uniform_racks
from stagewright.graphs.models.architecture import (
    Architecture,
    Experts,
    FeedForward,
    GroupedAttention,
)
from stagewright.solvers.parallelism.family import simply_placed
from stagewright.solvers.parallelism.refining import search
from stagewright.solvers.parallelism.space import Space

MODEL = Architecture("m", 8, 64, 1000, GroupedAttention(12, 6, 16), FeedForward(96))


def problem(devices: int = 16, batch: int = 24, model: Architecture = MODEL) -> TrainingProblem:
    fabric = fabric_of_kind("a100", devices)
    return stagewright.training_problem(model, fabric, sequence=96, batch=batch)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("p2 t2 d2 b1", "p x t x c x d = 2 x 2 x 1 x 2 is 8 ranks; there are 16 devices"),
        ("t8 d2 b1", "tensor degree 8 does not divide 12 heads; the nearest are 6 and 12"),
        ("t4 d4 b1", "tensor degree 4 and 6 key-value heads: one must divide the other"),
        ("c16 b1 t1 d1", None),
        ("p16 b1", "8 blocks cannot be divided evenly over 16 stages (pipeline x chunks); the "
         "nearest numbers of stages are 8, or give first and last blocks"),
        ("d16 b1", "a batch of 24 is no multiple of data x microbatch = 16 x 1; the nearest are "
         "16 or 32"),
        ("p4 d4 v2 b1", "2 chunks per rank need a multiple of 4 microbatches (the pipeline), there "
         "are 6"),
        ("p2 d8 b1 selective", "selective recomputation repeats the attention"),
        ("p2 t2 d4 e2 b1", "expert degree 2: the model has no experts; it must be 1"),
        ("p4 d4 b1 first4 last3", "8 blocks cannot be divided over 4 stages with 4 blocks in the "
         "first and 3 in the last"),
    ],
)  # fmt: skip
def test_rules(layout: str, message: str | None) -> None:
    if message is None:
        evaluate(problem(), parse_layout(layout))
        return
    with pytest.raises(InputError) as refused:
        evaluate(problem(), parse_layout(layout))
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        ("b0", "microbatch must be at least 1, got 0"),
        ("zero4", "zero must be 0, 1, 2 or 3, got 4"),
        ("v2", "2 chunks need a pipeline of at least 2 ranks"),
        ("sp", "sequence parallelism needs a tensor degree of at least 2"),
        ("e3 d4", "expert degree 3 does not divide the 4 ranks"),
        ("zero-bubble", "the schedule zero-bubble needs a pipeline of at least 2 ranks"),
        ("p2 zbv", "the schedule zbv has 2 chunks on every rank \\(v2\\), got 1"),
        ("p2 v2 zb-h2", "the schedule zb-h2 has 1 chunk on every rank, got 2"),
        ("p6 v2 dualpipe", "the schedule dualpipe has 1 chunk on every rank, got 2"),
        ("p5 dualpipe", "the schedule dualpipe needs an even pipeline of at least 4 ranks, got 5"),
        (
            "blocks2",
            "recompute_blocks must be at least 1 and needs recompute full, got 2 with none",
        ),
        ("p2 d2 e2 pipeline-inside", "expert degree 2 with the placement pipeline-inside"),
        ("first1", "first_blocks needs a pipeline"),
        ("p2 v2 stages1-2x2", "blocks_by_stage needs 4 numbers .* each at least 0, got 1-2x2"),
        ("p3 stages1-0-2", "blocks_by_stage needs at least 1 block between the first and the"),
        ("p2 first1 stages1-2", "blocks_by_stage has the ends too; leave out first and last"),
        ("p2 again1x2", "recomputed_by_stage needs recompute selective or full, without"),
        ("p2 full blocks1 again1x2", "recomputed_by_stage needs recompute selective or full"),
        ("p2 full stages1-", "layout word 'stages1-' is not known; known are .*stagesN-NxTIMES"),
        ("p2 full again1x2000000", "the stages of again1x2000000 must be at most"),
    ],
)
def test_layouts_that_contradict_themselves(layout: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        parse_layout(layout)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("p2 d8 stages1-2", "blocks_by_stage 1-2 are 3 blocks; the model has {}"),
        ("p2 d8 full again9-0", "recomputed_by_stage: stage 0 recomputes 9 blocks and has {half}"),
    ],
)
def test_stages_that_the_model_does_not_have(words: str, message: str) -> None:
    expected = message.format(MODEL.layers, half=MODEL.layers // 2)
    with pytest.raises(InputError, match=f"^{expected}"):
        evaluate(problem(), parse_layout(words))


def test_words_of_stages() -> None:
    words = "p4 t1 d1 b1 stages9-10x2-11 again3-1-0x2 full"
    layout = parse_layout(words)
    assert layout.blocks_by_stage == (9, 10, 10, 11)
    assert layout.recomputed_by_stage == (3, 1, 0, 0)
    assert str(layout) == words
    assert layout.blocks_of_stages(40) == (9, 10, 10, 11)
    selective = parse_layout("p2 stages1-3 again1x2 selective")
    assert selective.recomputed_of_stages(4) == (1, 1)


def test_experts_with_tensor_ranks_need_sequence_parallelism() -> None:
    model = replace(MODEL, experts=Experts(4, 2, 96))
    with pytest.raises(InputError, match="experts with tensor parallelism need sequence"):
        evaluate(problem(model=model), Layout(tensor=2, data=8))
    evaluate(problem(model=model), Layout(tensor=2, data=8, sequence_parallel=True))


@pytest.mark.parametrize("devices", [8, 16])
def test_placements_are_one_where_all_links_are_alike(devices: int) -> None:
    of, layout = problem(devices), parse_layout(f"p4 d{devices // 4} b1 pipeline-inside")
    other = replace(layout, placement="data-inside")
    are_alike = evaluate(of, other).seconds == evaluate(of, layout).seconds
    assert (simply_placed(of, layout) == other) == are_alike == (devices == 8)


def test_a_fabric_of_a_cluster() -> None:
    assert fabric_of(uniform_servers(2, 4, Link(9e9, 1e-6), Link(3e9), kind="a100")) == Fabric(
        "a100", 16e9, (Level("server", 4, 9e9, 1e-6), Level("rack", 8, 3e9))
    )
    mixed = uniform_servers(1, 2, Link(9e9))
    racks = fabric_of(uniform_racks(2, 2, 4, (Link(9e9), Link(3e9), Link(1e9))))
    assert [level.devices for level in racks.levels] == [4, 8, 16]
    with pytest.raises(InputError, match="matrix of unequal links"):
        fabric_of(dgx1())
    pair = [[None, 9e9], [9e9, None]]
    one = from_matrix(mixed.devices, pair, 1e-6)
    assert fabric_of(one) == fabric_of(uniform_servers(1, 2, Link(9e9, 1e-6)))
    two = from_matrix(mixed.devices, pair, servers=[["s0g0"], ["s0g1"]])
    assert [level.devices for level in fabric_of(two).levels] == [1, 2]
    other = replace(mixed.devices[1], memory_bytes=1e9)
    with pytest.raises(InputError, match="differs from"):
        fabric_of(replace(mixed, devices=(mixed.devices[0], other)))


def test_the_best_of_one_device() -> None:
    found = stagewright.train_plan(problem(1, 4), top=2)
    assert found.plan is not None
    assert found.plan.layout.ranks == 1
    assert found.status.value == "optimal"


def test_spaces_in_which_nothing_is_possible() -> None:
    with pytest.raises(
        InputError, match="no degrees of the space are possible: 16 devices are no multiple"
    ):
        search(problem(), Space(tensor=(5,)))
    with pytest.raises(InputError, match="recompute selective alone"):
        search(problem(), Space(recompute=("selective",)))
    with pytest.raises(InputError, match="keep must be at least 1"):
        search(problem(), keep=0)
    with pytest.raises(InputError, match="zero needs at least one value"):
        Space(zero=())


def test_precisions() -> None:
    with pytest.raises(InputError, match="optimizer_bytes must be from 0 to 16, got 17"):
        Precision(optimizer_bytes=17)
    fabric = fabric_of_kind("a100", 8)
    with pytest.raises(
        InputError, match="precision must be fp32, tf32, fp16, bf16 or fp8, got 'int8'"
    ):
        stagewright.training_problem(MODEL, fabric, sequence=8, batch=8, precision="int8")
