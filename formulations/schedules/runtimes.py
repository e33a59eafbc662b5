"""The plans that a framework's pipeline runtime can run, as a restriction for planners.

Every stage has the same number of replicas, which split each microbatch evenly; the stages are on
groups of devices in one of the framework's placements, in one of its orders, and cut where its
modules begin.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

from stagewright.formulations.plans.plan_class import EVERY_FINITE, PlanClass, Recompute, Shards
from stagewright.formulations.schedules.published.kinds import KINDS
from stagewright.graphs.documents.errors import InputError

ANY_ORDER = (
    "1f1b", "gpipe", "interleaved", "interleaved-ragged", "zb-h1", "zb1p", "interleaved-zb", "zbv",
)  # fmt: skip
"""Schedules in the placements of torch.distributed.pipelining whose losses are in order."""
_MOST_CHUNKS = 4  # stages of a rank that are tried


@dataclass(frozen=True, slots=True)
class Runtime:
    """The pipelines that a framework runs.

    Attributes
    ----------
    name
        The framework.
    kinds
        Its schedules, of `KINDS`.
    cuts
        The layers before which a stage may begin, ascending, without the first.
    recompute
        What all stages alike may do.
    shards
        What the replicas of all stages alike may divide.
    any_order
        Whether it runs any order in the placements of its schedules.
    least_ranks
        The fewest groups of devices.
    most_replicas
        The most devices of a group; None: no such limit.
    fills
        Whether there must be as many microbatches as ranks.
    """

    name: str
    kinds: tuple[str, ...]
    cuts: tuple[int, ...]
    recompute: tuple[Recompute, ...] = ("none",)
    shards: tuple[Shards, ...] = ("none",)
    any_order: bool = False
    least_ranks: int = 1
    most_replicas: int | None = None
    fills: bool = False

    def require(self, recompute: str | None, shards: Shards) -> None:
        """Refuse recomputation or shards that no plan for the framework has.

        Raises InputError if ``recompute`` is neither None, ``auto`` nor one of its own, or by its
        ``shards``.
        """
        for what, asked, own in (
            ("recompute", recompute or "auto", (*self.recompute, "auto")),
            ("shards", shards, self.shards),
        ):
            if asked not in own:
                raise InputError(f"{what} {asked!r}: plans for {self.name} have {' or '.join(own)}")

    def needs(self) -> str:
        """The least that any of its pipelines needs."""
        ranks = f"at least {self.least_ranks} rank{'s' * (self.least_ranks > 1)}"
        return f"its pipelines have {ranks}" + " and as many microbatches as ranks" * self.fills

    def replicas(self, samples: int, devices: int) -> tuple[int, ...]:
        """The numbers of replicas that split a microbatch of ``samples`` evenly, ascending."""
        most = min(samples, devices // self.least_ranks, self.most_replicas or devices)
        return tuple(r for r in range(1, most + 1) if samples % r == 0)

    def most_ranks(self, devices: int, microbatches: int) -> int:
        """The most groups of devices, with one stage each."""
        most = min(devices, len(self.cuts) + 1)
        return min(most, microbatches) if self.fills else most

    def shapes(self, ranks: int) -> Iterator[tuple[str, int]]:
        """The schedules on so many ranks, with their stages per rank."""
        for name in self.kinds:
            allowed = KINDS[name].chunks
            for chunks in range(1, _MOST_CHUNKS + 1):
                # With one stage on each rank a loop is a line.
                again = chunks == 1 and KINDS[name].placement == "loop"
                again |= chunks > 1 and ranks == 1
                if allowed.allows(chunks) and not again and chunks * ranks <= len(self.cuts) + 1:
                    yield name, chunks

    def plans(self, samples: int, devices: int) -> PlanClass:
        """The smallest class that contains all plans for the runtime."""
        kinds = [KINDS[name] for name in self.kinds]
        return replace(
            EVERY_FINITE,
            sharing="none" if all(one.placement == "line" for one in kinds) else "groups",
            replication=("split",),
            split_backward=any(one.is_split for one in kinds),
            recompute=self.recompute,
            offload=False,
            weights=("flush",),
            # With too few devices there are no plans, of any number of replicas.
            equal_groups=self.replicas(samples, devices) or (1,),
        )


def torch_runtime(layers: int) -> Runtime:
    """The runtime of torch.distributed.pipelining, of a model that may be cut at every layer."""
    return Runtime("torch", ANY_ORDER, tuple(range(1, layers)), any_order=True)
