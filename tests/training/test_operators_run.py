"""Placed operators on real processes: the results are those of the plain loop."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from fastt import MODELS
from profiles import slow_after
from ranks import Ranks
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from stagewright.executor.capture.steps.step import capture_step
from stagewright.executor.programs.trace import Trace
from stagewright.executor.training.losses import cross_entropy
from stagewright.executor.training.operators.executor import OperatorExecutor
from stagewright.formulations.operators.plan import OperatorPlan, digest_of
from stagewright.formulations.operators.splitting import choices_of, split_graph
from stagewright.graphs.machines.cluster import Cluster, Link, uniform_servers
from stagewright.graphs.models.operators.step_graph import StepGraph, data_parallel
from stagewright.solvers.operators.planning import plan_operators

STEPS = 3
SEED = 5
ADAM = partial(torch.optim.AdamW, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.01, momentum=0.9)

Result = tuple[list[float | None], dict[str, Tensor] | None, Trace | None]


def doubled(batch: Any) -> Any:
    return tree_map_only(
        Tensor, lambda one: one.double() if one.is_floating_point() else one, batch
    )


def make(name: str, dropout: bool = False) -> nn.Module:
    """Without dropout, which draws by the operator's own seed."""
    model = MODELS[name][0]().double()
    for one in model.modules():
        if isinstance(one, nn.Dropout) and not dropout:
            one.p = 0.0
        if isinstance(one, nn.RNNBase) and not dropout:
            one.dropout = 0.0
    return model


def data(name: str) -> list[Any]:
    """Mini-batches that differ."""
    inputs, targets = doubled(MODELS[name][1])
    return [
        (tree_map_only(Tensor, partial(torch.roll, shifts=step, dims=-1), inputs), targets)
        for step in range(STEPS)
    ]


def graph_of(
    name: str, samples: int | None = None, dropout: bool = False, optimizer: Any = ADAM
) -> StepGraph:
    """Times that are as good as random: by the name of the node."""
    batch = tree_map_only(Tensor, lambda one: one[:samples], data(name)[0])
    step = capture_step(make(name, dropout), batch, optimizer=optimizer, name=name)
    nodes = (
        replace(node, seconds={"v100": 1e-5 * (1 + sum(node.name.encode()) % 7)})
        if node.role in ("forward", "backward", "update")
        else node
        for node in step.graph.nodes
    )
    return replace(step.graph, nodes=tuple(nodes))


def plain(name: str, optimizer: Any = ADAM) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(SEED)
    model = make(name)
    updater = optimizer(model.parameters())
    losses = []
    for inputs, targets in data(name):
        updater.zero_grad()
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        total, count = cross_entropy(model(*given), targets)
        (total / count).backward()
        losses.append((total / count).item())
        updater.step()
    return losses, {path: one.detach() for path, one in model.state_dict().items()}


def run(
    group: Any,
    rank: int,
    name: str,
    plan: OperatorPlan,
    dropout: bool = False,
    optimizer: Any = ADAM,
) -> Result:
    batches = data(name)
    executor = OperatorExecutor(
        plan,
        partial(make, name, dropout),
        batches[0],
        cross_entropy,
        optimizer,
        seed=SEED,
        device="cpu",
        trace=True,
    )
    losses = [executor.step(*batch) for batch in batches]
    return losses, executor.parameters_on_first_rank(), executor.trace_on_first_rank()


def cluster(ranks: int) -> Cluster:
    return uniform_servers(1, ranks, Link(1e9, 1e-6), kind="v100")


def losses_of(results: list[Result]) -> list[float]:
    """The losses of the ranks that know them, which agree."""
    told = [losses for losses, *_ in results if losses[0] is not None]
    assert all(losses == told[0] for losses in told)
    return told[0]  # type: ignore[return-value]


def parameters_of(results: list[Result]) -> dict[str, Tensor]:
    assert all(one[1] is None for one in results[1:])
    assert results[0][1] is not None
    return results[0][1]


@pytest.mark.parametrize(
    ("name", "world"), slow_after(2, [("lenet", 2), ("transformer", 2), ("lenet", 3), ("rnnlm", 2)])
)
def test_ranks_compute_the_plain_loop_to_the_bit(name: str, world: int, ranks: Ranks) -> None:
    plan = plan_operators(graph_of(name), cluster(world), "dpos").plan
    assert plan is not None
    assert plan.transfers
    results = ranks.run(run, world, name, plan)
    losses, parameters = plain(name)
    assert losses_of(results) == losses
    found = parameters_of(results)
    assert found.keys() == parameters.keys()
    for path, one in parameters.items():
        assert torch.equal(found[path], one), path


def close(found: dict[str, Tensor], expected: dict[str, Tensor], within: float = 1e-9) -> bool:
    assert found.keys() == expected.keys()
    return all(
        torch.allclose(found[path], expected[path], within, within / 100) for path in expected
    )


def test_divided_operators_compute_the_same(ranks: Ranks) -> None:
    plan = plan_operators(graph_of("lenet"), cluster(2), "os-dpos").plan
    assert plan is not None
    assert plan.splits
    results = ranks.run(run, 2, "lenet", plan)
    losses, parameters = plain("lenet")
    assert losses_of(results) == pytest.approx(losses, rel=1e-9)
    assert close(parameters_of(results), parameters)


