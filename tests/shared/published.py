"""Orders of the published schedules, drawn at random with times, and orders written as text."""

from hypothesis import assume
from hypothesis import strategies as st

from stagewright.formulations.plans.actions import parse_action
from stagewright.formulations.schedules.order import Order
from stagewright.formulations.schedules.published.kinds import KINDS, Sizes, schedule_of
from stagewright.formulations.schedules.timing import StageTimes
from stagewright.graphs.documents.errors import InputError


@st.composite
def generated(draw):
    """An order of any kind, and the name of its kind."""
    name = draw(st.sampled_from([*KINDS]))
    chunks = draw(st.integers(1, 4))
    sizes = draw(st.integers(1, 6)), draw(st.integers(1, 16))
    try:
        return name, schedule_of(name, Sizes(*sizes, KINDS[name].chunks.step * chunks))
    except InputError:
        assume(False)


def whole(draw, count):
    return tuple(float(draw(st.integers(0, 4))) for _ in range(count))


@st.composite
def timed(draw):
    name, order = draw(generated())
    stages = len(order.paths[0])
    sends = whole(draw, stages - 1), whole(draw, stages - 1)
    return name, order, StageTimes(*(whole(draw, stages) for _ in range(3)), *sends)


def order_of(rows, path_of=()):
    return Order(tuple(tuple(map(parse_action, row.split())) for row in rows), path_of)
