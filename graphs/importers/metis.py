"""Layer profiles of Metis (Um et al., USENIX ATC 2024; code SamsungLabs/Metis).

A folder has a JSON file ``DeviceType.KIND_tpT_bsB.json`` for every kind of device, tensor degree T
and microbatch of B samples. Of a layer it has the forward and the backward together; the
optimizer's step is that of the whole model.
"""

import os
import re
from pathlib import Path
from typing import Annotated

from pydantic import Field

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.importers.dnn_partitioning import Amount, PlainRecord, read_record
from stagewright.graphs.models.layer_profiles import LayerProfiles, Measured

_FORWARD_SHARE = 1 / 3
"""A backward of matrix products takes twice the forward's time."""

_NAME = re.compile(r"DeviceType\.(?P<kind>.+)_tp(?P<tensor>[1-9]\d{0,5})_bs(?P<size>[1-9]\d{0,5})")
_MILLISECOND = 1e-3


class _Parameters(PlainRecord):
    parameters_per_layer_bytes: Annotated[list[Amount], Field(min_length=1)]


class _MetisModel(PlainRecord):
    model_name: str
    parameters: _Parameters


class _Times(PlainRecord):
    optimizer_time_ms: Amount
    layer_compute_total_ms: Annotated[list[Amount], Field(min_length=1)]


class _File(PlainRecord):
    model: _MetisModel
    execution_time: _Times


def read_metis(folder: str | os.PathLike[str]) -> LayerProfiles:
    """The profiles of a model.

    A share of a layer's time is taken as its forward, which the files do not tell; the optimizer's
    step is divided among the layers by their parameters. The source states both. Raises InputError
    in one line with the file and the field.
    """
    path = Path(documents.file_name(folder))
    files = sorted(path.glob("*.json")) if path.is_dir() else [path]
    if not files:
        raise InputError(f"{path}: no DeviceType.KIND_tpT_bsB.json in this folder")
    read = {file: _read(file) for file in files}
    measured = [_measured(file, found) for file, found in read.items()]
    model = read[files[0]].model.model_name
    source = (
        f"measured: Metis profiles of {model}; the forward is taken as {_FORWARD_SHARE:.3g} of a "
        "layer's time, the optimizer's step divided by parameters"
    )
    with naming(folder):
        return LayerProfiles(model, source, tuple(measured))


def _read(file: Path) -> _File:
    found = read_record(_File, file)
    layers = len(found.execution_time.layer_compute_total_ms)
    given = len(found.model.parameters.parameters_per_layer_bytes)
    if given != layers:
        raise InputError(
            f"{file}: parameters_per_layer_bytes has {given} layers, layer_compute_total_ms "
            f"{layers}"
        )
    return found


def _measured(file: Path, found: _File) -> Measured:
    match = _NAME.fullmatch(file.stem)
    if match is None:
        raise InputError(f"{file}: the name must be DeviceType.KIND_tpT_bsB.json")
    times = [each * _MILLISECOND for each in found.execution_time.layer_compute_total_ms]
    parameters = found.model.parameters.parameters_per_layer_bytes
    step = found.execution_time.optimizer_time_ms * _MILLISECOND / (sum(parameters) or 1.0)
    with naming(file):
        return Measured(
            match["kind"],
            int(match["size"]),
            int(match["tensor"]),
            tuple(_FORWARD_SHARE * each for each in times),
            tuple((1 - _FORWARD_SHARE) * each for each in times),
            tuple(step * each for each in parameters),
        )
