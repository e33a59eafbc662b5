"""Plans and bounds on servers: SPP with fill-and-drain beside the server-aware relaxation.

Both plan split stages on disjoint devices, so both bounds hold for both plans. PipeDream's profiles
are read from the folder ``shared/data/pipedream`` beside the checkout; without it their rows are
left out.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np

from benchmarks.pipedream import DATA, read_profile
from benchmarks.report import Table
from stagewright.formulations.forms.answers import Limits, silent
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.prices.analytic import analytic_model
from stagewright.graphs.machines.cluster import (
    Cluster,
    Device,
    Link,
    from_matrix,
    load_cluster,
    uniform_servers,
)
from stagewright.graphs.models.chain import Chain, load_model
from stagewright.solvers.pipelines.relaxation import fill_and_drain_bound
from stagewright.solvers.planners.servers import PLANNER as SERVERS
from stagewright.solvers.planners.spp import PLANNER as SPP
from stagewright.solvers.planners.steps.planner import Planner
from stagewright.solvers.planners.steps.proposal import Choices, Proposal, cost_of
from stagewright.solvers.planners.steps.warm_up import compile_kernels

EXAMPLES = Path(__file__).parents[1] / "examples"
GB = 1e9
KINDS = {"v100": 16 * GB, "p100": 16 * GB}


@dataclass(frozen=True, slots=True)
class Instance:
    """A model and a cluster by their functions, and the number of microbatches."""

    model: str
    chain: Callable[[], Chain]
    links: str
    cluster: Callable[[], Cluster]
    microbatches: int

    @property
    def is_here(self) -> bool:
        """Whether the model's profile can be read."""
        return "pipedream" not in self.model or DATA.is_dir()


def _example(name: str) -> tuple[str, Callable[[], Chain]]:
    return name, partial(load_model, EXAMPLES / "profiles" / f"{name}.json")


def _analytic(
    name: str, samples: int, *kinds: str, **sizes: int
) -> tuple[str, Callable[[], Chain]]:
    shown = "".join(f", {size} {value}" for size, value in sizes.items())
    title = f"{name}{shown}, {samples} samples"
    return title, partial(analytic_model, name, samples, kinds or "v100", **sizes)


def _pipedream(name: str, contract: bool = False) -> tuple[str, Callable[[], Chain]]:
    return f"pipedream {name}", partial(read_profile, name, contract)


def _servers(
    servers: int, devices: int, fast: float, slow: float, memory: float = 16.0
) -> tuple[str, Callable[[], Cluster]]:
    """Links in GB/s, memory in GB."""
    tight = "" if memory == 16 else f", {memory:g} GB"
    made = partial(
        uniform_servers,
        servers,
        devices,
        Link(fast * GB),
        Link(slow * GB),
        memory_bytes=memory * GB,
    )
    return f"{servers}x{devices}, {fast:g} / {slow:g}{tight}", made


def _racks(
    racks: int, servers: int, devices: int, links: tuple[float, float, float]
) -> tuple[str, Callable[[], Cluster]]:
    """Three levels of links in GB/s: in a server, in a rack, between racks."""
    shape = (racks, servers, devices)
    title = f"{'x'.join(map(str, shape))}, {' / '.join(f'{one:g}' for one in links)}"
    return title, partial(_three_levels, shape, links, ("v100",))


