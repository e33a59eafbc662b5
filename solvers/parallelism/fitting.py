"""Pipelines of any division of the blocks that fit in memory, and what they must recompute.

Rank r keeps the activations of at least min(m, p - r) microbatches of its blocks, beside its
states: a block that does not fit on a rank is on another one, or some are recomputed.
"""

from functools import cached_property
from math import inf

import numpy as np

from stagewright.formulations.parallelism.schedules import FORMS, Schedule, kept_forwards
from stagewright.formulations.parallelism.states import state_rule
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.plans.tolerance import RELATIVE_TOLERANCE
from stagewright.graphs.documents.arrays import Bools, Floats, Ints
from stagewright.graphs.models.shards import Recompute
from stagewright.solvers.parallelism.divisions import replicas
from stagewright.solvers.parallelism.family import LayerFamily
from stagewright.solvers.parallelism.space import Space, chosen

ROUNDING = 1e-9


class SearchedSpace:
    """A problem on devices of so many bytes, and the values of a space."""

    def __init__(self, problem: TrainingProblem, space: Space, memory: float) -> None:
        self.problem, self.space = problem, space
        self.memory = memory * (1 + RELATIVE_TOLERANCE)
        self.sizes = chosen(space.microbatch, problem.batch)
        self.offloads = space.offloads(problem)
        self.keepings = [(zero, one) for zero in space.zero for one in space.offload]

    @cached_property
    def repeats(self) -> list[Recompute]:
        """The kinds of recomputation of the space."""
        return [one for one in self.space.recomputes(self.problem) if one != "none"]


def state_bytes(
    problem: TrainingProblem,
    zero: int,
    offload: bool,
    ranks: Ints,
    trained: tuple[Floats, Floats],
    every: tuple[Floats, Floats],
) -> Floats:
    """Bytes of states in pipelines of so many ranks; of parameters a rank's part, and all."""
    found = []
    for inside in (False, True):
        rule = state_rule(problem, zero, offload=offload, in_pipeline=inside)
        each = (rule.weights, rule.gradients, rule.optimizer)
        place = int(not rule.weights[1])
        frozen = (every[place] - trained[place]) * problem.precision.weight_bytes
        found.append(sum((size * trained[not one] for size, one in each), frozen))
    alone, in_pipeline = found
    return np.where(ranks > 1, in_pipeline, alone)


