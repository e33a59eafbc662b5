"""The requirements of exports on a plan, as a restriction that planners respect."""

from collections.abc import Mapping

from stagewright.executor.export import deepspeed, megatron, torch_pipelining
from stagewright.executor.export.megatron import modules
from stagewright.formulations.plans.plan_class import Shards
from stagewright.formulations.schedules.runtimes import ANY_ORDER, Runtime, torch_runtime
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.chain import Chain

_NAMES: dict[str, tuple[str, Mapping[str, str]]] = {
    "torchtitan": ("torchtitan", torch_pipelining.TORCHTITAN),
    "nemo": ("NeMo AutoModel", torch_pipelining.NEMO),
    "megatron": (megatron.NAME, megatron.SYMBOLS),
}
_ZERO_1: tuple[Shards, ...] = ("none", "optimizer")
RUNTIMES = ("torch-csv", *_NAMES, "deepspeed")


def runtime_of(to: str, chain: Chain) -> Runtime:
    """The runtime behind the export ``to``, for the layers of ``chain``.

    Raises InputError if there is none, or the framework does not know the layers.
    """
    if to not in RUNTIMES:
        known = ", ".join(RUNTIMES)
        raise InputError(f"--for {to!r}: no framework of that name runs plans; there are {known}")
    if to == "torch-csv":
        return torch_runtime(len(chain))
    if to == "deepspeed":
        every = tuple(range(1, len(chain)))
        return Runtime(deepspeed.NAME, ("1f1b",), every, ("none", "full", "layer"), _ZERO_1)
    name, names = _NAMES[to]
    cuts = _cuts(chain, names, name)
    if to == "megatron":
        return Runtime(name, ("1f1b", "interleaved"), cuts, shards=_ZERO_1)
    if to == "nemo":
        return Runtime(
            name, ANY_ORDER, cuts, any_order=True, least_ranks=2, most_replicas=1, fills=True
        )
    shards: tuple[Shards, ...] = ("none", "weights")
    return Runtime(name, ANY_ORDER, cuts, shards=shards, any_order=True, least_ranks=2)


def _cuts(chain: Chain, names: Mapping[str, str], framework: str) -> tuple[int, ...]:
    """The layers before which a stage may begin: where a module of the framework does."""
    layers = [layer.name for layer in chain.layers]
    modules([layers], names, framework)  # refuses what no cut would mend
    return tuple(
        at for at in range(1, len(layers)) if _accepts([layers[:at], layers[at:]], names, framework)
    )


def _accepts(stages: list[list[str]], names: Mapping[str, str], framework: str) -> bool:
    try:
        modules(stages, names, framework)
    except InputError:
        return False
    return True
