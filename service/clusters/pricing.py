"""Throughputs of trainings: what ``train-plan`` answers for each kind and number of devices."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from math import inf
from time import monotonic
from typing import Any, Literal

from stagewright.formulations.forms.answers import (
    OnProgress,
    Progress,
    StopToken,
    is_stopped,
    silent,
)
from stagewright.formulations.parallelism.document import LayoutPlan
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.goodput import least_checkpoint
from stagewright.formulations.parallelism.ranges import ranges
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.formulations.prices.collectives import link_seconds
from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.documents.units import format_bytes
from stagewright.graphs.importers.hf_config import parse_hf_config
from stagewright.graphs.machines.devices import ACCELERATORS, known_kind, require_arithmetic
from stagewright.graphs.machines.fabric import Fabric
from stagewright.graphs.models.architecture import Architecture
from stagewright.graphs.workloads.jobs import Job, Throughputs, Training, Workload, counts_of
from stagewright.graphs.workloads.pool import Accelerator, Pool
from stagewright.service.clusters.answers import ComputedRate, PriceJobsAnswer
from stagewright.service.clusters.rates import with_rates
from stagewright.service.clusters.requests import PriceJobsRequest
from stagewright.service.layouts.configured import TrainPlanInputs
from stagewright.service.layouts.searching import find_layouts
from stagewright.solvers.parallelism.tree import compiled_walk

_STOPPED = "stopped before all throughputs of the trainings were computed"


def price_jobs(
    request: PriceJobsRequest, on_progress: OnProgress = silent, stop: StopToken | None = None
) -> PriceJobsAnswer:
    """The throughputs that the workload lacks; those that it has are kept.

    Raises
    ------
    InputError
        If a configuration or a kind is not known, a job fits nowhere, or ``stop`` was set.
    """
    began = monotonic()
    require_priceable(request)
    searches, found = _Searches(request, stop), []
    for number, one in enumerate(searches.wanted, start=1):
        doing = f"throughput {number} of {len(searches.wanted)}"
        on_progress(Progress(monotonic() - began, None, -inf, doing=doing))
        found.append(searches.rate(one))
    workload = with_rates(request.workload, found)
    for job in request.workload.jobs:
        searches.require_place(job, workload.throughputs, found)
    return PriceJobsAnswer(
        prices=tuple(found),
        assumed=tuple(searches.assumed()),
        wall_seconds=monotonic() - began,
        workload=workload,
        plans=tuple(searches.plans),
    )


def require_priceable(request: PriceJobsRequest) -> None:
    """Refuse, without a search, trainings or accelerators that are not known.

    Raises
    ------
    InputError
        In one line, with the training and the field, or the accelerator.
    """
    if not request.workload.trainings:
        raise InputError("the workload has no trainings: its throughputs are all given")
    for training in request.workload.trainings:
        with naming(_named(training)):
            _architecture(training)
            TrainPlanInputs.of(**training.inputs())
    for one in _wanted(request.workload, request.pool, request.placement):
        _require_links(request, one)


def _require_links(request: PriceJobsRequest, one: "_Wanted") -> None:
    """Refuse an accelerator of no known kind, or one whose links are neither known nor given."""
    name, card = one.accelerator.name, known_kind(one.accelerator.name)
    place = f"accelerator {name!r}: "
    if card is None:
        raise InputError(
            f"{place}trainings are computed for kinds of devices, and this is none of "
            f"{', '.join(sorted(ACCELERATORS))}; or give the throughputs of {one.training.model!r}"
        )
    given = request.links(name)
    for which, is_needed in (("server", True), ("network", one.servers > 1)):
        known = given[f"{which}_bandwidth"] or getattr(card, f"{which}_bytes_per_second")
        if is_needed and known is None:
            raise InputError(
                f"{place}the {which} bandwidth of {card.name} is not known: give it to price-jobs, "
                f"for example --{which}-bandwidth {name}=10GB/s"
            )


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A rate to compute."""

    training: Training
    accelerator: Accelerator
    count: int
    per_server: int
    placement: Literal["consolidated", "spread"]

    @property
    def servers(self) -> int:
        """The number of servers."""
        return self.count // self.per_server


