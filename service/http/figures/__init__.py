"""What the page shows of an answer that is no plan: numbers, tables, timelines and charts."""

from stagewright.service.http.figures import clusters, models
from stagewright.service.http.figures.tables import Figures, Told
from stagewright.service.requests import Request


def figures(kind: str, request: Request, answer: Told) -> Figures:
    """The figures of an answer, which is the whole one's JSON object."""
    name = kind.replace("-", "_")
    shown: Figures = getattr(clusters if hasattr(clusters, name) else models, name)(request, answer)
    return shown
