"""The exception for bad input, and the warning about a result that differs from the expected."""


class InputError(ValueError):
    """Invalid input; the message is one line with the place and the remedy."""


class InvalidPlan(ValueError):  # noqa: N818 - the design's name
    """A plan that breaks a rule of its problem; the message names the first broken rule."""


class Notice(UserWarning):
    """Warning about a result that was computed in an unexpected way; commands print one line."""
