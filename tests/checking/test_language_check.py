"""The product's checker and the plain checker of the tests say the same of random plans."""

import copy
import json
import random
from math import inf

import pytest
from language_check import evaluate, peak_bytes
from language_instances import random_instance, random_stages
from language_oracle import document
from language_prices import Instance
from language_schedule import best_schedule, build_tasks
from profiles import slow_after

import stagewright


class Case:
    """A random plan of an instance with ample memory."""

    def __init__(self, seed, folder):
        self.folder, self.draw = folder, random.Random(seed)
        model, cluster, microbatches = self.documents = random_instance(seed)
        for device in cluster["devices"]:
            device["memory_bytes"] = 1e12
        self.chain = stagewright.load_model(self.write("model", model))
        self.cluster = stagewright.load_cluster(self.write("cluster", cluster))
        instance = Instance(model, cluster, microbatches)
        stages = random_stages(seed, instance)
        tasks = build_tasks(instance, stages, split_backward=self.draw.random() < 0.5)
        _, schedule = best_schedule(instance, stages, tasks, inf)
        self.plan = document(instance, stages, schedule)
        self.plan["digest"] = self.digest()

    def write(self, name, data):
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(data))
        return path

    def digest(self, limit=None):
        """The digest of the problem, from any plan for it; None where no planner finds one."""
        other = stagewright.plan(
            self.chain,
            self.cluster,
            microbatches=self.documents[2],
            planner="spp",
            memory_limit_bytes=limit,
        )
        return other.plan and other.plan.digest

    def verdicts(self, plan, limit=None):
        """What both checkers find: lists of broken rules."""
        data = plan
        if limit is not None:
            data = {**plan, "memory_limit_bytes": limit, "digest": self.digest(limit)}
        read = stagewright.load_plan(self.write("plan", data))
        found = stagewright.check(read, self.chain, self.cluster)
        return found, evaluate(*self.documents, plan, limit)[1]


@pytest.mark.parametrize("seed", slow_after(10, range(60)))
def test_both_checkers_agree_on_random_plans(seed, tmp_path):
    case = Case(seed, tmp_path)
    assert case.verdicts(case.plan) == ((), [])


@pytest.mark.parametrize("seed", slow_after(6, range(30)))
def test_both_checkers_agree_on_the_edge_of_memory(seed, tmp_path):
    case = Case(seed, tmp_path)
    peak = max(peak_bytes(*case.documents, case.plan))
    if peak * 0.999 < 1e6 or case.digest(peak * 0.999) is None:
        pytest.skip("no digest: a limit below a megabyte, or no planner finds a plan under it")
    assert case.verdicts(case.plan, peak) == ((), [])
    found, broken = case.verdicts(case.plan, peak * 0.999)
    assert {violation.rule for violation in found} == {"memory"}
    assert broken


@pytest.mark.parametrize("seed", slow_after(6, range(30)))
def test_both_checkers_agree_on_shifted_actions(seed, tmp_path):
    case = Case(seed, tmp_path)
    for shift in (-3e-4, 1e-4, 2e-3):
        plan = copy.deepcopy(case.plan)
        chosen = case.draw.choice(plan["schedule"]["actions"])["action"]
        for entry in plan["schedule"]["actions"]:
            if entry["action"] == chosen:
                entry["start_seconds"] += shift
                entry["finish_seconds"] += shift
        try:
            found, broken = case.verdicts(plan)
        except stagewright.InputError:
            assert evaluate(*case.documents, plan)[1]
        else:
            assert bool(found) == bool(broken), (chosen, shift, found, broken)
