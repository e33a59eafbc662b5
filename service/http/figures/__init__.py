"""What the page shows of an answer that is no plan: numbers, tables, timelines and charts."""

from stagewright.service.http.figures import clusters, layouts, models
from stagewright.service.http.figures.tables import Figures, Told
from stagewright.service.requests import Request

_FIGURES = {
    one.__name__.replace("_", "-"): one
    for one in (
        models.place, models.partition, models.schedule, models.compare_schedules,
        models.schedule_curve, models.jobshop, models.divide, models.what_if, models.sweep,
        layouts.train_plan, layouts.train_plan_profiles, layouts.memory, layouts.calibrate,
        layouts.tune, layouts.tune_read,
        clusters.allocate, clusters.rounds, clusters.simulate_cluster, clusters.cloud,
    )
}  # fmt: skip


def figures(kind: str, request: Request, answer: Told) -> Figures:
    """The figures of an answer, which is the whole one's JSON object."""
    return _FIGURES[kind](request, answer)
