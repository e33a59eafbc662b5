"""Neighbours of a structure: one change to its cuts, devices, replication or memory mode."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import permutations

import numpy as np

from stagewright.formulations.plans.memory import stage_static_bytes
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.plans.plan import Stage
from stagewright.formulations.plans.plan_class import REPLICATION
from stagewright.formulations.plans.shards import share_count
from stagewright.formulations.plans.structure import Structure
from stagewright.solvers.planners.steps.proposal import Choices, MemoryMode, with_memory_mode

SHIFTS = (1, -1, 2, -2)
BUSY = 2  # devices of other stages to try as additional devices of a stage
MANY = 8  # stages; with more, only a sample of pairs exchanges devices

Stages = tuple[Stage, ...]
Change = Callable[[], "Structure | None"]


def is_runnable(problem: PipelineProblem, stage: Stage) -> bool:
    """Whether the stage has enough samples and no duplicate device."""
    enough = len(stage.runners(0)) <= problem.most_replicas(*stage.layers)
    return enough and len({*stage.devices}) == len(stage.devices)


@dataclass(frozen=True, slots=True)
class StructureMoves:
    """The neighbours that ``choices`` allow."""

    problem: PipelineProblem
    choices: Choices

    def neighbours(self, structure: Structure, rng: random.Random) -> Iterator[Structure]:
        """Every allowed neighbour, in random order."""
        changes = [*self._cuts(structure), *self._devices(structure, rng)]
        changes += self._flags(structure)
        rng.shuffle(changes)
        for change in changes:
            found = change()
            if found is not None and found != structure and self.allows(found):
                yield found

    def variants(self, structure: Structure) -> Iterator[Structure]:
        """The stages with replication, split backwards or memory mode changed in all of them."""
        for turned in self._turned(structure):
            for split in (False, True):
                for mode in self._modes():
                    found = self._everywhere(turned, split, mode)
                    if found != structure and self.allows(found):
                        yield found

    def relieved(self, structures: Iterable[Structure]) -> Iterator[Structure]:
        """The structures whose stages hold too much, with their first layers recomputed."""
        for structure in structures if "full" in self._modes() else ():
            uses = Counter(name for stage in structure.stages for name in stage.devices)
            parts = [self._relieved(stage, uses) for stage in structure.stages]
            if any(len(part) > 1 for part in parts):
                yield Structure.whole([stage for part in parts for stage in part])

    def _relieved(self, stage: Stage, uses: Counter[str]) -> Stages:
        """As few first layers as a microbatch asks for in a stage of their own, which recomputes.

        A device has equal memory for each of the stages that use it.
        """
        (first, last), shares, problem = stage.layers, share_count(stage), self.problem
        index, memory = problem.cluster.index, problem.memory_bytes
        room = min(float(memory[index[name]]) / uses[name] for name in stage.devices)
        inputs = problem.inputs_per_layer(shares)[first:last]
        saved = problem.saved_per_layer(shares)[first:last]
        again = np.cumsum(saved) - saved
        # When the first part is computed again, the backward of the rest has ended.
        held = np.maximum(again, saved.sum() - again)
        held[1:] += inputs[0] + 4 * inputs[1:]  # which it keeps, and buffers on both sides of a cut
        held += stage_static_bytes(problem, stage)
        cut = first + int(np.argmax(held <= room))
        if cut == first:
            return (stage,)
        rest = replace(stage, layers=(cut, last))
        return with_memory_mode(replace(stage, layers=(first, cut)), "full"), rest

    def allows(self, structure: Structure) -> bool:
        """Whether every stage has enough samples and no duplicate device."""
        return all(is_runnable(self.problem, stage) for stage in structure.stages)

    def has_mode(self, stage: Stage) -> bool:
        """Whether the stage's memory mode is allowed."""
        return ("offload" if stage.offload else stage.recompute) in self._modes()

    def _modes(self) -> list[MemoryMode]:
        hosts = [one.host_bytes_per_second for one in self.problem.cluster.devices]
        offload = self.choices.offload and None not in hosts
        known: list[MemoryMode] = [*self.choices.recomputations]
        return [*known, "offload"] if offload else known

    def _turned(self, structure: Structure) -> Iterator[Stages]:
        yield structure.stages
        for kind in REPLICATION:
            if any(one.replication != kind and len(one.devices) > 1 for one in structure.stages):
                yield tuple(
                    replace(one, replication=kind if len(one.devices) > 1 else "split")
                    for one in structure.stages
                )

    def _everywhere(self, stages: Stages, split: bool, mode: MemoryMode) -> Structure:
        changed = tuple(with_memory_mode(stage, mode) for stage in stages)
        return Structure(changed, tuple(split and self._splits(stage) for stage in changed))

    def _splits(self, stage: Stage) -> bool:
        """Whether a stage's backwards can be split."""
        whole = self.problem.layer_with_whole_backward(*stage.layers)
        return whole is None and not stage.offload

    def _with(self, structure: Structure, s: int, *stages: Stage, gone: int = 1) -> Structure:
        """Replace ``gone`` stages from s on by ``stages``."""
        wanted = structure.split[s]
        split = tuple(wanted and self._splits(stage) for stage in stages)
        return Structure(
            (*structure.stages[:s], *stages, *structure.stages[s + gone :]),
            (*structure.split[:s], *split, *structure.split[s + gone :]),
        )

    def _cuts(self, structure: Structure) -> list[Change]:
        last = len(structure.stages) - 1
        changes: list[Change] = [
            partial(self._shifted, structure, s, by) for s in range(last) for by in SHIFTS
        ]
        changes += [partial(self._joined, structure, s) for s in range(last)]
        changes += [
            partial(self._halved, structure, s, names)
            for s, stage in enumerate(structure.stages)
            if stage.layers[1] - stage.layers[0] > 1
            for names in self._halves(structure, stage)
        ]
        return changes

    def _shifted(self, structure: Structure, s: int, by: int) -> Structure | None:
        one, other = structure.stages[s : s + 2]
        border = one.layers[1] + by
        if not one.layers[0] < border < other.layers[1]:
            return None
        one = replace(one, layers=(one.layers[0], border))
        other = replace(other, layers=(border, other.layers[1]))
        split = structure.split[s] or structure.split[s + 1]
        changed = self._with(structure, s, one, other, gone=2)
        if split and not changed.split[s + 1]:
            return replace(changed, split=(
                *changed.split[: s + 1],
                structure.split[s + 1] and self._splits(other),
                *changed.split[s + 2 :],
            ))  # fmt: skip
        return changed

    def _joined(self, structure: Structure, s: int) -> Structure:
        one, other = structure.stages[s : s + 2]
        devices = tuple(dict.fromkeys(one.devices + other.devices))
        both = replace(one, layers=(one.layers[0], other.layers[1]), devices=devices)
        return self._with(structure, s, both, gone=2)

    def _halves(
        self, structure: Structure, stage: Stage
    ) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
        """Devices for two halves of a stage: half of its devices each, or others for one half."""
        half = len(stage.devices) // 2
        found = [(stage.devices[:half], stage.devices[half:])] if half else []
        # The all-reduce of one half runs beside the backwards of the other.
        found += [(stage.devices, stage.devices)] if half else []
        found += [(stage.devices, (name,)) for name in self._idle(structure)[:1]]
        found += [
            (stage.devices, names)
            for names in dict.fromkeys(other.devices for other in structure.stages)
            if names != stage.devices
        ]
        return found

    def _halved(
        self, structure: Structure, s: int, names: tuple[tuple[str, ...], tuple[str, ...]]
    ) -> Structure:
        stage = structure.stages[s]
        middle = (stage.layers[0] + stage.layers[1]) // 2
        one = _on(replace(stage, layers=(stage.layers[0], middle)), names[0])
        return self._with(
            structure, s, one, _on(replace(stage, layers=(middle, stage.layers[1])), names[1])
        )

    def _idle(self, structure: Structure) -> list[str]:
        used = {name for stage in structure.stages for name in stage.devices}
        return [one.name for one in self.problem.cluster.devices if one.name not in used]

    def _devices(self, structure: Structure, rng: random.Random) -> list[Change]:
        """Changes that remove, add and exchange devices."""
        stages, idle = structure.stages, self._idle(structure)
        used = list(dict.fromkeys(name for stage in stages for name in stage.devices))
        changes: list[Change] = []
        for s, stage in enumerate(stages):
            changes += [
                partial(self._moved, structure, s, _without(stages[s].devices, v))
                for v in stage.devices
                if len(stage.devices) > 1
            ]
            busy = [one for one in used if one not in stage.devices]
            more = [*idle[:2], *rng.sample(busy, min(BUSY, len(busy)))]
            changes += [partial(self._moved, structure, s, (*stage.devices, v)) for v in more]
            if stage.turns > 1:
                turned = (*stage.devices[1:], stage.devices[0])
                changes.append(partial(self._moved, structure, s, turned))
        pairs = list(permutations(range(len(stages)), 2))
        if len(stages) > MANY:
            pairs = rng.sample(pairs, MANY * (MANY - 1))
        for s, t in pairs:
            changes.append(partial(self._moved, structure, s, stages[t].devices))
            changes.append(partial(self._given, structure, s, t))
            if s < t:
                changes.append(partial(self._swapped, structure, s, t))
        return changes

    def _moved(self, structure: Structure, s: int, names: Sequence[str]) -> Structure:
        return self._with(structure, s, _on(structure.stages[s], tuple(names)))

    def _given(self, structure: Structure, s: int, t: int) -> Structure | None:
        """Move the last device of stage s to stage t."""
        names, taken = structure.stages[s].devices, structure.stages[t].devices
        if len(names) == 1 or names[-1] in taken:
            return None
        return self._moved(self._moved(structure, s, names[:-1]), t, (*taken, names[-1]))

    def _swapped(self, structure: Structure, s: int, t: int) -> Structure:
        one, other = structure.stages[s].devices, structure.stages[t].devices
        return self._moved(self._moved(structure, s, other), t, one)

    def _flags(self, structure: Structure) -> list[Change]:
        changes: list[Change] = []
        for s, stage in enumerate(structure.stages):
            if len(stage.devices) > 1:
                one, two = REPLICATION
                other = one if stage.replication == two else two
                turned = replace(stage, replication=other)
                changes.append(partial(self._with, structure, s, turned))
            if self._splits(stage):
                changes.append(partial(_toggled, structure, s))
            changes += [
                partial(self._with, structure, s, with_memory_mode(stage, mode))
                for mode in self._modes()
            ]
        variants = list(self.variants(structure))
        changes += [partial(_same, one) for one in variants]
        return changes


def _same(structure: Structure) -> Structure:
    return structure


def _toggled(structure: Structure, s: int) -> Structure:
    split = structure.split
    return replace(structure, split=(*split[:s], not split[s], *split[s + 1 :]))


def _on(stage: Stage, names: tuple[str, ...]) -> Stage:
    return replace(
        stage, devices=names, replication=stage.replication if len(names) > 1 else "split"
    )


def _without(names: Sequence[str], gone: str) -> tuple[str, ...]:
    return tuple(name for name in names if name != gone)
