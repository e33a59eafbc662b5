"""The error that bad input raises."""


class InputError(ValueError):
    """Invalid input; the message is one line with the place and the remedy."""


class InvalidPlan(ValueError):  # noqa: N818 - the design's name
    """A plan that breaks a rule of its problem; the message names the first broken rule."""
