"""Workloads of Piper (Tarnawski, Narayanan, Phanishayee, NeurIPS 2021; code msr-fiddle/piper).

A JSON file holds a graph of layers and, for every layer and degree of tensor parallelism, the
configurations ("TMPCs") that were measured or estimated.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

from pydantic import Field, model_validator

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.importers.dnn_partitioning import (
    Amount,
    CamelRecord,
    Workload,
    read_record,
    read_workload,
    require_nodes,
)
from stagewright.graphs.models.chain import Chain
from stagewright.graphs.models.operators.opgraph import Operator, OpGraph, linearise

PLAIN, RECOMPUTED = "vanilla", "activation recomp"

_Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class PiperConfiguration(CamelRecord):
    """A way to run a layer on t devices; seconds per sample, bytes on each device.

    ``sync_time_fw`` and ``sync_time_bw``: bytes, despite the name, by the id of the layer that the
    tensor comes from and goes to.
    """

    id: str
    time_per_sample: Amount
    parameter_size: Amount
    memory_usage_a: Amount = Field(alias="memoryUsageA")
    memory_usage_b: Amount = Field(alias="memoryUsageB")
    sync_time_fw: dict[int, Amount]
    sync_time_bw: dict[int, Amount]


class PiperNode(CamelRecord):
    """A layer with its configurations by degree of tensor parallelism."""

    id: int
    name: str = ""
    configurations: dict[Annotated[int, Field(ge=1)], list[PiperConfiguration]] = Field(
        alias="TMPCs"
    )


class PiperEdge(CamelRecord):
    """The bytes of a sample that go from one layer to another."""

    source_id: int
    dest_id: int
    communication_cost: Amount


class PiperWorkload(CamelRecord):
    """Layers and edges, and the devices and the batch they were published with."""

    nodes: list[PiperNode]
    edges: list[PiperEdge]
    max_devices: Annotated[int, Field(ge=1)]
    max_memory_per_device: _Positive
    bandwidth: _Positive
    samples_in_batch: Annotated[int, Field(ge=1)] = Field(alias="mbsInBatch")

    @model_validator(mode="after")
    def _require_graph(self) -> Self:
        require_nodes([node.id for node in self.nodes], self.edges)
        pairs = Counter((edge.source_id, edge.dest_id) for edge in self.edges)
        for i, edge in enumerate(self.edges):
            if pairs[edge.source_id, edge.dest_id] > 1:
                raise InputError(f"edges[{i}] appears twice")
        for node in self.nodes:
            _require_sync(node, set(pairs))
        return self

    def labels(self) -> dict[int, str]:
        """A unique name for every layer, by id: the layer's name if no other layer has it."""
        names = Counter(node.name for node in self.nodes)
        return {
            node.id: node.name if node.name and names[node.name] == 1 else f"{node.name}#{node.id}"
            for node in self.nodes
        }


def read_piper_chain(
    path: str | os.PathLike[str],
    *,
    microbatch_size: int = 1,
    device_kind: str | None = None,
    name: str | None = None,
    contract: bool = False,
) -> Chain:
    """The chain of a workload, every layer on one device; see ``linearise``.

    A file states the time of forward and backward together, and that with recomputation, which is a
    forward longer: forward and backward are told apart by it. Raises InputError in one line with
    the file and the field, node or edge; a layer that is not given for one device with and without
    recomputation. ``path``: the JSON file. ``microbatch_size``: what the file calls a sample.
    ``device_kind``: the kind of device that was measured; by default any, since the file does not
    say. ``name``: name of the model; by default the file's name without its suffix.
    """
    workload = read_piper(path)
    labels = workload.labels()
    with naming(path):
        graph = OpGraph(
            name or Path(path).name.removesuffix(".json"),
            f"measured: Piper workload {Path(path).name}; one sample of it is taken as one "
            f"microbatch of {microbatch_size}",
            tuple(_operators(workload, labels)),
            tuple((labels[edge.source_id], labels[edge.dest_id]) for edge in workload.edges),
            microbatch_size,
            device_kind,
        )
    return linearise(graph, contract=contract)


def _operators(workload: PiperWorkload, labels: dict[int, str]) -> Iterator[Operator]:
    sent = dict.fromkeys(labels, 0.0)
    for edge in workload.edges:
        sent[edge.source_id] = max(sent[edge.source_id], edge.communication_cost)
    for node in workload.nodes:
        ways = {way.id: way for way in node.configurations.get(1, ())}
        if not {PLAIN, RECOMPUTED} <= ways.keys():
            raise InputError(
                f"node {node.id}: TMPCs[1] must have {PLAIN!r} and {RECOMPUTED!r}, whose times "
                "tell the forward from the backward"
            )
        whole = ways[PLAIN].time_per_sample
        forward = ways[RECOMPUTED].time_per_sample - whole
        if not 0 <= forward <= whole:
            raise InputError(
                f"node {node.id}: {RECOMPUTED!r} takes {forward:g} s longer than {PLAIN!r}, which "
                f"is no forward of {whole:g} s"
            )
        yield Operator(
            labels[node.id],
            forward,
            whole - forward,
            ways[PLAIN].parameter_size,
            sent[node.id],
            ways[PLAIN].memory_usage_a,
        )


def read_piper(path: str | os.PathLike[str]) -> PiperWorkload:
    """The workload as it is written.

    Raises InputError in one line with the file and the field, node or edge.
    """
    return read_record(PiperWorkload, path)


def _require_sync(node: PiperNode, pairs: set[tuple[int, int]]) -> None:
    """Every configuration must state the bytes of exactly the edges of its layer."""
    sources = {a for a, b in pairs if b == node.id}
    targets = {b for a, b in pairs if a == node.id}
    for degree, ways in node.configurations.items():
        for way in ways:
            if way.sync_time_fw.keys() != sources or way.sync_time_bw.keys() != targets:
                raise InputError(
                    f"node {node.id}, TMPCs[{degree}], {way.id!r}: syncTimeFw must have "
                    f"the sources {sorted(sources)}, syncTimeBw the targets {sorted(targets)}"
                )


def load_partition_problem(path: str | os.PathLike[str]) -> Workload | PiperWorkload:
    """The workload in a file of either project.

    Raises
    ------
    InputError
        One line with the file and what is wrong in it.
    """
    text = documents.read_text(path)
    try:
        found = json.loads(text)
    except ValueError as error:
        raise InputError(f"{path}: no JSON: {error}") from None
    names = found.keys() if isinstance(found, dict) else set()
    if "maxFPGAs" in names:
        return read_workload(path)
    if "mbsInBatch" in names:
        return read_piper(path)
    raise InputError(
        f"{path}: neither a workload of dnn-partitioning (maxFPGAs) nor one of Piper (mbsInBatch)"
    )