class FittingPipelines:
    """Pipelines of layers that are divided in one way, with one schedule.

    Arrays have some of the axes ZeRO with offload (K), samples of a microbatch (S), ranks of a
    pipeline (P), and rank (R).
    """

    def __init__(self, of: SearchedSpace, family: LayerFamily, schedule: Schedule) -> None:
        self.of, self.problem, self.family, self.schedule = of, family.problem, family, schedule
        self.form, self.blocks = FORMS[schedule], family.problem.architecture.layers
        copies, data = self.form.copies, chosen(of.space.data, family.left)
        every = (p for p in chosen(of.space.pipeline, family.left) if family.left // p in data)
        can = (p for p in every if copies == 1 or (p % copies == 0 and p >= 2 * copies))
        self.ranks = np.array([p for p in can if p <= (self.blocks + 2) * copies], dtype=np.int64)
        self.samples = np.array(of.sizes)[:, None]
        self.data: Ints = family.left // self.ranks
        self.m = np.maximum(self.problem.batch // (self.samples * self.data), 1)

    @cached_property
    def allowed(self) -> Bools:
        """(S, P) pipelines by the rules on microbatches and experts."""
        ranks, batch = self.ranks // self.form.copies, self.problem.batch
        data, _, found = replicas(ranks, 1, self.family.left, batch, self.samples, self.schedule)
        return found & self.family.can_divide_experts(data, self.schedule)

    @cached_property
    def zeros(self) -> Ints:
        """(K, 1, 1) stages of ZeRO."""
        return np.array([zero for zero, _ in self.of.keepings])[:, None, None]

    @cached_property
    def kinds(self) -> list[int]:
        """The first layer of every kind of blocks, then the first and the last layer."""
        return [*self.family.firsts, 0, self.blocks + 1]

    @cached_property
    def fitting(self) -> tuple[Bools, Floats, Floats]:
        """(K, S, P) what fits, all recomputed; the blocks, and bytes of a sample, that must be.

        A rank with n blocks of a bytes, of each of which it keeps k samples, and r bytes of room
        must free (n a - r) / k of a sample. All ranks together must free at least what the blocks
        take that do not fit, each a / k where k is the most.
        """
        saved, kinds = self.problem.processor.saved_bytes, self.family.shares.kinds
        there, kept, room, logits = self._room
        state, whole = self._states[:, :-2].min(axis=1), min(saved(one, "none") for one in kinds)
        state = state[:, None, :, None]
        each = state + kept * whole
        fit = np.where(there, np.maximum(room, 0.0) / each, 0.0)
        must = np.maximum(self.blocks - np.floor(fit + ROUNDING).sum(axis=-1), 0.0)
        offloads = (self.ranks == 1) & self.of.offloads
        if not self.freed:
            return (must == 0) | offloads, must, must
        every = [(saved(one, "none"), saved(one, kind)) for one in kinds for kind, _ in self.freed]
        # The backward of a block that is recomputed holds again what was freed.
        again = max(0.0, min(all_of - kept_of for all_of, kept_of in every))
        less = room + logits - np.maximum(self.samples[..., None] * again, logits)
        least = np.maximum(less, 0.0) / (state + kept * min(kept_of for _, kept_of in every))
        most = np.where(there, np.floor(np.maximum(fit, least) + ROUNDING), 0.0).sum(axis=-1)
        lacks = self.blocks - np.where(self.ranks == 1, (less / each)[..., 0], fit.sum(axis=-1))
        needed = np.where(must > 0, lacks * (each / np.maximum(kept, 1)).min(axis=-1), 0.0)
        can = most >= self.blocks
        needed = np.where(can, np.maximum(needed, 0.0), 0.0)
        return can | offloads, np.where(offloads, 0.0, must), np.where(offloads, 0.0, needed)

    @cached_property
    def freed(self) -> list[tuple[Recompute, float]]:
        """Kinds of recomputation, and the bytes of a sample that they free of a block at most."""
        saved, kinds = self.problem.processor.saved_bytes, self.family.shares.kinds
        every = (
            (kind, max(saved(one, "none") - saved(one, kind) for one in kinds))
            for kind in self.of.repeats
        )
        return [(kind, freed) for kind, freed in every if freed > 0]

    @property
    def _room(self) -> tuple[Bools, Ints, Floats, Floats]:
        """Ranks that there are (P, R), samples kept, room for blocks, and the logits' gradients.

        All but the first are (K, S, P, R) or less; without room where the ends alone do not fit.
        """
        processor, shares, rank = self.problem.processor, self.family.shares, self._rank
        last, there = rank == self.ranks[:, None] - 1, rank < self.ranks[:, None]
        samples, none = self.samples[..., None], np.zeros_like(rank)
        kept = kept_forwards(self.schedule, self.ranks[:, None], 1, self.m[..., None], rank, none)
        kept = samples * np.where(there, kept, 0)
        states = self._states[:, :, None, :, None]
        logits = last * samples * processor.gradient_of_loss(shares.head)
        first = states[:, -2] + kept * processor.saved_bytes(shares.embedding, "none")
        ends = (rank == 0) * first + logits
        ends = ends + last * (states[:, -1] + kept * processor.saved_bytes(shares.head, "none"))
        room = self.of.memory - self.problem.reserve_bytes - ends
        can = np.where(there, room, 0.0).min(axis=-1, keepdims=True) >= 0
        return there, kept, np.where(can, room - self._gathered[..., None, None], -inf), logits

    @property
    def _rank(self) -> Ints:
        return np.arange(self.ranks.max(initial=1))

    @cached_property
    def _states(self) -> Floats:
        """(K, kinds + 2, P) bytes of a rank's states of one block of a kind, or of an end."""
        of = self.problem
        trained, every = (
            one.each(lambda layers: layers[self.kinds, None])
            for one in (self.family.trained, self.family.parameters)
        )
        parts = [(self.family.divided(one, self.data), one.all) for one in (trained, every)]
        return np.array([state_bytes(of, *one, self.ranks, *parts) for one in self.of.keepings])

    @property
    def _gathered(self) -> Floats:
        """(K, S) bytes that a rank gathers for one block; see ``StageCosts.memory``."""
        problem, memory, sizes = self.problem, self.problem.memory, self.problem.precision
        every = self.family.parameters.all[self.kinds[:-2]]
        trained = self.family.trained.all[self.kinds[:-2]]
        zero = self.zeros[..., 0]
        bytes_each = 2 * np.minimum(memory.bucket_parameters, trained) * (zero > 0)
        bytes_each = bytes_each + trained * bool(memory.layer_gradients) + 2 * every * (zero == 3)
        found = bytes_each * sizes.weight_bytes + trained * sizes.gradient_bytes * (zero >= 2)
        hidden = self.family.split.sequence_parallel * self.family.shares.widest
        shown = hidden * self.samples.T * problem.precision.activation_bytes
        least: Floats = (found.min(axis=1, keepdims=True) + shown) * (1 + memory.slack)
        return least
