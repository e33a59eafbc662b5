"""Water filling over a tree of entities (thesis 5.4.3, figure 5.6).

An entity's weight goes to those of its members, entities or jobs, that are not stuck: under
``fairness`` by their weights, under ``fifo`` all of it to the first job. The cluster is shared by
the entities without a parent, by their weights. An entity whose jobs are all stuck has nothing to
give on, and its weight goes to its siblings.
"""

import numpy as np

from stagewright.formulations.clusters.allocation import AllocationProblem
from stagewright.formulations.clusters.policies import water_filling
from stagewright.formulations.clusters.policies.water_filling import Needs
from stagewright.graphs.documents.arrays import Bools, Floats, Ints


def tree(problem: AllocationProblem) -> Needs:
    """The needs of jobs within entities; without entities the needs of ``water_filling.flat``."""
    if not problem.entities:
        return water_filling.flat(problem)
    entities = problem.entities
    number = {entity.name: place for place, entity in enumerate(entities)}
    # The cluster is the entity after the last.
    parent = np.array([number.get(entity.parent or "", len(entities)) for entity in entities])
    fifo = np.array([entity.discipline == "fifo" for entity in entities])
    weight = np.array([entity.weight for entity in entities])
    own = np.where(fifo[problem.entity], 1.0, problem.weight)
    fair = problem.fair_throughput()
    order = _top_down(parent)

    def needs(stuck: Bools) -> Floats:
        claims = np.where(stuck, 0.0, own)
        waiting = np.flatnonzero(~stuck & fifo[problem.entity])
        _, first = np.unique(problem.entity[waiting], return_index=True)
        claims[np.delete(waiting, first)] = 0.0
        return fair * _job_weights(problem.entity, claims, parent, weight, order)

    return needs


def _job_weights(entity: Ints, claims: Floats, parent: Ints, weight: Floats, order: Ints) -> Floats:
    """``claims`` of jobs and ``weight`` of entities turned into parts of the whole weight."""
    cluster = len(parent)
    claimed = np.bincount(entity, claims, minlength=cluster + 1)
    for place in order[::-1]:
        if claimed[place] > 0:
            claimed[parent[place]] += weight[place]
    given = np.zeros(cluster + 1)
    given[cluster] = weight[parent == cluster].sum()
    for place in order:
        if claimed[place] > 0:
            above = parent[place]
            given[place] = given[above] * weight[place] / claimed[above]
    return np.asarray(given[entity] * claims / np.where(claimed > 0, claimed, 1.0)[entity])


def _top_down(parent: Ints) -> Ints:
    """The entities, each after its parent."""
    depth = np.zeros(len(parent), dtype=np.int64)
    above = parent.copy()
    while (above < len(parent)).any():
        inside = above < len(parent)
        depth += inside
        above[inside] = parent[above[inside]]
    return np.argsort(depth, kind="stable")
