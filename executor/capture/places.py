"""Where in a user's code an error was raised."""

import traceback


def line_of(error: BaseException) -> str:
    """File, line and source of the innermost frame that is not torch's or ours, after " at "."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/torch/" not in frame.filename
        and "/executor/" not in frame.filename
        and not frame.filename.startswith("<")
    ]
    if not frames:
        return ""
    return f" at {frames[-1].filename}:{frames[-1].lineno} ({frames[-1].line})"
