r"""PipeDream's ``graph.txt`` profiles (github.com/msr-fiddle/pipedream).

One line per node, ``node4 -- ReLU -- forward_compute_time=0.5, backward_compute_time=0.2,
activation_size=4096.0, parameter_size=0.0`` with milliseconds and bytes (a list of bytes where
the node has several outputs, ``[4096.0; 64.0]``), then one line per edge, ``\tnode4 -- node5``.
"""

import math
import os
import re
from dataclasses import dataclass
from pathlib import Path

import networkx as nx

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.chain import Chain
from stagewright.graphs.models.operators.opgraph import (
    Edge,
    Operator,
    OpGraph,
    find_cycle,
    linearise,
)

# Their outputs are views of their inputs: no further bytes are kept for the backward.
_VIEWS = ("ReLU(inplace", "View", "Size", "__getitem__")

_NODE = re.compile(
    r"(?P<id>\S+) -- (?P<description>.+) -- forward_compute_time=(?P<forward>[^,]*), "
    r"backward_compute_time=(?P<backward>[^,]*), activation_size=(?P<activation>[^,]*), "
    r"parameter_size=(?P<parameter>[^,]*)"
)
_EDGE = re.compile(r"(\S+) -- (\S+)")


@dataclass(frozen=True, slots=True)
class _Profile:
    """The nodes by id, the lines of nodes and edges, and the ids of the input nodes."""

    operators: dict[str, Operator]
    lines: dict[str, int]
    edges: dict[Edge, int]
    inputs: set[str]


def read_pipedream(
    path: str | os.PathLike[str],
    *,
    microbatch_size: int = 1,
    device_kind: str | None = None,
    name: str | None = None,
    contract: bool = False,
) -> Chain:
    """The chain of a PipeDream profile; see :func:`pipedream_graph` and ``linearise``."""
    graph = pipedream_graph(
        path, microbatch_size=microbatch_size, device_kind=device_kind, name=name
    )
    return linearise(graph, contract=contract)


def pipedream_graph(
    path: str | os.PathLike[str],
    *,
    microbatch_size: int = 1,
    device_kind: str | None = None,
    name: str | None = None,
) -> OpGraph:
    """The operators of a PipeDream profile, named ``<node id> <kind>``.

    Nodes of kind ``Input`` hold the time of loading data and are left out. Every other node keeps
    its output for the backward, except views. The optimizer is SGD with momentum, PipeDream's.
    Raises InputError in one line with file and line number. ``path``: the ``graph.txt``.
    ``microbatch_size``: the batch that was profiled; the file does not say. ``device_kind``: the
    kind of device that was profiled; by default any, since the file does not say. ``name``: name of
    the model; by default the file's name up to its first dot.
    """
    profile = _parse(path)
    _require_whole(path, profile)
    kept = [id_ for id_ in profile.operators if id_ not in profile.inputs]
    if not kept:
        raise InputError(f"{path}: no nodes but inputs")
    return OpGraph(
        name or Path(path).name.split(".")[0],
        f"measured: PipeDream profile {Path(path).name}; its batch is not given in the file and "
        f"taken as one microbatch of {microbatch_size}",
        tuple(profile.operators[id_] for id_ in kept),
        tuple(
            (profile.operators[before].name, profile.operators[after].name)
            for before, after in profile.edges
            if before not in profile.inputs and after not in profile.inputs
        ),
        microbatch_size,
        device_kind,
        optimizer_bytes_per_parameter_byte=1.0,
    )


def _parse(path: str | os.PathLike[str]) -> _Profile:
    profile = _Profile({}, {}, {}, set())
    for number, line in enumerate(documents.read_text(path).splitlines(), start=1):
        place = f"{path}:{number}"
        if not line.strip():
            continue
        if line[0].isspace():
            profile.edges[_parse_edge(line.strip(), place, profile)] = number
        else:
            id_ = _parse_node(line.strip(), place, profile)
            profile.lines[id_] = number
    if not profile.operators:
        raise InputError(f"{path}: no nodes; is this a PipeDream graph.txt?")
    return profile


def _parse_node(line: str, place: str, profile: _Profile) -> str:
    match = _NODE.fullmatch(line)
    if match is None:
        raise InputError(f"{place}: neither a node nor an indented edge: {line[:60]!r}")
    id_, kind = match["id"], match["description"].split("(")[0]
    if id_ in profile.operators:
        raise InputError(f"{place}: duplicate node {id_!r}")
    activation = _parse_sizes(match["activation"], f"{place}: activation_size")
    view = match["description"].startswith(_VIEWS)
    profile.operators[id_] = Operator(
        f"{id_} {kind}",
        _parse_amount(match["forward"], f"{place}: forward_compute_time") / 1e3,
        _parse_amount(match["backward"], f"{place}: backward_compute_time") / 1e3,
        _parse_amount(match["parameter"], f"{place}: parameter_size"),
        output_bytes=activation,
        saved_bytes=0.0 if view else activation,
    )
    if re.fullmatch(r"Input\d*", kind):
        profile.inputs.add(id_)
    return id_


def _parse_edge(line: str, place: str, profile: _Profile) -> Edge:
    match = _EDGE.fullmatch(line)
    if match is None:
        raise InputError(f"{place}: an edge is 'nodeA -- nodeB', found {line[:60]!r}")
    for id_ in match.groups():
        if id_ not in profile.operators:
            raise InputError(f"{place}: the edge names {id_!r}, which is not a node above it")
    return match[1], match[2]


def _parse_sizes(text: str, place: str) -> float:
    """The sum of ``4096.0`` or ``[4096.0; 64.0]``."""
    return sum(_parse_amount(part, place) for part in text.strip("[]").split(";"))


def _parse_amount(text: str, place: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise InputError(f"{place}: {text!r} is not a number") from None
    if not math.isfinite(value) or value < 0:
        raise InputError(f"{place} must be finite and not negative, got {text.strip()}")
    return value


def _require_whole(path: str | os.PathLike[str], profile: _Profile) -> None:
    """Refuse cycles, and a graph that is not connected: a sign of a truncated file."""
    cycle = find_cycle(profile.edges)
    if cycle:
        last = max(profile.edges[edge] for edge in zip(cycle, [*cycle[1:], cycle[0]], strict=True))
        nodes = " -> ".join([*cycle, cycle[0]])
        raise InputError(f"{path}:{last}: the edge closes a cycle: {nodes}")
    graph = nx.Graph(list(profile.edges))
    graph.add_nodes_from(profile.operators)
    first = next(iter(profile.operators))
    lost = profile.operators.keys() - nx.node_connected_component(graph, first)
    for id_ in sorted(lost, key=profile.lines.__getitem__):
        raise InputError(
            f"{path}:{profile.lines[id_]}: no edges connect node {id_!r} with {first!r}; "
            "is the file truncated?"
        )
