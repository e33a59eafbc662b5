"""The ``config.json`` of a model: in its folder, or by its name on the Hugging Face Hub."""

import importlib
import os
import re
from pathlib import Path

from stagewright.graphs.documents.errors import InputError

_NAME = re.compile(r"[\w.-]+/[\w.-]+")
FILE, PARAMS = "config.json", "params.json"
PARTS = (FILE, f"transformer/{FILE}", PARAMS)
"""The configuration of a model, of a pipeline of diffusers that holds one, and of Meta's."""


def is_hub_name(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is no file, and may be the name of a model: ``OWNER/NAME``."""
    text = os.fspath(path)
    named = _NAME.fullmatch(text) is not None and not text.endswith(".json")
    return named and not Path(text).exists()


def is_model(path: str | os.PathLike[str]) -> bool:
    """Whether ``path`` is a model's folder, or file of Meta's, or may be the name of a model."""
    file = os.path.basename(path) == PARAMS
    return is_hub_name(path) or file or os.path.isfile(_in_folder(path))


def _in_folder(path: str | os.PathLike[str]) -> str:
    """The configuration in a folder."""
    every = [os.path.join(path, one) for one in PARTS]
    return next(filter(os.path.isfile, every), every[-1])


def config_file(path: str | os.PathLike[str]) -> str | os.PathLike[str]:
    """The configuration that ``path`` means: the file, that in the folder, or of the model."""
    if is_hub_name(path):
        return hub_config(os.fspath(path))
    return _in_folder(path) if os.path.isdir(path) and is_model(path) else path


def hub_config(name: str) -> Path:
    """The configuration of a model, from the local cache or downloaded by ``huggingface_hub``.

    Raises InputError if ``huggingface_hub`` is not installed, or has no such configuration: no such
    model or file, no network, or no permission.
    """
    try:
        hub, errors = map(importlib.import_module, ("huggingface_hub", "huggingface_hub.errors"))
    except ImportError:
        raise InputError(
            f"{name}: no such file; to look up a model by its name: pip install huggingface_hub, "
            f"or give its {FILE}"
        ) from None
    try:
        try:
            return Path(hub.hf_hub_download(name, FILE))
        except errors.EntryNotFoundError:
            return Path(hub.hf_hub_download(name, PARTS[1]))
    except (OSError, ValueError, errors.EntryNotFoundError) as error:
        reason = " ".join(str(error).split())
        raise InputError(
            f"{name}: huggingface_hub has no {FILE} of a model of that name ({type(error).__name__}"
            f": {reason[:200]})"
        ) from None
