"""Programs of placed operators: carried out with names in place of tensors, and broken ones."""

from collections import defaultdict, deque
from contextlib import suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import examples
from random_steps import graphs

from stagewright.executor.programs.operators.placed import lower_operators, place_graph
from stagewright.executor.programs.operators.verify import verify_operators
from stagewright.executor.programs.program import Instruction, InvalidProgram, Program
from stagewright.formulations.operators.splitting import split_graph
from stagewright.formulations.plans.actions import Action, ActionKind
from stagewright.graphs.documents.errors import InvalidPlan
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.operators.step_graph import Node, Output, StepGraph
from stagewright.solvers.operators.planning import plan_operators

RUN, FREE = ActionKind.RUN, ActionKind.FREE
SEND, RECEIVE = ActionKind.SEND_OUTPUT, ActionKind.RECEIVE_OUTPUT
PLANNERS = ("dpos", "os-dpos", "heft", "m-etf", "single")


def placed_and_program(graph, planner, devices):
    machines = uniform_servers(1, devices, Link(1e9, 1e-5), kind="a")
    plan = plan_operators(graph, machines, planner).plan
    placed = place_graph(plan, graph)
    return placed, lower_operators(placed)


class Machine:
    """Ranks that wait as those of a program do, in any order of their steps.

    A message moves when both sides have posted it and all before it between the two ranks.
    """

    def __init__(self, placed, program):
        self.placed, self.rows = placed, [deque(row) for row in program.rows]
        self.values = [{} for _ in program.rows]
        self.posted = defaultdict(deque)  # by sender and receiver
        self.wanted = defaultdict(deque)
        self.order = []

    def to_the_end(self, random):
        while any(self.rows):
            ranks = [rank for rank, row in enumerate(self.rows) if row]
            random.shuffle(ranks)
            assert any(self.advance(rank) for rank in ranks), "deadlock"

    def advance(self, rank):
        one = self.rows[rank][0]
        n, kind, output = one.action.stage, one.action.kind, one.action.microbatch
        values = self.values[rank]
        if kind is RUN:
            node = self.placed.nodes[n]
            remote = [o for o in self.placed.after[n] if self.placed.rank[o] != rank]
            if any((self.placed.end(o)) not in values for o in remote):
                return False
            read = [values.get(value) for value in self.placed.inputs[n]]
            if None in read:
                return False
            self.order.append(n)
            for number in range(len(node.outputs) + 1):
                values[n, number] = (node.name, number, tuple(read))
        elif kind is SEND:
            self.posted[rank, one.peer].append((n, output))
        elif kind is RECEIVE:
            self.wanted[one.peer, rank].append((n, output))
        elif self.in_flight(rank, (n, output)):
            return False
        else:
            del values[n, output]
        self.rows[rank].popleft()
        self.move()
        return True

    def in_flight(self, rank, value):
        """Whether a value is being sent by ``rank``, or is not yet received by it."""
        sent = any(value in queue for (a, _), queue in self.posted.items() if a == rank)
        return sent or value not in self.values[rank]

    def move(self):
        for (a, b), queue in self.posted.items():
            while queue and self.wanted[a, b]:
                value = queue.popleft()
                assert value == self.wanted[a, b].popleft()
                self.values[b][value] = self.values[a][value]


def sequential(graph):
    """The values of all operators, in the order of the document."""
    values = {}
    for node in graph.nodes:
        read = tuple(values[one] for one in node.inputs)
        for number in range(len(node.outputs) + 1):
            values[node.name, number] = (node.name, number, read)
    return values


@given(graphs(10), st.sampled_from(PLANNERS), st.integers(1, 4), st.randoms(use_true_random=False))
@examples(1500, quick=50)
def test_programs_that_are_verified_compute_the_graph_and_broken_ones_are_refused(
    graph, planner, devices, random
):
    placed, program = placed_and_program(graph, planner, devices)
    verify_operators(placed, program)
    require_values(graph, placed, ended(graph, placed, program, random))
    for rows in broken(program, random):
        changed = tuple(rows.get(r, each) for r, each in enumerate(program.rows))
        with pytest.raises(InvalidProgram):
            verify_operators(placed, Program(program.devices, changed))
    other = shuffled(program, random)
    with suppress(InvalidProgram):  # refused, or as good as the lowered one
        verify_operators(placed, other)
        ended(graph, placed, other, random)


