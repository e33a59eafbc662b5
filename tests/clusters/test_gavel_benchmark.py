"""The benchmark of thesis section 5.7 runs, and its small cases give what they should."""

import pytest

from benchmarks import gavel, gavel_runs

needs_gavel = pytest.mark.skipif(not gavel_runs.DATA.is_dir(), reason=gavel_runs.MISSING)


def test_simulations_are_kept_between_runs(tmp_path, monkeypatch):
    case = gavel_runs.Case("max-min", jobs_per_hour=4.0, jobs=(0, 3))
    done = gavel_runs.Outcome((1.0, 2.0, 4.5), (1.0, 5.0, 5.0), (0.5,) * 3, 4.5, None, 0, 1.0, 1.0)
    gavel_runs.write_outcomes(tmp_path / "kept.json", {case: done})
    monkeypatch.setenv(gavel_runs.RESULTS, str(tmp_path / "kept.json"))
    assert gavel_runs.study([case, case]) == {case: done}
    assert (done.mean_hours, done.mean_hours_of(5.0)) == (2.5, 3.25)


@needs_gavel
def test_public_traces_take_as_long_as_in_the_public_code():
    for one in gavel.REFERENCES[:2]:
        outcome = gavel_runs.simulate(one.case)
        assert one.ours({one.case: outcome}) == pytest.approx(one.hours, rel=0.03)


@needs_gavel
@pytest.mark.parametrize("discipline", ["fairness", "fifo"])
def test_entities_share_by_weight(discipline):
    found = gavel.growth(discipline)
    parts = gavel.shares(found.ours)[-1].reshape(3, 6)
    assert parts.sum(axis=1) == pytest.approx([1 / 6, 1 / 3, 1 / 2], abs=1e-3)
    assert (parts[0, -1] < 1e-6) == (discipline == "fifo")
