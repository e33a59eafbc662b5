"""The errors that bad input raises, and the warning of what a result is not."""


class InputError(ValueError):
    """Invalid input; the message is one line with the place and the remedy."""


class InvalidPlan(ValueError):  # noqa: N818 - the design's name
    """A plan that breaks a rule of its problem; the message names the first broken rule."""


class Notice(UserWarning):
    """What is computed otherwise than one may expect; commands print it as one line."""
