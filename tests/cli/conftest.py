"""Documents for commands."""

from dataclasses import replace
from pathlib import Path

import pytest
from plans import make_stages, small_problem, valid_plan

from stagewright.formulations.checking.check import predict
from stagewright.formulations.plans.plan import save_plan
from stagewright.graphs.machines.cluster import save_cluster
from stagewright.graphs.models.chain import save_model


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with model.json, cluster.json and a valid plan.json of three stages."""
    problem = small_problem()
    save_model(problem.chain, tmp_path / "model.json")
    save_cluster(problem.cluster, tmp_path / "cluster.json")
    plan = valid_plan(problem, make_stages((2, 4, 6), (2, 1, 3), ("split",) * 3))
    save_plan(replace(plan, predicted=predict(problem, plan)), tmp_path / "plan.json")
    return tmp_path
