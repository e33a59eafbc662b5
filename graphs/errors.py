"""The error that bad input raises."""


class InputError(ValueError):
    """Input that is refused where it enters; the message is one line that names place and cure."""
