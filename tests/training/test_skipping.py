"""A resumed run sees the mini-batches that it would have seen, without fetching the others."""

import random
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

import numpy as np  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

from stagewright.executor.training.data.batches import mini_batches  # noqa: E402
from stagewright.graphs.documents.errors import InputError  # noqa: E402

SAMPLES, BATCH = 10, 3  # three mini-batches and a smaller one


class Numbers(Dataset[Any]):
    """Samples that are counted; ``draw`` is added to each."""

    def __init__(self, draw: Callable[[], float] = lambda: 0.0) -> None:
        self.draw, self.fetched = draw, 0

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> Any:
        self.fetched += 1
        return torch.tensor(i + self.draw())


def loaded(dataset: Numbers, **options: Any) -> Callable[[], Iterable[Any]]:
    return lambda: DataLoader(dataset, BATCH, shuffle=True, **options)


def taken(data: Callable[[], Iterable[Any]], count: int, skipped: int = 0) -> list[list[float]]:
    return [one.tolist() for one in islice(mini_batches(data, 5, skipped), count)]


@pytest.mark.parametrize("skipped", [1, 3, 4, 6, 9])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_indices_are_skipped_and_not_samples(skipped: int, workers: int) -> None:
    dataset = Numbers()
    whole = taken(loaded(Numbers()), 12)
    found = taken(loaded(dataset, num_workers=workers), 12 - skipped, skipped)
    assert found == whole[skipped:]
    if not workers:
        passes = -(-skipped // 4)  # a sample of each is tried for random numbers
        assert dataset.fetched == sum(map(len, found)) + passes


@pytest.mark.parametrize("draw", [lambda: torch.rand(()).item(), random.random, np.random.random])
def test_samples_that_draw_are_fetched_again(draw: Callable[[], float]) -> None:
    def seeded(*args: Any) -> list[list[float]]:
        random.seed(1)
        np.random.seed(1)  # noqa: NPY002 - what datasets draw from
        return taken(loaded(Numbers(draw)), *args)

    assert seeded(5, 6) == seeded(11)[6:]


def test_a_sampler_with_a_generator_is_asked_as_often() -> None:
    def seeded(*args: Any) -> list[list[float]]:
        generator = torch.Generator().manual_seed(3)
        return taken(loaded(Numbers(), generator=generator), *args)

    assert seeded(5, 6) == seeded(11)[6:]


class Skipping:
    """An iterable that skips by itself."""

    def __init__(self) -> None:
        self.first = 0

    def skip(self, count: int) -> int:
        self.first = min(count, 4)
        return self.first

    def __iter__(self) -> Iterator[Any]:
        return iter([torch.tensor([float(i)]) for i in range(self.first, 4)])


@pytest.mark.parametrize("skipped", [0, 2, 4, 7, 8])
def test_an_iterable_may_skip_by_itself(skipped: int) -> None:
    assert taken(Skipping, 3, skipped) == [[float(i % 4)] for i in range(skipped, skipped + 3)]


@pytest.mark.parametrize("skipped", [0, 3])
def test_data_without_a_mini_batch_are_refused(skipped: int) -> None:
    with pytest.raises(InputError, match="the data hold no mini-batch"):
        taken(list, 1, skipped)
