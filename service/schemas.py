"""JSON Schemas of the documents, from the types that read them."""

from typing import Any

from pydantic import TypeAdapter

from stagewright.executor.clusters.report import ClusterReport
from stagewright.executor.programs.trace import Trace
from stagewright.formulations.clusters.allocation_plan import AllocationPlan
from stagewright.formulations.clusters.round_document import ClusterRound
from stagewright.formulations.operators.plan import OperatorPlan
from stagewright.formulations.parallelism.document import LayoutPlan
from stagewright.formulations.parallelism.profiles.document import ProfiledDocument
from stagewright.formulations.parallelism.trials import Tuning
from stagewright.formulations.plans.plan import PipelinePlan
from stagewright.graphs.documents.documents import format_name
from stagewright.graphs.importers.timed_layers import TimedLayers
from stagewright.graphs.machines.cluster import Cluster
from stagewright.graphs.machines.devices import Accelerator
from stagewright.graphs.machines.rates import RateSet
from stagewright.graphs.models.chain import Chain
from stagewright.graphs.models.layer_profiles import LayerProfiles
from stagewright.graphs.models.operators.cost_book import CostBook
from stagewright.graphs.models.operators.step_graph import StepGraph
from stagewright.graphs.workloads.jobs import Workload
from stagewright.graphs.workloads.pool import Pool
from stagewright.graphs.workloads.prices import Market

_DIALECT = "https://json-schema.org/draft/2020-12/schema"

DOCUMENTS: dict[str, type] = {
    format_name(kind).removeprefix("stagewright-"): kind
    for kind in (
        Chain, Cluster, Accelerator, RateSet, TimedLayers, PipelinePlan, Trace, LayoutPlan, Tuning,
        LayerProfiles, ProfiledDocument, StepGraph, OperatorPlan, CostBook, Workload, Pool,
        AllocationPlan, ClusterRound, ClusterReport, Market,
    )
}  # fmt: skip
"""The type of every document, by what follows ``stagewright-`` in its ``format``."""


def json_schema(name: str) -> dict[str, Any]:
    """The JSON Schema of the documents whose ``format`` is ``stagewright-NAME``.

    It states fields, types and ranges; rules between fields (unique names, sums) are checked
    when a document is read.
    """
    schema = TypeAdapter(DOCUMENTS[name]).json_schema()
    # Defaults in Python, but every file has to say them.
    schema["required"] = sorted({*schema.get("required", ()), "format", "version"})
    return {"$schema": _DIALECT, **schema, "title": f"stagewright-{name}"}
