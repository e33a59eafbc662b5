"""What a layout takes, and why it is not the best one."""

from stagewright.formulations.forms.answers import StopToken
from stagewright.formulations.parallelism.document import differences, shortages, why_slower
from stagewright.formulations.parallelism.estimate import Estimate, evaluate
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.ranges import causes, ranges
from stagewright.formulations.parallelism.switches import price_effects
from stagewright.formulations.parallelism.training import TrainingProblem, require_layout
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.traits import remarks_on
from stagewright.service.layouts.goodput import Ranking
from stagewright.service.layouts.requests import (
    ExplainAnswer,
    LayoutMemoryAnswer,
    LayoutRequest,
    LayoutRow,
    MemoryRequest,
    PartAnswer,
    PriceAnswer,
    RankMemoryAnswer,
)
from stagewright.solvers.parallelism.tree import compiled_walk


def layout_row(
    problem: TrainingProblem,
    one: Estimate,
    best: Estimate,
    alike: tuple[str, ...] = (),
    ranking: Ranking | None = None,
) -> LayoutRow:
    """The row of a layout: its time and the parts of it, its memory, and its goodput if asked."""
    of = None if ranking is None else ranking.goodput(one)
    fullest = max(range(len(one.memory)), key=lambda rank: one.memory[rank].total)
    return LayoutRow.of(
        ranges(problem, one),
        one,
        layout=str(one.layout),
        flops_per_device=one.model_flops_per_second / one.layout.ranks,
        memory=_memory_answer(one, fullest),
        loses_by="" if one is best else why_slower(one, best),
        tokens_per_second=problem.batch * problem.sequence / one.seconds,
        alike=alike,
        goodput=None if of is None else of.goodput,
        effective_seconds=None if of is None else of.effective_seconds(one.seconds),
    )


def _memory_answer(one: Estimate, rank: int) -> RankMemoryAnswer:
    """The peak memory, by kind, of the ranks at one position in the pipeline."""
    kinds = [name for name in RankMemoryAnswer.model_fields if name != "rank"]
    held = {name: getattr(one.memory[rank], name.removesuffix("_bytes")) for name in kinds}
    return RankMemoryAnswer(rank=rank, **held)


def explain(
    request: LayoutRequest, layout: Layout, best: Estimate | None, ranking: Ranking | None = None
) -> ExplainAnswer:
    """Why a layout is not the best one: first the rules, those of the framework too."""
    problem, rates = request.problem, str(request.problem.rates)
    try:
        require_layout(problem, layout)
        for _, wrong in request.wrong(layout):
            raise InputError(f"{request.framework} cannot express it: {wrong}")
        one = evaluate(problem, layout, compiled_walk())
    except InputError as error:
        return ExplainAnswer(layout=str(layout), rates=rates, refused=str(error))
    parts = differences(one, one if best is None else best)
    return ExplainAnswer.of(
        ranges(problem, one),
        layout=str(layout),
        rates=rates,
        causes=causes(problem, layout),
        row=layout_row(problem, one, one if best is None else best, ranking=ranking),
        shortages=shortages(one),
        differs=() if best is None else tuple(layout.differences(best.layout)),
        parts=tuple(
            PartAnswer.of(part, best_seconds=None if best is None else part.other_seconds)
            for part in parts
        ),
        prices=tuple(map(PriceAnswer.of, price_effects(problem, one, compiled_walk()))),
    )


def layout_memory(request: MemoryRequest, stop: StopToken | None = None) -> LayoutMemoryAnswer:
    """The memory of a layout, whether or not it fits.

    Raises
    ------
    InputError
        If the layout breaks a rule of the model, the batch or the devices.
    """
    problem = request.problem
    found = evaluate(problem, request.layout, compiled_walk())
    return LayoutMemoryAnswer.of(
        ranges(problem, found),
        layout=str(request.layout),
        memory_bytes=problem.fabric.memory_bytes,
        rates=str(problem.rates),
        ranks=tuple(_memory_answer(found, rank) for rank in range(len(found.memory))),
        shortages=shortages(found),
        remarks=remarks_on(problem.architecture, problem.sequence),
    )
