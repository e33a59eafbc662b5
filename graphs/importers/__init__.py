"""Readers of other projects' profiles."""

from stagewright.graphs.importers.dnn_partitioning import (
    dnn_partitioning_graph,
    read_dnn_partitioning,
)
from stagewright.graphs.importers.hf_config import read_hf_config
from stagewright.graphs.importers.pipedream import pipedream_graph, read_pipedream

__all__ = [
    "dnn_partitioning_graph",
    "pipedream_graph",
    "read_dnn_partitioning",
    "read_hf_config",
    "read_pipedream",
]
