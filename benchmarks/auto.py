"""The portfolio against its certified bound: every example profile on every example cluster."""

from collections.abc import Iterator
from pathlib import Path

from benchmarks.report import Table, percent
from stagewright.formulations.forms.answers import Limits
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster, load_cluster
from stagewright.graphs.models.chain import Chain, load_model
from stagewright.solvers.planning import plan

EXAMPLES = Path(__file__).parents[1] / "examples"
MICROBATCHES = 8


def pairs() -> Iterator[tuple[Chain, Cluster]]:
    """Profiles and clusters of one kind of device."""
    clusters = [load_cluster(path) for path in sorted(EXAMPLES.glob("clusters/*.json"))]
    for path in sorted(EXAMPLES.glob("profiles/*.json")):
        chain = load_model(path)
        kinds = {cost.device_kind for cost in chain.layers[0].costs}
        for cluster in clusters:
            if {device.kind for device in cluster.devices} <= kinds:
                yield chain, cluster


def tables(quick: bool) -> list[Table]:
    """Seconds, bounds and gaps of ``auto``, and which planner had the plan."""
    rows: list[tuple[object, ...]] = []
    for chain, cluster in list(pairs())[: 2 if quick else None]:
        try:
            problem = PipelineProblem(chain, cluster, MICROBATCHES)
        except InputError as error:
            rows.append((chain.name, cluster.name, *[None] * 5, str(error), None))
            continue
        result = plan(problem, "auto", Limits(1.0 if quick else 10.0))
        costs = [attempt for attempt in result.attempts if attempt.cost_seconds is not None]
        certificate = result.plan.certificate if result.plan else None
        winner = min(costs, key=lambda attempt: attempt.cost_seconds or 0.0, default=None)
        rows.append(
            (
                chain.name,
                cluster.name,
                result.cost,
                result.bound,
                percent(result.gap),
                certificate.every_bound_seconds if certificate else None,
                percent(certificate.every_gap if certificate else None),
                winner.planner if winner else result.reason,
                f"{result.seconds:.1f}",
            )
        )
    columns = (
        "profile", "cluster", "auto s", "bound s", "gap in its class", "bound on every plan s",
        "gap to every plan", "found by", "wall s",
    )  # fmt: skip
    title = f"auto on the examples, {MICROBATCHES} microbatches, limit 10 s"
    return [Table("auto", title, columns, tuple(rows))]
