"""The answer about what more memory, devices or faster links would buy."""

from stagewright.service.answers import Answer, Finite
from stagewright.service.pipeline_answers import PlanAnswer


class WhatIfRow(Answer):
    """The plan with one change.

    ``saved_seconds`` is how much less time it takes than the best plan as things are, which is
    looked for from this plan too: it is what the change saves, not the search. With the change no
    plan of the class ``plans`` saves more than ``most_seconds``, as ``bound_seconds`` is below all
    of them. None where a plan or a bound is missing.
    """

    change: str
    status: str
    cost_seconds: Finite = None
    bound_seconds: Finite = None
    saved_seconds: Finite = None
    most_seconds: Finite = None
    plans: str | None = None
    reason: str = ""


class WhatIfAnswer(Answer):
    """The plan as things are, and a row for every change."""

    status: str
    base: PlanAnswer
    rows: tuple[WhatIfRow, ...]
