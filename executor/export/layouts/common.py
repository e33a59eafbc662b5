"""Parts of layout formats: number types, nodes, the text of Python files, and timing scripts."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pprint import pformat
from typing import Literal, TypeAlias

from stagewright.executor.export.layouts.rules import described
from stagewright.executor.export.options import filled
from stagewright.formulations.parallelism.layout import Layout
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.documents import to_json
from stagewright.graphs.machines.anchors import TimedModel
from stagewright.graphs.machines.rates import RateSet
from stagewright.graphs.models.architecture import Architecture, GroupedAttention, LatentAttention
from stagewright.graphs.models.shards import LayerKind

Fields: TypeAlias = dict[str, object]
NumberType = Literal["bf16", "fp16", "fp32"]


@dataclass(frozen=True, slots=True)
class Code:
    """An expression of Python, written as it is."""

    text: str

    def __repr__(self) -> str:
        return self.text


def number_type(problem: TrainingProblem) -> NumberType:
    """The type of activations and products; bf16 where the device has it."""
    if problem.precision.activation_bytes == 4:
        return "fp32"
    return "bf16" if problem.card.has_bf16 else "fp16"


def nodes(problem: TrainingProblem) -> tuple[int, int]:
    """Servers, and devices of each."""
    each = problem.fabric.levels[0].devices
    return problem.fabric.devices // each, each


def launch(problem: TrainingProblem) -> str:
    """The beginning of the command that starts all ranks."""
    count, each = nodes(problem)
    return f"torchrun --nnodes={count} --nproc-per-node={each}"


def head(problem: TrainingProblem, layout: Layout, framework: str) -> str:
    """Comments that begin a file: the layout, its launch, and what the plan lacks."""
    return comment(
        f"The layout {str(layout)!r} that Stagewright chose, for {framework},",
        f"on {layout.ranks} ranks: {launch(problem)} ...",
        *left_out(problem),
    )


def checkpointing(layout: Layout) -> str:
    """The line of a function that repeats the layers of ``model`` in the backward."""
    return "    model.gradient_checkpointing_enable()\n" if layout.recompute == "full" else ""


def of_transformers(
    template: str, problem: TrainingProblem, layout: Layout, remarks: Iterable[str], **more: object
) -> str:
    """The text of a Python file that trains a model of transformers, with ``more`` values."""
    return filled(
        template,
        words=layout,
        ranks=layout.ranks,
        launch=launch(problem),
        sequence=problem.sequence,
        compared=compared("model.config", sizes_of(problem.architecture)),
        checkpointing=checkpointing(layout),
        remarks="".join(f"\n{line}" for line in remarks),
        **more,
    )


def comment(*lines: str) -> str:
    """Lines of a comment of bash or YAML; none of ``lines`` may have a line break."""
    return "".join(f"# {line}".rstrip() + "\n" for line in lines)


def left_out(problem: TrainingProblem) -> tuple[str, ...]:
    """Remarks on features that the planned model lacks, and on what the script has to set."""
    found = []
    if problem.architecture.left_out is not None:
        found.append(f"The plan has not counted: {problem.architecture.left_out!r}.")
    if problem.precision.tf32_products:
        found.append("Products are planned in TF32: set torch.backends.cuda.matmul.allow_tf32.")
    return tuple(found)


def assignments(target: str, fields: Fields) -> str:
    """Lines of a function's body that set attributes of ``target``."""
    return "".join(f"    {target}.{name} = {value!r}\n" for name, value in fields.items())


_COMPARED = """\
    for name, planned in {sizes}.items():
        found = getattr({where}, name, None)
        if found not in (None, planned):
            raise ValueError(f"the plan is for {{name}} {{planned}}, the model has {{found}}")
"""


def compared(where: str, sizes: Fields) -> str:
    """Lines of a function's body that refuse another model than the planned one."""
    return _COMPARED.format(where=where, sizes=sizes)


def sizes_of(architecture: Architecture) -> Fields:
    """The sizes of a model by their names in the configurations of transformers."""
    attention = architecture.attention
    found: Fields = {
        "num_hidden_layers": architecture.layers,
        "hidden_size": architecture.hidden,
        "vocab_size": architecture.vocabulary,
    }
    if isinstance(attention, GroupedAttention | LatentAttention):
        found["num_attention_heads"] = attention.heads
    if isinstance(attention, GroupedAttention):
        found["num_key_value_heads"] = attention.key_value_heads
    return found


def rotary_and_norms(architecture: Architecture, base: str, epsilon: str) -> Fields:
    """The base of rotary positions and the epsilon of norms, if the model file has them."""
    found: Fields = {base: architecture.rotary_base, epsilon: architecture.norm_epsilon}
    return {name: value for name, value in found.items() if value is not None}


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
