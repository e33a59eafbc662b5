"""Training runs that people have: launch files of frameworks, read back to model and layout."""

import os
from pathlib import Path

from stagewright.executor.export.layouts.megatron import FILE as MEGATRON
from stagewright.executor.export.layouts.torchtitan import FILE as TORCHTITAN
from stagewright.executor.export.runs.arguments import TrainingRun
from stagewright.executor.export.runs.megatron import read_megatron
from stagewright.executor.export.runs.torchtitan import read_torchtitan
from stagewright.graphs.documents import documents


def read_run(path: str | os.PathLike[str], gpus: int | None = None) -> TrainingRun:
    """The run of a file: TorchTitan's if it is TOML or Python, else a script for Megatron-LM.

    A folder that ``export`` wrote is as good as the file in it. ``gpus`` is the number of devices
    where the file does not say it, or another is meant. Raises InputError in one line that names
    the file and the argument or field.
    """
    inside = map(Path(path).joinpath, (MEGATRON, TORCHTITAN))
    place = os.fspath(next((one for one in inside if one.is_file()), path))
    read = read_torchtitan if place.endswith((".toml", ".py")) else read_megatron
    return read(documents.read_text(place), place, gpus)
