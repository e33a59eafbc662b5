"""Diffusion transformers: tokens are patches of latents, and vectors of a sample steer the blocks.

Every block embeds the time step and the class of a sample, and a linear layer makes six vectors of
them, which scale and shift the outputs of the norms and scale what attention and feed-forward add
(adaLN-Zero: Peebles and Xie, DiT, 2023, section 3.2). The head has two such vectors.
"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from pydantic import ConfigDict

from stagewright.graphs.documents import documents
from stagewright.graphs.models.feed_forwards import Operators
from stagewright.graphs.models.operations import dense, elementwise, embedding
from stagewright.graphs.models.sizes import require_sizes

if TYPE_CHECKING:
    from stagewright.graphs.models.architecture import Architecture


@dataclass(frozen=True, slots=True)
class Diffusion:
    """Inputs of a diffusion transformer: elements of a patch, and of a time step; classes."""

    __pydantic_config__: ClassVar[ConfigDict] = documents.STRICT

    patch: int
    classes: int
    step_size: int = 256

    def __post_init__(self) -> None:
        require_sizes(self)

    def embedded(self, of: "Architecture", rows: int) -> Operators:
        """The operators that make tokens of patches."""
        return {
            "patches": dense(rows, self.patch, of.hidden),
            "positions sum": elementwise(rows * of.hidden, operands=2),
        }

    def steered(self, of: "Architecture", samples: int, sequence: int) -> Operators:
        """The operators of a block that are not in other transformers' blocks."""
        width = samples * sequence * of.hidden
        made = elementwise(width, operands=2, saved=width)
        return {
            **self._sample_embedded(of, samples),
            "vectors": dense(samples, of.hidden, 6 * of.hidden),
            **{f"steered sum {number}": made for number in range(1, 5)},
        }

    def _sample_embedded(self, of: "Architecture", samples: int) -> Operators:
        vectors = samples * of.hidden
        return {
            "step in": dense(samples, self.step_size, of.hidden),
            "step activation": elementwise(vectors, saved=vectors),
            "step out": dense(samples, of.hidden, of.hidden),
            "class": embedding(samples, self.classes, of.hidden),
            "vectors activation": elementwise(vectors, operands=2, saved=vectors),
        }

    def ended(self, of: "Architecture", samples: int, sequence: int) -> Operators:
        """The operators of a head before its last product; it embeds as the first block does."""
        width = samples * sequence * of.hidden
        again = self._sample_embedded(of, samples)
        return {
            **{name: replace(one, parameters=0) for name, one in again.items()},
            "vectors": dense(samples, of.hidden, 2 * of.hidden),
            "steered sum": elementwise(width, operands=2, saved=width),
        }