def _mixed(
    servers: int, devices: int, fast: float, slow: float
) -> tuple[str, Callable[[], Cluster]]:
    """Half of the servers with V100, half with P100."""
    title = f"2 kinds, {servers}x{devices}, {fast:g} / {slow:g}"
    links = (fast, slow, slow)
    return title, partial(_three_levels, (2, servers // 2, devices), links, ("v100", "p100"))


def _three_levels(
    shape: tuple[int, int, int], links: tuple[float, float, float], kinds: tuple[str, ...]
) -> Cluster:
    rack, server, _ = np.unravel_index(np.arange(np.prod(shape)), shape)
    home = rack * shape[1] + server
    same_rack, same_server = rack[:, None] == rack, home[:, None] == home
    links_of = np.where(same_server, links[0], np.where(same_rack, links[1], links[2])) * GB
    devices = [
        Device(f"r{r}s{s}g{i}", kinds[r % len(kinds)], KINDS[kinds[r % len(kinds)]])
        for i, (r, s) in enumerate(zip(rack, server, strict=True))
    ]
    return from_matrix(devices, links_of, name="x".join(map(str, shape)))


V100S = ("v100-8x4", partial(load_cluster, EXAMPLES / "clusters" / "v100-8x4.json"))
GPT24 = _analytic("gpt", 4, layers=24, hidden=2048, heads=16)

INSTANCES = tuple(
    Instance(*model, *cluster, microbatches)
    for model, cluster, microbatches in (
        (_example("bert-large.v100"), V100S, 8),
        (_example("bert-large.v100"), V100S, 4),
        (_example("bert-large.v100"), V100S, 32),
        (GPT24, _servers(8, 4, 100, 12.5), 8),
        (_example("resnet152.v100"), _servers(4, 8, 12, 1.25), 8),
        (_analytic("resnet152", 32), _servers(4, 8, 130, 12.5), 8),
        (_example("vgg19.v100"), _servers(8, 4, 12, 1.25), 8),
        (_pipedream("gnmt_large"), _servers(4, 8, 130, 12.5), 8),
        (_pipedream("vgg16"), _servers(8, 4, 12, 1.25), 32),
        (_pipedream("resnet50", contract=True), _servers(4, 8, 130, 12.5), 8),
        (_pipedream("resnet50", contract=True), _servers(16, 8, 130, 12.5), 32),
        (_example("xlnet-large.v100"), _servers(16, 8, 130, 1.25), 8),
        (_example("bert-large.v100"), _servers(16, 8, 130, 12.5), 32),
        (GPT24, _servers(16, 8, 130, 12.5), 32),
        (_example("vgg19.v100"), _servers(16, 8, 130, 1.25), 8),
        (_example("bert-48.v100"), _servers(32, 8, 130, 12.5), 32),
        (_example("bert-large.v100"), _servers(128, 8, 130, 12.5), 32),
        # Not in the prototype's table: larger microbatches, which more devices can share.
        (_analytic("bert-large", 16), _servers(8, 8, 130, 12.5), 16),
        (_analytic("gpt", 8, layers=48, hidden=2048, heads=16), _servers(16, 8, 130, 12.5), 32),
        (_analytic("transformer", 64), _servers(4, 8, 130, 12.5), 4),
        (_analytic("inception-v3", 64), _servers(8, 4, 12, 1.25), 8),
        (_analytic("densenet121", 64), _servers(4, 8, 130, 12.5), 16),
        (_analytic("resnet50", 128), _servers(16, 8, 130, 12.5), 8),
        (_analytic("bert-48", 8), _servers(64, 8, 130, 12.5), 32),
        (_analytic("bert-large", 32), _servers(128, 8, 130, 12.5), 32),
        (_analytic("gpt", 16, layers=24, hidden=2048, heads=16), _servers(128, 8, 130, 12.5), 64),
        # Three levels of links.
        (_analytic("bert-large", 16), _racks(4, 4, 4, (300, 50, 12.5)), 16),
        (_analytic("vgg16", 64), _racks(2, 4, 8, (130, 12.5, 1.25)), 8),
        (_analytic("xlnet-large", 16), _racks(4, 8, 4, (130, 25, 6.25)), 16),
        # Two kinds of devices.
        (_analytic("bert-large", 8, "v100", "p100"), _mixed(8, 4, 12, 1.25), 8),
        (_analytic("resnet50", 64, "v100", "p100"), _mixed(8, 4, 12, 1.25), 8),
        # Memory that limits the microbatches in flight.
        (GPT24, _servers(8, 4, 100, 12.5, memory=11), 16),
        (_analytic("bert-large", 16), _servers(8, 4, 100, 12.5, memory=6), 16),
        # Slow links.
        (_analytic("vgg19", 64), _servers(8, 4, 12, 0.125), 8),
        (_analytic("xlnet-large", 16), _servers(16, 8, 25, 0.625), 16),
        (_analytic("bert-large", 16), _servers(8, 4, 12, 0.25), 64),
    )
)


def limit_seconds(devices: int) -> float:
    """20 s up to 128 devices, 40 s up to 256, 90 s above."""
    return 20.0 if devices <= 128 else 40.0 if devices <= 256 else 90.0


def tables(quick: bool) -> list[Table]:
    """Cost, bound, gap and seconds, before and after; the three smallest if ``quick``."""
    compile_kernels("auto")
    here = [one for one in INSTANCES if one.is_here]
    rows = tuple(_row(one, 0.1 if quick else 1.0) for one in (here[:3] if quick else here))
    gaps = [float(row[8]) for row in rows]
    columns = (
        "model", "devices, GB/s", "M", "SPP ms", "fill-and-drain ms", "gap %",
        "servers ms", "its bound ms", "its gap %", "SPP s", "servers s",
    )  # fmt: skip
    title = (
        "Split stages on servers: SPP and fill-and-drain, and the server-aware relaxation; its "
        f"gap {median(gaps):.2f} % in the median, at most {max(gaps):.2f} %"
    )
    return [Table("servers", title, columns, rows)]


def _row(instance: Instance, share: float) -> tuple[object, ...]:
    problem = PipelineProblem(instance.chain(), instance.cluster(), instance.microbatches)
    seconds = share * limit_seconds(len(problem.cluster))
    before, before_seconds = _timed(SPP, problem, seconds)
    after, after_seconds = _timed(SERVERS, problem, seconds)
    known = min((cost_of(problem, one) for one in (before, after) if one), default=np.inf)
    plain = fill_and_drain_bound(problem, known)
    bound = max(one.seconds for one in after.bounds) if after else plain
    return (
        instance.model, instance.links, instance.microbatches,
        *_shown(problem, before, plain), *_shown(problem, after, bound),
        f"{before_seconds:.1f}", f"{after_seconds:.1f}",
    )  # fmt: skip


def _shown(problem: PipelineProblem, answer: Proposal | None, bound: float) -> Iterator[str]:
    cost = cost_of(problem, answer) if answer else np.inf
    yield f"{1e3 * cost:.5g}"
    yield f"{1e3 * bound:.5g}"
    yield f"{100 * (1 - bound / cost):.2f}"


def _timed(
    planner: Planner, problem: PipelineProblem, seconds: float
) -> tuple[Proposal | None, float]:
    began = perf_counter()
    answer = planner.propose(problem, Choices(), Limits(seconds=seconds), silent)
    found = answer if isinstance(answer, Proposal) else None
    return found, perf_counter() - began
