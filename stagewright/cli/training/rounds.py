"""``train``: train a model by plans that are made from its own measurements."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stagewright.cli.commands import ask, command
from stagewright.cli.console import print_answer, say
from stagewright.cli.factories import parse_optimizer
from stagewright.cli.options import Modelled, Printed, Seeded
from stagewright.cli.outputs import Writes
from stagewright.cli.training.profiling import reporting
from stagewright.cli.training.running import require_timeout
from stagewright.formulations.forms.answers import Limits
from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import counted, format_seconds, parse_share
from stagewright.service.answers import RoundAnswer, TrainedRoundsAnswer
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.graphs.machines.cluster import Cluster
    from stagewright.graphs.models.operators.step_graph import StepGraph
    from stagewright.service.rounds import TrainingRound, TrainingRounds

PLAN, COSTS, GRAPH, PROFILE, CLUSTER, CHECKPOINTS = (
    "plan.json", "costs.json", "graph.json", "model.json", "cluster.json", "steps",
)  # fmt: skip


class TrainOptions(Modelled, Seeded, Printed):
    """What ``train`` is asked."""

    data: Annotated[str, Option(form="PACKAGE:FACTORY")]
    """Function that returns an iterable of mini-batches (inputs, targets), the same on every rank;
    called for every epoch."""
    cluster: Annotated[Path, Option(form="FILE")]
    """Cluster file."""
    steps: Annotated[int, Field(ge=2)]
    """Mini-batches to train on."""
    folder: Annotated[Path, Option(form="DIR"), Writes(several=True)]
    """New folder for plans, traces, costs and checkpoints."""
    model: Annotated[Path | None, Option(form="FILE")] = None
    """The module's profile: plan pipelines of its layers, not single operators."""
    microbatches: Annotated[int, Option(form="M"), Field(ge=1)] = 8
    """Of pipelines: microbatches in an iteration."""
    plans: Annotated[int, Field(ge=1)] = 5
    """Plans that are tried at most."""
    plan_steps: Annotated[int, Field(ge=1)] = 10
    """Steps by each of them."""
    tolerance: Annotated[str, Option(form="SHARE")] = "10%"
    """Costs are stable when a run differs by less; a pipeline that promises less is not tried."""
    replicas: Annotated[int, Option(form="N"), Field(ge=1)] = 1
    """Of operators: copies of the model, as of capture."""
    weights: Literal["shared", "mirrored"] = "shared"
    """As of capture."""
    planner: str | None = None
    """Planner; default: fastt of operators, auto of pipelines."""
    contention: str = "none"
    """Of operators: whether transfers wait for each other: none, exclusive."""
    time_limit: float = 10.0
    """Time limit of the search in seconds."""
    optimizer: str = "sgd:lr=0.01"
    """One of torch.optim, e.g. adamw:lr=1e-3,weight_decay=0.1."""
    save_parameters: Annotated[
        Path | None, Option(form="FILE"), Writes(".pt", ".pth", ".bin", ".ckpt")
    ] = None
    """Write the trained state dict."""
    timeout: float = 60.0
    """Seconds that a rank waits for another one."""


@command(
    headings={
        "Rounds": "plans plan_steps tolerance",
        "Planning": "replicas weights planner contention time_limit",
        "How it runs": "timeout seed",
    }
)
def train(given: TrainOptions) -> int:
    """Train on this machine, each round by the plan for the costs that those before it measured.

    Every plan continues from the checkpoint of the one before. A plan that is slower than the best
    is given up. When costs are stable, or the plan stays, the best one trains to the end. DIR has
    it as plan.json, with the model and the cluster of the learned costs; `run DIR/plan.json
    --checkpoint DIR/steps --resume` goes on.
    """
    from stagewright.executor.training.ranks.launch import require_torch
    from stagewright.graphs.machines.cluster import load_cluster

    require_torch()
    require_timeout(given.timeout)
    steps, plan_steps, folder = given.steps, given.plan_steps, given.folder
    if steps <= plan_steps:
        raise InputError(f"--steps {steps} leaves nothing after a plan of {plan_steps} steps")
    if folder.exists():
        raise InputError(
            f"{folder} exists; name a new folder, or go on with stagewright run "
            f"{folder / PLAN} --checkpoint {folder / CHECKPOINTS} --resume"
        )
    machines = load_cluster(given.cluster)
    if given.model is None:
        planned, save = _of_operators(given, machines), _save_operator_costs
    else:
        planned, save = _of_pipelines(given, given.model, machines), _save_pipeline_costs
    first = planned.start()
    if first is None:
        say(f"no first plan of {given.model or given.module} fits on {machines.name}")
        return 1
    passed = ("module", "data", "optimizer", "seed", "timeout", "loss")
    values = {name: getattr(given, name) for name in passed}
    options = [(f"--{name}", str(value)) for name, value in values.items() if value is not None]
    runs = _Runs(folder, [word for option in options for word in option], plan_steps)
    try:
        done = list(_shown(runs.rounds(planned, first, save), given.as_json))
        answer = runs.run(folder / PLAN, steps, _saving(given.save_parameters))
    except subprocess.CalledProcessError as error:
        return error.returncode
    _print_summary(done, answer, folder, given.save_parameters, given.as_json)
    return 0


