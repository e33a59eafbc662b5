"""The peak of memory of the fullest rank, by way of the store."""

import pytest
import torch.distributed as dist

from stagewright.executor.training.ranks import endings
from stagewright.executor.training.ranks.endings import READ_SECONDS, Peaks


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(endings.time, "monotonic", lambda: now[0])
    return now


def test_the_fullest_rank_is_known_to_the_others(clock: list[float]) -> None:
    store = dist.HashStore()
    first, last = (Peaks(store, rank, 3) for rank in (0, 2))
    assert last.most(10) == 10  # nobody has told anything
    first.tell(1000)
    assert last.most(20) == 20  # read again only after a while
    clock[0] += READ_SECONDS
    assert last.most(20) == 1000
    assert last.most(2000) == 2000
    assert first.most(1000) == 1000  # the last rank has told nothing


def test_a_peak_is_told_again_when_it_has_grown(clock: list[float]) -> None:
    store = dist.HashStore()
    one = Peaks(store, 0, 2)
    for peak, told in ((1000, b"1000"), (1005, b"1000"), (1100, b"1100"), (900, b"1100")):
        one.tell(peak)
        assert store.get("0") == told
