"""Published partition problems: the files of dnn-partitioning and of Piper, told apart."""

import json
import os

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.dnn_partitioning import Workload, read_workload
from stagewright.graphs.importers.piper import PiperWorkload, read_piper


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
