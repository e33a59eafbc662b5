"""Values of a model that change no cost: exports carry them to the framework that trains it."""

import math
from dataclasses import fields
from typing import Literal

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError


@documents.record
class RotaryScaling:
    """How rotary positions reach longer sequences than those of pre-training.

    The fields are those of transformers' ``rope_parameters``; None is the default of the ``kind``.
    """

    kind: str
    factor: float
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    def __post_init__(self) -> None:
        for field in fields(self)[1:]:
            value = getattr(self, field.name)
            if value is not None and not 0 <= value < math.inf:
                raise InputError(f"{field.name} must be finite and from 0, got {value}")


@documents.record
class Routing:
    """How a router scores experts and chooses among them.

    ``normalized``: the scores of the chosen experts sum to 1, before they are multiplied by
    ``scale``. Of ``groups`` of experts only ``chosen_groups`` are considered for a token. A
    ``choice_bias`` per expert evens the load without a loss; ``loss`` is the factor of a loss.
    """

    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalized: bool = True
    groups: int | None = None
    chosen_groups: int | None = None
    scale: float = 1.0
    choice_bias: bool = False
    loss: float | None = None

    @property
    def is_grouped(self) -> bool:
        """Whether experts are chosen from some of several groups alone."""
        return self.groups is not None and self.groups > 1


@documents.record
class Stated:
    """What a configuration states beside the sizes; None: not known, or not there.

    ``rotary_part`` of every head is rotated. Scores of attention and logits are capped at
    ``score_cap`` and ``logit_cap``.
    """

    rotary_part: float | None = None
    rotary_scaling: RotaryScaling | None = None
    routing: Routing | None = None
    score_cap: float | None = None
    logit_cap: float | None = None


NOTHING = Stated()
"""Of a model of which only sizes are known."""
