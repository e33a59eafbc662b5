"""The error that bad input raises."""


class InputError(ValueError):
    """Input that is refused where it enters; the message is one line that names place and cure."""


class InvalidPlan(ValueError):  # noqa: N818 - the design's name
    """A plan that breaks a rule of its problem; the message names the first broken rule."""
