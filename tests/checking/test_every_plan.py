"""Every bound against the optimum of its class of plans, which an independent oracle computes.

On random tiny instances: no bound exceeds the optimum of its class, no plan is better than the best
of the whole language, and the checker and the plain checker of the tests agree on both. With
``STAGEWRIGHT_LONG=1`` on a thousand instances.
"""

import json
import os
from functools import cache
from itertools import count, islice
from math import inf

import pytest
from language_instances import random_instance
from language_oracle import Language, best, evaluate, least_memory_fits
from language_prices import Instance, Stage
from language_schedule import TICK, best_schedule, build_tasks
from profiles import slow_after

import stagewright
from stagewright.solvers.planners.steps.proposal import Choices

pytest.importorskip("stagewright.formulations.plans.plan_class", reason="no classes")

PLANNERS = ("spp", "exact", "dp", "gpipe", "pipedream", "hetpipe", "auto", "1f1b-star", "madpipe")
OFFLOADING = ("spp", "exact", "gpipe", "hetpipe")  # also with offloading, in every stage
TOLERANCE = 1e-6
LONG = os.environ.get("STAGEWRIGHT_LONG") == "1"


def size(seed):
    model, cluster, microbatches = random_instance(seed)
    return len(model["layers"]) * len(cluster["devices"]) * microbatches


def seeds():
    """A thousand instances, or a hundred of the smaller ones."""
    return range(1000) if LONG else list(islice((s for s in count() if size(s) <= 12), 100))


def language_of(plans):
    """The oracle's language of the finite plans of a class; None where it has no such language.

    Weights other than ``flush`` are never better, see :mod:`language_oracle`; periodic plans are
    not in the language, so that a bound on them is held against the finite ones alone.
    """
    if "finite" not in plans.schedules or "flush" not in plans.weights:
        return None
    assert plans.equal_groups is None
    assert not plans.merged
    return Language(
        device_sharing=plans.sharing != "none",
        replications=frozenset(plans.replication),
        split_backward=plans.split_backward,
        recompute=frozenset(plans.recompute),
        offload=plans.offload,
        groups=plans.sharing == "groups",
    )


class Case:
    """A random instance, as documents and as the product reads it."""

    def __init__(self, seed, folder):
        self.folder = folder
        self.documents = model, cluster, self.microbatches = random_instance(seed)
        self.chain = stagewright.load_model(self.write("model", model))
        self.cluster = stagewright.load_cluster(self.write("cluster", cluster))
        self.optimum = cache(self._optimum)

    def write(self, name, document):
        path = self.folder / f"{name}.json"
        path.write_text(json.dumps(document))
        return path

    def knows_hosts(self):
        return all(one.host_bytes_per_second is not None for one in self.cluster.devices)

    def plan(self, planner, offload):
        return stagewright.plan(
            self.chain,
            self.cluster,
            microbatches=self.microbatches,
            planner=planner,
            time_limit=5.0 if LONG else 1.0,
            choices=Choices(offload=offload),
            start=self.earlier() if planner == "auto" else None,
        )

    def earlier(self):
        """A plan to start from: for one microbatch more."""
        asked = {"microbatches": self.microbatches + 1, "planner": "gpipe"}
        return stagewright.plan(self.chain, self.cluster, **asked).plan

    def document(self, plan):
        path = self.folder / "plan.json"
        stagewright.save_plan(plan, path)
        return json.loads(path.read_text())

    def _optimum(self, language):
        """Seconds and plan document; inf where nothing fits."""
        return best(*self.documents, language) or (inf, None)

    def schedule_optimum(self, document, split_backward):
        """Seconds of the best schedule of the plan's stages."""
        instance = Instance(*self.documents)
        stages = [
            Stage(
                *stage["layers"],
                tuple(instance.names.index(name) for name in stage["devices"]),
                stage["replication"],
                stage["recompute"],
                stage["offload"],
            )
            for stage in document["stages"]
        ]
        tasks = build_tasks(instance, stages, split_backward)
        return best_schedule(instance, stages, tasks, inf)[0] * TICK


def holds(bound, optimum):
    return bound <= optimum * (1 + TOLERANCE)


def check_bounds(case, document, certificate):
    for bound in certificate.bounds:
        language = language_of(bound.plans)
        if language is None:
            continue
        if bound.scope == "problem":
            optimum = case.optimum(language)[0]
        else:
            optimum = case.schedule_optimum(document, bound.plans.split_backward)
        assert holds(bound.seconds, optimum), (bound, optimum)
    assert holds(certificate.every_bound_seconds, case.optimum(Language())[0])


def check_plan(case, result, document):
    """A finite plan keeps the rules, and is no better than the best of its class."""
    cost, broken = evaluate(*case.documents, document)
    assert not broken
    assert cost == pytest.approx(result.cost, rel=TOLERANCE)
    assert holds(case.optimum(Language())[0], cost)
    language = language_of(result.plan.certificate.plans)
    assert holds(case.optimum(language)[0], cost)


def check_refusal(case, result):
    """Where a class is said to have no plan, nothing of it fits."""
    if result.status.value == "infeasible" and result.plans is not None:
        language = language_of(result.plans)
        assert language is None or not least_memory_fits(*case.documents, language)


def check_best_plan(case, digest):
    """The checker accepts the oracle's best plan."""
    document = case.optimum(Language())[1]
    path = case.write("best", {**document, "digest": digest})
    assert not stagewright.check(stagewright.load_plan(path), case.chain, case.cluster)


def check_answers(case, asked):
    """The answers of planners, each with or without offloading."""
    digest = None
    for planner, offload in asked:
        result = case.plan(planner, offload)
        if result.plan is None:
            check_refusal(case, result)
            continue
        document = case.document(result.plan)
        digest = document["digest"]
        if document["schedule"]["kind"] == "finite":
            check_plan(case, result, document)
        check_bounds(case, document, result.plan.certificate)
    if digest is not None:
        check_best_plan(case, digest)


def planners_for(case):
    asked = [(planner, None) for planner in PLANNERS]
    return asked + [(planner, True) for planner in OFFLOADING if case.knows_hosts()]


@pytest.mark.parametrize(("turn", "seed"), slow_after(13, list(enumerate(seeds()))[:100]))
def test_bounds_hold_for_planners_in_rotation(turn, seed, tmp_path):
    case = Case(seed, tmp_path)
    asked = planners_for(case)
    check_answers(case, [asked[turn % len(asked)], asked[(turn + 5) % len(asked)]])


@pytest.mark.parametrize("seed", slow_after(2, seeds()))
def test_bounds_hold_for_every_planner(seed, tmp_path):
    case = Case(seed, tmp_path)
    check_answers(case, planners_for(case))
