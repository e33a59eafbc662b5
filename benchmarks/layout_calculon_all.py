"""The best execution of all that Calculon knows, by its own evaluator, with a proof.

Executions that differ in networks, overlap, gathering again and offloading alone are one group. No
execution of a group takes less per sample than one that sends and offloads in no time, has memories
without end, offloads nothing and gathers nothing again, with tensor exchanges overlapped in a ring
or not at all: in Calculon's formulas every part of the time grows with those of the networks and of
offloading, what is exposed of a data exchange is never negative, and overlap ``pipe`` takes what
``ring`` does and one part more. Groups are evaluated by that bound until none is below the best.
"""

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from benchmarks.layout_calculon import PLAIN, Execution, Peer, package, seconds

_LAST_NETWORK = {"tensor_par_net": 1, "pipeline_par_net": 1, "data_par_net": 1}


@dataclass(frozen=True, slots=True)
class Best:
    """Samples/s of the best execution; nothing is better. ``evaluated`` includes the bounds."""

    samples_per_second: float
    execution: Execution
    evaluated: int
    seconds: float


def best_of_all(of: Peer) -> Best:
    """The best of Calculon's whole space."""
    started, evaluated = time.perf_counter(), 0
    bounds = []
    for group in _groups(of):
        own = [of.evaluate(one, "all") for one in _fastest(group)]
        evaluated += len(own)
        bounds.append((min(map(seconds, filter(None, own))) / group["batch_size"], group))
    bounds.sort(key=lambda one: one[0])
    least, best = float("inf"), None
    for bound, group in bounds:
        if bound >= least:
            break
        for execution in _members(group):
            evaluated += 1
            found = of.evaluate(execution)
            if found is not None and seconds(found) / group["batch_size"] < least:
                least, best = seconds(found) / group["batch_size"], execution
    assert best is not None
    return Best(1 / least, best, evaluated, time.perf_counter() - started)


def _groups(of: Peer) -> Iterator[Execution]:
    """As its search makes its tasks, for every size of microbatch."""
    llm, app = package().Llm, of.application
    for t in llm.get_all_tensor_parallelisms(of.gpus, app.hidden, app.attn_heads):
        for p in llm.get_all_pipeline_parallelisms(of.gpus, t, app.num_blocks):
            d = of.gpus // (t * p)
            batch = of.batch // d * d
            if batch == 0:
                continue
            dimensions = {
                "pipeline_interleaving": llm.get_valid_pipeline_interleavings(app.num_blocks, p),
                "microbatch_size": llm.get_valid_microbatch_sizes(app.seq_size, t, d, batch, p),
                "activation_recompute": ("full", "attn_only", "none"),
                "optimizer_sharding": (True, False) if d > 1 else (False,),
                "tensor_par_comm_type": ("ar", "p2p_rs_ag", "rs_ag"),
            }
            degrees = {"tensor_par": t, "pipeline_par": p, "data_par": d, "batch_size": batch}
            for values in itertools.product(*dimensions.values()):
                own = dict(zip(dimensions, values, strict=True))
                yield PLAIN | {"num_procs": of.gpus, "seq_par_ag_redo": False} | degrees | own


def _fastest(group: Execution) -> Iterator[Execution]:
    for overlap in ("none", "ring")[: 1 + (group["tensor_par"] > 1)]:
        yield group | _LAST_NETWORK | {"tensor_par_overlap": overlap}


def _members(group: Execution) -> Iterator[Execution]:
    """The executions of a group, as its search has them."""
    kinds = group["tensor_par_comm_type"], group["activation_recompute"]
    several = {name: group[f"{name}_par"] > 1 for name in ("tensor", "pipeline", "data")}
    either = (False, True)
    choices: dict[str, tuple[Any, ...]] = {
        f"{name}_par_net": (0, 1)[: 1 + many] for name, many in several.items()
    }
    choices |= {
        "seq_par_ag_redo": either[: 1 + package().Llm.can_redo_ag(*kinds)],
        "data_par_overlap": either[: 1 + several["data"]],
        "tensor_par_overlap": ("none", "ring", "pipe")[: 1 + 2 * several["tensor"]],
        "weight_offload": either,
        "activations_offload": either[: 1 + (group["activation_recompute"] != "full")],
        "optimizer_offload": either,
    }
    for values in itertools.product(*choices.values()):
        yield group | dict(zip(choices, values, strict=True))