def _of_operators(given: TrainOptions, machines: "Cluster") -> "TrainingRounds[Any, Any]":
    from stagewright.service.operators.rounds import OperatorRounds

    with reporting("train") as report:
        report("tracing a step")
        graph = _captured(given)
    return OperatorRounds(
        graph,
        machines,
        given.planner or "fastt",
        given.contention,  # type: ignore[arg-type]
        Limits(given.time_limit, seed=given.seed),
        *_when_it_ends(given),
    )


def _of_pipelines(
    given: TrainOptions, model: Path, machines: "Cluster"
) -> "TrainingRounds[Any, Any]":
    from stagewright.graphs.models.chain import load_model
    from stagewright.service.pipelines.requests import PlanRequest
    from stagewright.service.pipelines.rounds import PipelineRounds

    for name in ("replicas", "weights", "contention"):
        if getattr(given, name) != type(given).model_fields[name].default:
            raise InputError(f"--{name} is of plans of operators; leave it or --model out")
    request = ask(
        PlanRequest,
        chain=load_model(model),
        cluster=machines,
        microbatches=given.microbatches,
        planner=given.planner or "auto",
        time_limit=given.time_limit,
        seed=given.seed,
    )
    return PipelineRounds(request, *_when_it_ends(given))


def _when_it_ends(given: TrainOptions) -> tuple[float, int]:
    """The tolerance, and the most plans that leave steps for the best of them."""
    most = min(given.plans, (given.steps - 1) // given.plan_steps)
    return parse_share(given.tolerance, "--tolerance"), most


def _captured(given: TrainOptions) -> "StepGraph":
    """The graph of a training step, without times."""
    from stagewright.cli.factories import load_factory
    from stagewright.executor.capture.steps.step import capture_step, share_of, without_values
    from stagewright.executor.measuring.profiling import first_batch
    from stagewright.executor.training.losses import cross_entropy
    from stagewright.graphs.models.operators.step_graph import data_parallel

    of_outputs = cross_entropy if given.loss is None else load_factory(given.loss, "--loss")
    batch = share_of(first_batch(load_factory(given.data, "--data")()), given.replicas, 0)
    made, tensors = without_values(load_factory(given.module, "--module"), batch)
    stepping, name = parse_optimizer(given.optimizer), given.module.rpartition(":")[2]
    step = capture_step(made, tensors, loss=of_outputs, optimizer=stepping, name=name)
    return data_parallel(step.graph, given.replicas, given.weights)


def _saving(parameters: Path | None) -> list[str]:
    return [] if parameters is None else ["--save-parameters", str(parameters)]


@dataclass(slots=True)
class _Runs:
    """Runs of plans one after the other, each from the checkpoint of the last."""

    folder: Path
    given: list[str]
    plan_steps: int
    steps: int = 0
    losses: list[float] = field(default_factory=list)

    def rounds(
        self,
        planned: "TrainingRounds[Any, Any]",
        first: Any,
        save: Callable[[Any, Any, Path], None],
    ) -> "Iterator[TrainingRound[Any, Any]]":
        """The rounds; the folder has the best plan and, by ``save``, the costs after each."""
        from stagewright.executor.programs.trace import Trace, load_trace

        self.folder.mkdir(parents=True)
        numbers = iter(range(planned.most))

        def measure(plan: Any) -> Trace:
            number = next(numbers)
            file, trace = (self.folder / f"{name}-{number}.json" for name in ("plan", "trace"))
            _save_plan(plan, file)
            self.run(file, self.steps + self.plan_steps, ["--trace", str(trace)])
            return load_trace(trace)

        for one in planned.run(first, measure):
            save(planned, one.costs, self.folder)
            if one.is_kept:
                _save_plan(one.plan, self.folder / PLAN)
            yield one

    def run(self, plan: Path, steps: int, options: list[str]) -> dict[str, Any]:
        """Train up to ``steps`` by a plan; raises CalledProcessError if the run fails."""
        from stagewright.executor.training.ranks.launch import end_with_parent

        checkpoints = ["--checkpoint", str(self.folder / CHECKPOINTS)]
        resume = ["--resume"] if self.steps else []
        command = [sys.executable, "-m", "stagewright", "run", str(plan), *self.given]
        command += ["--steps", str(steps), *checkpoints, *resume, *options, "--json"]
        ended = subprocess.run(
            command, stdout=subprocess.PIPE, text=True, check=True, preexec_fn=end_with_parent
        )
        answer: dict[str, Any] = json.loads(ended.stdout)
        self.steps = steps
        self.losses += answer["losses"]
        return answer | {"losses": self.losses}


def _save_plan(plan: Any, file: Path) -> None:
    from stagewright.formulations.operators.plan import OperatorPlan, save_operator_plan
    from stagewright.formulations.plans.plan import save_plan

    save_operator_plan(plan, file) if isinstance(plan, OperatorPlan) else save_plan(plan, file)


def _save_operator_costs(planned: Any, costs: Any, folder: Path) -> None:
    """The book, and the graph and the cluster by it."""
    from stagewright.graphs.machines.cluster import save_cluster
    from stagewright.graphs.models.operators.cost_book import CostBook
    from stagewright.graphs.models.operators.step_graph import save_graph

    documents.write(CostBook, costs, folder / COSTS)
    graph, cluster = costs.priced(planned.graph, planned.cluster)
    save_graph(graph, folder / GRAPH)
    save_cluster(cluster, folder / CLUSTER)


def _save_pipeline_costs(planned: Any, costs: Any, folder: Path) -> None:
    """The profile and the cluster, corrected."""
    from stagewright.graphs.machines.cluster import save_cluster
    from stagewright.graphs.models.chain import save_model

    save_model(costs.chain, folder / PROFILE)
    save_cluster(costs.cluster, folder / CLUSTER)


def _shown(
    rounds: "Iterator[TrainingRound[Any, Any]]", as_json: bool
) -> "Iterator[TrainingRound[Any, Any]]":
    """The rounds, each with a line on stdout when it ends."""
    for one in rounds:
        if not as_json:
            known = format_seconds(one.seconds.predicted)
            predicted = known if one.seconds.predicted else "nothing known"
            kept = "kept" if one.is_kept else "given up"
            say(
                f"round {one.number}: {one.plan.planner}, predicted {predicted}, measured "
                f"{format_seconds(one.seconds.measured)}: {kept}"
            )
        yield one


def _print_summary(
    rounds: "list[TrainingRound[Any, Any]]",
    answer: dict[str, Any],
    folder: Path,
    parameters: Path | None,
    as_json: bool,
) -> None:
    best = [one for one in rounds if one.is_kept][-1]
    if as_json:
        print_answer(
            TrainedRoundsAnswer(
                rounds=tuple(
                    RoundAnswer(
                        planner=one.plan.planner,
                        predicted_seconds=one.seconds.predicted,
                        measured_seconds=one.seconds.measured,
                        kept=one.is_kept,
                    )
                    for one in rounds
                ),
                best=best.number,
                steps=answer["steps"],
                loss=answer["loss"],
                losses=tuple(answer["losses"]),
                iteration_seconds=answer["iteration_seconds"],
                world_size=answer["world_size"],
                folder=str(folder),
            )
        )
        return
    say(
        f"{answer['steps']} steps on {counted(answer['world_size'], 'rank', 'ranks')}, loss "
        f"{answer['loss']:.6g}, {format_seconds(answer['iteration_seconds'])} per step by the plan "
        f"of round {best.number}",
        f"{folder} has plans, traces, costs and checkpoints; why a step took so long: "
        f"stagewright compare {folder}/plan-{best.number}.json {folder}/trace-{best.number}.json",
        *([] if parameters is None else [f"{parameters} is written"]),
    )
