"""A model that computes otherwise with one sample is refused it, with what to do."""

import pytest
from exported import Batch, captured, words
from torch import Tensor, nn

from stagewright.graphs.documents.errors import InputError


class SeveralOnly(nn.Module):
    """Asks whether it has one sample, as masks of attention do."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.table(ids)
        if ids.shape[0] != 1:
            hidden = hidden * 2
        return nn.functional.cross_entropy(self.head(hidden).transpose(1, 2), labels)


def test_one_sample_is_refused_with_the_remedy() -> None:
    layered = captured(SeveralOnly(), words(0))
    layered.require_sizes(shapes(words(1, samples=3)))
    with pytest.raises(InputError, match=r"!= 1 does not hold; give every replica at least two"):
        layered.require_sizes(shapes(words(1, samples=1)))


def shapes(batch: Batch) -> list[tuple[int, ...]]:
    return [tuple(one.shape) for one in batch.values()]