@pytest.mark.parametrize(
    ("name", "dimension"), slow_after(1, [(name, at) for at in (0, -1) for name in MODELS])
)
def test_every_operator_divided(name: str, dimension: int, ranks: Ranks) -> None:
    """By SGD: AdamW makes steps of rounding, where a gradient is zero but for that.

    Parameters that differ in their last bit change Inception's third loss by 2e-9.
    """
    within = 1e-6 if name == "inception" else 1e-9
    graph = graph_of(name, optimizer=SGD)
    choices = [choices_of(graph, node, 2) for node in graph.nodes]
    splits = tuple(one[dimension] for one in choices if one)
    assert len(splits) > 10
    plan = plan_operators(split_graph(graph, splits), cluster(2), "m-topo").plan
    assert plan is not None
    digest = digest_of(graph, cluster(2), "none")
    plan = replace(plan, splits=splits, digest=digest, structure=graph.structure())
    results = ranks.run(run, 2, name, plan, False, SGD, timeout_seconds=600.0)
    losses, parameters = plain(name, SGD)
    assert losses_of(results) == pytest.approx(losses, rel=within)
    assert close(parameters_of(results), parameters, within)


@pytest.mark.parametrize("weights", slow_after(1, ["mirrored", "shared", "accumulated"]))
def test_replicas_take_the_step_of_the_whole_mini_batch(weights: Any, ranks: Ranks) -> None:
    graph = data_parallel(graph_of("transformer", samples=2), 2, weights)
    plan = plan_operators(graph, cluster(2), "dpos").plan
    assert plan is not None
    results = ranks.run(run, 2, "transformer", plan)
    losses, parameters = plain("transformer")
    assert losses_of(results) == pytest.approx(losses, rel=1e-9)
    assert close(parameters_of(results), parameters)


@pytest.mark.parametrize(
    ("name", "world"), slow_after(1, [("lenet", 2), ("inception", 3), ("bert", 2)])
)
def test_pipelines_of_microbatches_take_the_step_of_the_mini_batch(
    name: str, world: int, ranks: Ranks
) -> None:
    graph = data_parallel(graph_of(name, samples=2), 2, "accumulated")
    plan = plan_operators(graph, cluster(world), "dag").plan
    assert plan is not None
    assert len({one.device for one in plan.operators}) == world
    results = ranks.run(run, world, name, plan)
    losses, parameters = in_parts(name) if name == "inception" else plain(name)
    assert losses_of(results) == pytest.approx(losses, rel=1e-9)
    assert close(parameters_of(results), parameters)


def in_parts(name: str) -> tuple[list[float], dict[str, Tensor]]:
    """The plain loop with two microbatches of two samples, for layers that mix samples."""
    torch.manual_seed(SEED)
    model = make(name)
    optimizer = ADAM(model.parameters())
    losses = []
    for inputs, targets in data(name):
        optimizer.zero_grad()
        kept: dict[str, Tensor] = {}
        buffers, parts = kept_of(model), []
        for rows in (slice(0, 2), slice(2, 4)):
            model.load_state_dict(buffers, strict=False)  # each part begins from the step's
            total, count = cross_entropy(model(inputs[rows]), targets[rows])
            (total / count / 2).backward()
            parts.append((total / count).item())
            kept = kept if rows.start else kept_of(model)
        model.load_state_dict(kept, strict=False)  # buffers take the values of the first
        losses.append(sum(parts) / 2)
        optimizer.step()
    return losses, {path: one.detach() for path, one in model.state_dict().items()}


def kept_of(model: nn.Module) -> dict[str, Tensor]:
    return {path: one.clone() for path, one in model.named_buffers()}


def test_draws_do_not_depend_on_the_placement(ranks: Ranks) -> None:
    graph = graph_of("lenet", dropout=True)
    found = []
    for world, planner in ((1, "single"), (2, "dpos"), (2, "m-topo")):
        plan = plan_operators(graph, cluster(world), planner).plan
        assert plan is not None
        results = ranks.run(run, len({one.device for one in plan.operators}), "lenet", plan, True)
        found.append((losses_of(results), parameters_of(results)))
    for losses, parameters in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(parameters[path], one) for path, one in found[0][1].items())
    assert found[0][0] != plain("lenet")[0]


def test_the_trace_has_every_operator_and_transfer_once(ranks: Ranks) -> None:
    plan = plan_operators(graph_of("lenet"), cluster(2), "dpos").plan
    assert plan is not None
    (_, _, trace), *_ = ranks.run(run, 2, "lenet", plan)
    assert trace is not None
    assert trace.digest == plan.digest
    number = {one.operator: n for n, one in enumerate(plan.operators)}
    expected = [(one.device, f"{n}RUN") for n, one in enumerate(plan.operators)]
    for one in plan.transfers:
        n = number[one.operator]
        expected.append((plan.operators[n].device, f"{n}SEND_O{one.output}"))
    for step in trace.steps:
        assert sorted((one.device, one.action) for one in step.actions) == sorted(expected)
        assert step.iteration_seconds == max(one.finish_seconds for one in step.actions)