def ended(graph, placed, program, random):
    """The machine at the end of the program: all operators ran, in an order that is allowed."""
    machine = Machine(placed, program)
    machine.to_the_end(random)
    split = split_graph(graph, placed.plan.splits)
    at = {placed.nodes[n].name: i for i, n in enumerate(machine.order)}
    assert sorted(machine.order) == [*range(len(split))]
    for node in split.nodes:
        assert all(at[name] < at[node.name] for name in node.after)
    return machine


def require_values(graph, placed, machine):
    """What is left are states, and ends of operators that nobody was sent."""
    expected = sequential(split_graph(graph, placed.plan.splits))
    for rank, values in enumerate(machine.values):
        for (n, number), found in values.items():
            node = placed.nodes[n]
            assert found == expected[node.name, number]
            assert placed.rank[n] == rank
            assert node.role == "state" or number == len(node.outputs)
    assert not any(machine.posted.values())
    assert not any(machine.wanted.values())


def broken(program, random):
    """Changed rows: an instruction left out, doubled, on another rank, or with another peer."""
    rank = random.randrange(len(program.rows))
    row = program.rows[rank]
    at = random.randrange(len(row))
    other = random.randrange(len(program.rows))
    one, without = row[at], (*row[:at], *row[at + 1 :])
    yield {rank: without}
    yield {rank: (*row[: at + 1], *row[at:])}
    if other != rank:
        yield {rank: without, other: (*program.rows[other], one)}
        if one.peer not in (None, other):
            yield {rank: (*row[:at], replace(one, peer=other), *row[at + 1 :])}


def shuffled(program, random):
    """Up to three instructions of the program moved within their rows."""
    rows = [list(row) for row in program.rows]
    for _ in range(random.randint(1, 3)):
        row = random.choice(rows)
        i, j = random.randrange(len(row)), random.randrange(len(row))
        row.insert(i, row.pop(j))
    return Program(program.devices, tuple(map(tuple, rows)))


def test_a_plan_without_a_transfer_is_refused():
    nodes = (
        Node("a", "mm", "forward", (), (Output(1e6),), {"a": 1e-3}),
        Node("b", "mm", "forward", (("a", 0),), (), {"a": 1e-3}),
    )
    graph = StepGraph("two", "test", 1, nodes)
    placed, _ = placed_and_program(graph, "single", 2)
    first, last = placed.plan.operators
    plan = replace(placed.plan, operators=(first, replace(last, device="s0g1")))
    with pytest.raises(InvalidPlan, match="output 0 of 'a' is not sent to 's0g1'"):
        lower_operators(place_graph(plan, graph))


def test_ranks_that_wait_for_each_other_are_shown():
    """Each of three ranks waits for the next one before it sends."""
    made = [Node(f"made{r}", "mm", "forward", (), (Output(1e6),), {"a": 1e-3}) for r in range(3)]
    read = [
        Node(f"read{r}", "mm", "forward", ((f"made{(r + 1) % 3}", 0),), (), {"a": 1e-3})
        for r in range(3)
    ]
    graph = StepGraph("ring", "test", 1, (*made, *read))
    placed, _ = placed_and_program(graph, "single", 3)
    plan = placed.plan
    homes = {f"{name}{r}": f"s0g{r}" for r in range(3) for name in ("made", "read")}
    moved = (replace(one, device=homes[one.operator]) for one in plan.operators)
    placed = place_graph(replace(plan, operators=tuple(moved)), graph)
    rank = [placed.rank[placed.number[f"made{r}"]] for r in range(3)]
    rows = {}
    for r in range(3):
        own, other = placed.number[f"made{r}"], placed.number[f"made{(r + 1) % 3}"]
        before, after = rank[(r - 1) % 3], rank[(r + 1) % 3]
        rows[rank[r]] = (
            Instruction(Action(other, RECEIVE, 0), after),
            Instruction(Action(placed.number[f"read{r}"], RUN)),
            Instruction(Action(other, FREE, 0)),
            Instruction(Action(own, RUN)),
            Instruction(Action(own, SEND, 0), before),
            Instruction(Action(own, FREE, 0)),
        )
    with pytest.raises(InvalidProgram, match=r"deadlock: rank \d at .*RUN waits for .*SEND_O0"):
        verify_operators(placed, Program(placed.devices, tuple(rows[r] for r in range(3))))
