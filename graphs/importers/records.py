"""Records of the JSON files of other projects; fields that are for their own use are ignored."""

import os
from typing import Annotated, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError

Amount = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class PlainRecord(BaseModel):
    """A record whose fields are named as here."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class CamelRecord(BaseModel):
    """A record whose fields are named in camel case."""

    model_config = ConfigDict(alias_generator=to_camel, extra="ignore", frozen=True)


Read = TypeVar("Read", bound=BaseModel)


def read_record(kind: type[Read], path: str | os.PathLike[str]) -> Read:
    """A file as it is written. Raises InputError in one line with the file and the field."""
    try:
        return kind.model_validate_json(documents.read_text(path))
    except ValidationError as error:
        raise InputError(f"{path}: {documents.first_problem(error)}") from None
