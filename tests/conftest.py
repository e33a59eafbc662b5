"""What all tests may ask for."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest
from ranks import Ranks


@pytest.fixture(scope="session")
def ranks() -> Iterator[Ranks]:
    """Four gloo processes; see :class:`ranks.Ranks`."""
    if find_spec("torch") is None:
        pytest.skip("torch is not installed; pip install 'stagewright[executor]'")
    with Ranks() as pool:
        yield pool
