"""Colours of actions, for light and dark backgrounds.

Any two of a set differ for every kind of colour vision: by at least 20 units of CIELAB, also as
seen without one of the three cones (Machado, Oliveira and Fernandes 2009).
"""

from stagewright.formulations.plans.actions import ActionKind

KIND_NAMES = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUT_GRADIENT: "input gradient",
    ActionKind.WEIGHT_GRADIENT: "weight gradient",
    ActionKind.SEND_FORWARD: "activations sent",
    ActionKind.SEND_BACKWARD: "gradients sent",
    ActionKind.REDUCE: "all-reduce",
    ActionKind.UPDATE: "optimizer step",
}
KIND_COLOURS = {
    ActionKind.FORWARD: "#3f7ff0",
    ActionKind.BACKWARD: "#0d5743",
    ActionKind.INPUT_GRADIENT: "#2d1147",
    ActionKind.WEIGHT_GRADIENT: "#9a46a2",
    ActionKind.SEND_FORWARD: "#dcbd3a",
    ActionKind.SEND_BACKWARD: "#b9550c",
    ActionKind.REDUCE: "#f08fc2",
    ActionKind.UPDATE: "#888c70",
}
DARK_COLOURS = {
    ActionKind.FORWARD: "#5ab4fb",
    ActionKind.BACKWARD: "#18845e",
    ActionKind.INPUT_GRADIENT: "#c9f7c4",
    ActionKind.WEIGHT_GRADIENT: "#a452f5",
    ActionKind.SEND_FORWARD: "#ece95a",
    ActionKind.SEND_BACKWARD: "#dc7632",
    ActionKind.REDUCE: "#f5a6c9",
    ActionKind.UPDATE: "#6c6a8e",
}
# Of anything else that differs, as jobs and kinds of devices; after Okabe and Ito.
CATEGORIES = (
    "#194ab3", "#e79228", "#1e9b64", "#a45d98", "#3fd3fb", "#ad360c", "#fbe72a", "#493937",
)  # fmt: skip
CRITICAL_COLOUR = "#c4002f"  # the critical path, proved bounds, and limits
BAND_COLOUR = "#e4ebf4"  # background of the named period
IDLE_COLOUR = "#b9c2cd"


def label_colour(colour: str) -> str:
    """White or a dark colour for text on ``colour``, whichever is easier to read."""
    red, green, blue = _parts(colour)
    is_light = 0.2126 * red + 0.7152 * green + 0.0722 * blue > 0.55 * 255
    return "#10161d" if is_light else "#ffffff"


def mixed(colour: str, other: str, share: float) -> str:
    """``colour`` with a ``share`` of another."""
    parts = zip(_parts(colour), _parts(other), strict=True)
    return "#" + "".join(f"{round(one + (two - one) * share):02x}" for one, two in parts)


def _parts(colour: str) -> tuple[int, int, int]:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return red, green, blue


MEMORY_COLOURS = {
    "weights": "#194ab3",
    "gradients": "#3fd3fb",
    "optimizer": "#e79228",
    "activations": "#1e9b64",
    "buffers": "#fbe72a",
    "reserve": "#bcbcbc",
}
"""Of what a rank's memory holds, from the bottom of a bar on."""
