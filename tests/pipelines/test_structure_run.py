"""List schedules of structures: devices in the same state are simulated once."""

from dataclasses import replace

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st
from profiles import examples
from strategies import hard_problem

from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.structure import Structure, misfit, work_of
from stagewright.solvers.pipelines.structures.run import ListRun, WorkLists
from stagewright.solvers.pipelines.structures.scheduling import (
    Priority,
    flight_limits,
    latencies,
    urgency_keys,
)


@st.composite
def structures(draw):
    """A problem and stages on any devices, shared or not, that fit in memory."""
    problem = draw(hard_problem(4, 6, 4))
    layers = len(problem.chain)
    cuts = sorted(draw(st.sets(st.integers(1, layers - 1)))) if layers > 1 else []
    stages = []
    for start, stop in zip([0, *cuts], [*cuts, layers], strict=True):
        turns = draw(st.booleans())
        most = len(problem.cluster) if turns else problem.most_replicas(start, stop)
        names = draw(st.permutations([device.name for device in problem.cluster.devices]))
        devices = tuple(names[: draw(st.integers(1, min(most, len(names))))])
        kind = "round-robin" if turns and len(devices) > 1 else "split"
        stages.append(Stage((start, stop), devices, kind))
    structure = Structure.whole(tuple(stages))
    work = work_of(problem, structure)[0]
    assume(misfit(problem, structure, work) is None)
    return work


@examples(200)
@given(structures(), st.sampled_from((Priority(1.0), Priority(2.0), Priority())))
def test_one_device_stands_for_those_in_the_same_state(work, rule):
    merged = WorkLists.of(work)
    every = replace(
        merged,
        members=work.members,
        places=work.places,
        room=work.room.tolist(),
        spare=(work.room - work.alone).tolist(),
        alike=[*range(len(work.room))],
    )
    keys, limits = urgency_keys(work, rule).tolist(), flight_limits(work, rule, latencies(work))
    ours, plain = (ListRun(lists, keys, limits) for lists in (merged, every))
    assert len(ours.idle) <= len(plain.idle)
    np.testing.assert_array_equal(ours.finish(np.inf), plain.finish(np.inf))
    assert [ours.peak[k] for k in merged.alike] == plain.peak
