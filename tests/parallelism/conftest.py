"""Published runs, where their data are."""

import pytest

from benchmarks.layout_runs import MEASURED, Measured, korthikanti


@pytest.fixture(scope="session")
def measured() -> list[Measured]:
    if not MEASURED.exists():
        pytest.skip(f"needs the data set {MEASURED.name}")
    return korthikanti()
