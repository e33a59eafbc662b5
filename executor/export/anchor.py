"""The script that times a model's layers on one server, those of a stack where it is installed."""

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pprint import pformat

from stagewright.executor.export.layouts.rules import described
from stagewright.graphs.documents.documents import to_json
from stagewright.graphs.machines.anchors import TimedModel
from stagewright.graphs.machines.rates import RateSet
from stagewright.graphs.models.shards import LayerKind


def anchor_script(
    model: TimedModel,
    rates: RateSet,
    stack: str,
    degrees: Mapping[LayerKind, Sequence[tuple[int, int, bool]]],
    samples: Sequence[int],
    gradient_bytes: int = 4,
) -> str:
    """The text of the script for the degrees of every kind of layer and numbers of samples.

    ``rates`` and ``stack`` are passed on to what the script writes; ``gradient_bytes`` are of a
    weight's gradient, summed over microbatches.
    """
    case = {
        "model": json.loads(to_json(model)),
        "rates": json.loads(to_json(rates)),
        "stack": stack,
        "degrees": {kind: [list(one) for one in of] for kind, of in degrees.items()},
        "samples": list(samples),
        "gradient_bytes": gradient_bytes,
    }
    timed = None if stack == "plan" else described(stack).get("timed")
    layers = "" if timed is None else _template(f"anchor_{timed}")
    script = _template("anchor").replace('"STACK"\n', layers)
    return script.replace('"CASE"', pformat(case, width=100, sort_dicts=False))


def _template(name: str) -> str:
    folder = files("stagewright.executor.export") / "templates"
    return (folder / f"{name}.py.txt").read_text(encoding="utf-8")