def _wanted(workload: Workload, pool: Pool, placement: bool) -> Iterator[_Wanted]:
    """The rates that the workload lacks, in the order of trainings, accelerators and counts."""
    given = {(one.model, one.scale, one.accelerator) for one in workload.throughputs.alone}
    for training in workload.trainings:
        jobs = [job for job in workload.jobs if job.model == training.model]
        counts = sorted({count for job in jobs for count in counts_of(job.kind)})
        for one in pool.accelerators:
            for count in counts:
                if (training.model, count, one.name) in given:
                    continue
                yield _Wanted(training, one, count, _packed(one, count), "consolidated")
                if placement and count > 1:
                    yield _Wanted(training, one, count, _spread(one, count), "spread")


def _packed(one: Accelerator, count: int) -> int:
    """The most accelerators of a server, equally many in each."""
    return max(size for size in _divisors(count) if size <= _per_server(one))


def _per_server(one: Accelerator) -> int:
    """The accelerators of a server, those of the kind's usual one where the pool has no servers."""
    card = known_kind(one.name)
    return one.per_server or (8 if card is None else card.nvlink_domain)


def _spread(one: Accelerator, count: int) -> int:
    """The fewest accelerators of a server, equally many in each, on the servers that there are."""
    packed = _packed(one, count)
    return min(
        (size for size in _divisors(count) if size <= packed and count // size <= one.servers),
        default=packed,
    )


@cache
def _divisors(count: int) -> tuple[int, ...]:
    return tuple(one for one in range(1, count + 1) if count % one == 0)


def _named(training: Training) -> str:
    return f"training {training.model!r}"


def _architecture(training: Training) -> Architecture:
    if isinstance(training.config, str):
        raise InputError("config: give the fields of the config.json; load_workload reads files")
    return parse_hf_config(json.dumps(training.config), "config")


_Made = dict[str, Any]
"""The fields of a rate that a search finds, and the fastest layout; or why there is none."""


class _Searches:
    """The searches of a request, each made once."""

    def __init__(self, request: PriceJobsRequest, stop: StopToken | None) -> None:
        self.request, self.stop = request, stop
        self.wanted = [*_wanted(request.workload, request.pool, request.placement)]
        self.models = {one.model: _architecture(one) for one in request.workload.trainings}
        self.plans: list[LayoutPlan | None] = []  # of the rates
        self.known: dict[tuple[object, ...], _Made] = {}  # trainings that are alike have it once
        self.fabrics: dict[str, tuple[Fabric, str]] = {}  # and the rates, by accelerator
        self.checkpoints: dict[str, str] = {}  # what is said of them, by training

    def rate(self, one: _Wanted) -> ComputedRate:
        """The rate, as train-plan has it."""
        name, most = one.accelerator.name, one.accelerator.count
        if one.count > most:
            made: _Made = {"reason": f"the cluster has {most} {name}"}
        else:
            made = self.found(one.training, name, one.count, one.per_server)
        self.plans.append(made.get("plan"))
        return ComputedRate(
            model=one.training.model,
            accelerator=name,
            count=one.count,
            placement=one.placement,
            servers=one.servers,
            **{field: value for field, value in made.items() if field != "plan"},
        )

    def found(self, training: Training, name: str, count: int, per_server: int) -> _Made:
        """The fastest layout on so many accelerators."""
        key = self.models[training.model], *training.inputs().items(), name, count, per_server
        if key not in self.known:
            if is_stopped(self.stop):
                raise InputError(_STOPPED)
            with naming(f"{_named(training)} on {count} {name}"):
                self.known[key] = self._search(training, name, count, per_server)
        return self.known[key]

    def _search(self, training: Training, name: str, count: int, per_server: int) -> _Made:
        inputs = TrainPlanInputs.of(
            device=name.lower(), gpus=count, per_server=per_server, top=1,
            time_limit=self.request.time_limit, **self.request.links(name), **training.inputs(),
        )  # fmt: skip
        fabric = inputs.fabric()
        try:
            require_arithmetic(fabric.card, inputs.precision)
        except InputError as error:
            return {"reason": str(error)}
        layouts = inputs.layouts_of(self.models[training.model])
        before = self.fabrics.get(name)
        if before is None or before[0].devices < count:
            self.fabrics[name] = fabric, layouts.problem.rates.name
        try:
            answer = find_layouts(layouts, stop=self.stop, surest=False)
        except InputError as error:
            return {"reason": str(error)}
        if is_stopped(self.stop):
            raise InputError(_STOPPED)
        if answer.plan is None:
            return {"reason": answer.reason}
        best = evaluate(layouts.problem, answer.plan.layout, compiled_walk())
        of_time, bound = ranges(layouts.problem, best), answer.plan.bound
        return {
            "steps_per_second": 1 / best.seconds,
            "steps_per_second_low": 1 / of_time.seconds_high,
            "steps_per_second_high": 1 / of_time.seconds_low,
            "bound_steps_per_second": None if bound is None else 1 / bound.seconds,
            "layout": str(best.layout),
            "plan": answer.plan,
            "checkpoint_seconds": self._checkpoint_seconds(training, layouts.problem),
        }

    def _checkpoint_seconds(self, training: Training, problem: TrainingProblem) -> float:
        """To write and to read weights and optimizer states; every layout has as many bytes."""
        size, speed = least_checkpoint(problem).total, self.request.store_bandwidth
        seconds: float = link_seconds(2 * size, speed)
        self.checkpoints[training.model] = (
            f"a move of {training.model} writes and reads {format_bytes(size)} at "
            f"{speed / 1e9:.4g} GB/s, in {seconds:.3g} s"
        )
        return seconds

    def require_place(
        self, job: Job, throughputs: Throughputs, prices: Iterable[ComputedRate]
    ) -> None:
        """Refuse a job of a training that fits nowhere, with accelerators that would hold it."""
        training = next((t for t in self.request.workload.trainings if t.model == job.model), None)
        counts = counts_of(job.kind)
        if training is None or any(
            max(one.steps_per_second, one.spread_steps_per_second or 0.0)
            for one in throughputs.alone
            if one.model == job.model and one.scale in counts
        ):
            return
        why = [
            f"{one.count} {one.accelerator}: {one.reason}"
            for one in prices
            if one.model == job.model and one.count in counts and one.reason
        ]
        hint = next(self._would_hold(training, max(counts)), None)
        raise InputError(
            f"job {job.name!r}: {job.model!r} runs nowhere in this cluster"
            + "".join(f"; {one}" for one in why[:1])
            + ("" if hint is None else f"; {hint} would hold it")
        )

    def _would_hold(self, training: Training, count: int) -> Iterator[str]:
        """Other numbers of the cluster's accelerators, then other kinds, that hold a training."""
        for one in self.request.pool.accelerators:
            more = [count << n for n in range(1, one.count.bit_length()) if count << n <= one.count]
            for number in [one.count] if count > one.count else more:
                if self._holds(training, one, number):
                    yield f"{number} {one.name}"
        for card in sorted(ACCELERATORS.values(), key=lambda card: card.memory_bytes):
            other = Accelerator(card.name, count)
            if card.name not in self.request.pool.names and self._holds(training, other, count):
                yield f"{count} {card.name}"

    def _holds(self, training: Training, one: Accelerator, count: int) -> bool:
        """Whether a layout fits; not where kind or links are not known."""
        try:
            return "layout" in self.found(training, one.name, count, _packed(one, count))
        except InputError:
            return False

    def assumed(self) -> Iterator[str]:
        """What is assumed of the machines, of each type of accelerator that was searched for."""
        for one in self.request.pool.accelerators:
            fabric, rates = self.fabrics.get(one.name, (None, ""))
            if fabric is None:
                continue
            size, where = _per_server(one), ("in a server", "out of it")
            links = ", ".join(
                f"{level.bytes_per_second / 1e9:.4g} GB/s {place}"
                for level, place in zip(fabric.levels, where, strict=False)
            )
            usual = " (the usual)" * (one.per_server is None)
            memory = format_bytes(fabric.memory_bytes)
            said = f"servers of {size}{usual}, {memory}, {links}; rates {rates}"
            yield f"computed for {one.name}: {said}"
        yield from self.checkpoints.values()
        uneven = {
            f"{one.count} {one.accelerator.name}"
            for one in self.wanted
            if one.placement == "consolidated"
            and one.servers > -(-one.count // _per_server(one.accelerator))
        }
        if uneven:
            yield (
                f"{', '.join(sorted(uneven))}: equally many on each server, so on more servers "
                "than would hold them"
            )
