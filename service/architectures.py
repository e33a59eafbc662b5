"""Architectures of any model type: from the table of types, or else from transformers' module."""

import os
from dataclasses import replace
from importlib.util import find_spec

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.hf_config import (
    UnknownType,
    read_fields,
    read_hf_config,
    text_fields,
)
from stagewright.graphs.models.architecture import Architecture


def read_architecture(path: str | os.PathLike[str]) -> Architecture:
    """The architecture that a ``config.json`` describes, of any type that transformers builds.

    Raises InputError as of :func:`~stagewright.graphs.importers.hf_config.read_hf_config`; where
    transformers is not installed, or cannot tell a type, with that too.
    """
    try:
        return read_hf_config(path)
    except UnknownType as error:
        if find_spec("torch") is None or find_spec("transformers") is None:
            raise InputError(f"{error}; with transformers installed its module tells") from None
        unknown = error
    from stagewright.executor.capture.architectures import architecture_of_module

    values = read_fields(path)
    text = text_fields(values)
    try:
        found = architecture_of_module(text)
    except InputError as error:
        raise InputError(f"{unknown}; {error}") from None
    if text is values:
        return found
    return replace(found, left_out=f"what {values['model_type']} has beside its text model")
