"""Layer profiles of Sailor (Strati et al., SOSP 2025; code eth-easl/sailor).

A JSON file per kind of device, ``KIND.json`` or ``KIND/profile.json``, maps microbatch size to
tensor degree to layer (counted from 0) to the seconds of forward, backward and optimizer's step.
"""

import os
from pathlib import Path
from typing import Annotated

from pydantic import Field, TypeAdapter, ValidationError

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError, naming
from stagewright.graphs.models.layer_profiles import LayerProfiles, Measured

_Count = Annotated[int, Field(ge=1)]
_Layer = Annotated[int, Field(ge=0)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Times = tuple[_Seconds, _Seconds, _Seconds]
_FILE: TypeAdapter[dict[_Count, dict[_Count, dict[_Layer, _Times]]]] = TypeAdapter(
    dict[_Count, dict[_Count, dict[_Layer, _Times]]]
)
_NESTED = "profile.json"


def read_sailor(path: str | os.PathLike[str], *, device_kind: str | None = None) -> LayerProfiles:
    """The profiles of a model: one file, or a folder with a file for every kind of device.

    Raises InputError in one line with the file and the place in it. ``device_kind``: the kind that
    a single file was measured on; by default what its name says. The files do not hold parameters
    and activations of the layers.
    """
    files = _files(Path(documents.file_name(path)))
    if device_kind is not None and len(files) > 1:
        raise InputError(f"{path}: a folder's files name their kinds; device_kind is for one file")
    measured = [one for file in files for one in _read(file, device_kind or _kind_of(file))]
    model = _model_of(files[0])
    source = f"measured: Sailor profiles of {model}"
    with naming(path):
        return LayerProfiles(model, source, tuple(measured))


def _files(path: Path) -> list[Path]:
    if not path.is_dir():
        return [path]
    found = sorted([*path.glob("*.json"), *path.glob(f"*/{_NESTED}")])
    if not found:
        raise InputError(f"{path}: no KIND.json and no KIND/{_NESTED} in this folder")
    return found


def _kind_of(file: Path) -> str:
    return file.parent.name if file.name == _NESTED else file.stem


def _model_of(file: Path) -> str:
    parents = file.resolve().parents
    return (parents[1] if file.name == _NESTED else parents[0]).name


def _read(file: Path, kind: str) -> list[Measured]:
    try:
        table = _FILE.validate_json(documents.read_text(file))
    except ValidationError as error:
        raise InputError(f"{file}: {documents.first_problem(error)}") from None
    if not any(table.values()):
        raise InputError(f"{file}: no measurements")
    return [
        _measured(f"{file}: {size}.{tensor}", kind, size, tensor, layers)
        for size, degrees in sorted(table.items())
        for tensor, layers in sorted(degrees.items())
    ]


def _measured(place: str, kind: str, size: int, tensor: int, layers: dict[int, _Times]) -> Measured:
    missing = next((i for i in range(len(layers)) if i not in layers), None)
    if not layers or missing is not None:
        raise InputError(f"{place}: layer {missing or 0} is missing; layers are counted from 0")
    rows = [layers[i] for i in range(len(layers))]
    forward, backward, update = zip(*rows, strict=True)
    with naming(place):
        return Measured(kind, size, tensor, forward, backward, update)
