"""``train``: train a model by plans of operators that are made from its own measurements."""

import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from stagewright.cli.commands import command
from stagewright.cli.console import print_answer, say
from stagewright.cli.factories import parse_optimizer
from stagewright.cli.options import Modelled, Printed, Seeded
from stagewright.cli.outputs import Writes
from stagewright.cli.training.profiling import reporting
from stagewright.cli.training.running import require_timeout
from stagewright.formulations.forms.answers import Limits
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import counted, format_seconds, parse_share
from stagewright.service.answers import RoundAnswer, TrainedRoundsAnswer
from stagewright.service.options import Option

if TYPE_CHECKING:
    from stagewright.formulations.operators.plan import OperatorPlan
    from stagewright.graphs.models.operators.step_graph import StepGraph
    from stagewright.service.operators.rounds import TrainingRound, TrainingRounds

PLAN, COSTS, GRAPH, CLUSTER, CHECKPOINTS = (
    "plan.json", "costs.json", "graph.json", "cluster.json", "steps",
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
    plans: Annotated[int, Field(ge=1)] = 5
    """Plans that are tried at most."""
    plan_steps: Annotated[int, Field(ge=1)] = 10
    """Steps by each of them."""
    tolerance: Annotated[str, Option(form="SHARE")] = "10%"
    """Costs are stable when a run differs by less."""
    replicas: Annotated[int, Option(form="N"), Field(ge=1)] = 1
    """Copies of the model, as of capture."""
    weights: Literal["shared", "mirrored"] = "shared"
    """As of capture."""
    planner: str = "fastt"
    """Planner of operators."""
    contention: str = "none"
    """Whether transfers wait for each other: none, exclusive."""
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
    is given up. When costs are stable the best one trains to the end. DIR has it as plan.json, with
    the graph and the cluster of the learned costs; `run DIR/plan.json --checkpoint DIR/steps
    --resume` goes on.
    """
    from stagewright.executor.training.ranks.launch import require_torch
    from stagewright.graphs.machines.cluster import load_cluster
    from stagewright.service.operators.rounds import TrainingRounds

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
    with reporting("train") as report:
        report("tracing a step")
        graph = _captured(given)
    planned = TrainingRounds(
        graph,
        machines,
        given.planner,
        given.contention,  # type: ignore[arg-type]
        Limits(given.time_limit, seed=given.seed),
        parse_share(given.tolerance, "--tolerance"),
        min(given.plans, (steps - 1) // plan_steps),
    )
    first = planned.start()
    if first is None:
        say(
            f"{graph.name} does not fit on {machines.name}, neither with a device per replica nor "
            "with devices filled in turn"
        )
        return 1
    passed = ("module", "data", "optimizer", "seed", "timeout", "loss")
    values = {name: getattr(given, name) for name in passed}
    options = [(f"--{name}", str(value)) for name, value in values.items() if value is not None]
    runs = _Runs(folder, [word for option in options for word in option], plan_steps)
    try:
        done = list(_shown(runs.rounds(planned, first), given.as_json))
        answer = runs.run(folder / PLAN, steps, _saving(given.save_parameters))
    except subprocess.CalledProcessError as error:
        return error.returncode
    _print_summary(done, answer, folder, given.save_parameters, given.as_json)
    return 0


def _captured(given: TrainOptions) -> "StepGraph":
    """The graph of a training step, without times."""
    from stagewright.cli.factories import load_factory
    from stagewright.executor.capture.steps.factories import share_of, without_values
    from stagewright.executor.capture.steps.step import capture_step
    from stagewright.executor.measuring.profiling import first_batch
    from stagewright.executor.training.losses import cross_entropy
    from stagewright.graphs.models.operators.data_parallel import data_parallel

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

    def rounds(self, planned: "TrainingRounds", first: "OperatorPlan") -> "Iterator[TrainingRound]":
        """The rounds; the folder has the best plan and the costs after each."""
        from stagewright.executor.programs.trace import Trace, load_trace
        from stagewright.formulations.operators.plan import save_operator_plan
        from stagewright.graphs.machines.cluster import save_cluster
        from stagewright.graphs.models.operators.cost_book import save_costs
        from stagewright.graphs.models.operators.step_graph import save_graph

        self.folder.mkdir(parents=True)
        numbers = iter(range(planned.most))

        def measure(plan: "OperatorPlan") -> Trace:
            number = next(numbers)
            file, trace = (self.folder / f"{name}-{number}.json" for name in ("plan", "trace"))
            save_operator_plan(plan, file)
            self.run(file, self.steps + self.plan_steps, ["--trace", str(trace)])
            return load_trace(trace)

        for one in planned.run(first, measure):
            save_costs(one.book, self.folder / COSTS)
            graph, cluster = one.book.priced(planned.graph, planned.cluster)
            save_graph(graph, self.folder / GRAPH)
            save_cluster(cluster, self.folder / CLUSTER)
            if one.is_kept:
                save_operator_plan(one.plan, self.folder / PLAN)
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


def _shown(rounds: "Iterator[TrainingRound]", as_json: bool) -> "Iterator[TrainingRound]":
    """The rounds, each with a line on stdout when it ends."""
    for one in rounds:
        if not as_json:
            predicted = format_seconds(one.predicted_seconds) if one.number else "nothing known"
            kept = "kept" if one.is_kept else "given up"
            say(
                f"round {one.number}: {one.plan.planner}, predicted {predicted}, measured "
                f"{format_seconds(one.measured_seconds)}: {kept}"
            )
        yield one


def _print_summary(
    rounds: "list[TrainingRound]",
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
                        predicted_seconds=one.predicted_seconds,
                        measured_seconds=one.measured_seconds,
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
        f"{folder} has plans, traces, costs and checkpoints",
        *([] if parameters is None else [f"{parameters} is written"]),
    )
