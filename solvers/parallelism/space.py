"""The layouts that a search considers."""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from stagewright.formulations.parallelism.layout import Placement, Schedule
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.models.shards import Recompute, Split, require_split


@dataclass(frozen=True, slots=True)
class Space:
    """The values that every dimension may take; None for all that divide.

    ``chunks`` is the largest number of stages on a rank; ``divisions`` says how blocks are divided
    among the stages. Selective recomputation is considered
    where the attention is not one fused kernel. With ``partial``, full recomputation is of the
    fewest blocks of every stage with which a layout fits, else of all. Sequence parallelism
    ``always`` is wherever the tokens of a rank can be divided.
    """

    pipeline: tuple[int, ...] | None = None
    tensor: tuple[int, ...] | None = None
    context: tuple[int, ...] | None = None
    expert: tuple[int, ...] | None = None
    data: tuple[int, ...] | None = None
    microbatch: tuple[int, ...] | None = None
    chunks: int = 16
    schedules: tuple[Schedule, ...] = get_args(Schedule)
    recompute: tuple[Recompute, ...] = get_args(Recompute)
    partial: bool = True
    sequence_parallel: Literal["always", "any", "never"] = "always"
    zero: tuple[int, ...] = (0, 1, 2, 3)
    offload: tuple[bool, ...] = (False,)
    placements: tuple[Placement, ...] = get_args(Placement)

    def __post_init__(self) -> None:
        for name in ("pipeline", "tensor", "context", "expert", "data", "microbatch"):
            values = getattr(self, name)
            if values is not None and (not values or min(values) < 1):
                raise InputError(f"{name} needs at least one value, each at least 1")
        if self.chunks < 1:
            raise InputError(f"chunks must be at least 1, got {self.chunks}")
        for name in ("schedules", "recompute", "zero", "offload", "placements"):
            if not getattr(self, name):
                raise InputError(f"{name} needs at least one value")

    def __str__(self) -> str:
        """The dimensions that are limited, in words."""
        limited = []
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "chunks":
                limited.append(f"at most {value} chunks")
            elif one.name == "partial" and "full" in self.recompute:
                said = "the fewest blocks with which a layout fits, or of all"
                limited.append(f"recomputation of {said if value else 'all blocks'}")
            elif one.name == "sequence_parallel":
                limited.append(f"{'' if value == 'any' else value + ' '}sequence parallelism")
            elif one.name == "offload" and value != one.default:
                limited.append("the optimizer's state on the device or in host memory")
            elif one.name != "partial" and value != one.default:
                limited.append(f"{one.name.replace('_', ' ')} of {', '.join(map(str, value))}")
        return "; ".join(limited)

    def families(self, problem: TrainingProblem) -> Iterator[Split]:
        """How layers can be divided, by the rules of the model and the number of devices."""
        devices, architecture = problem.fabric.devices, problem.architecture
        experts = 1 if architecture.experts is None else architecture.experts.number
        for tensor in chosen(self.tensor, devices):
            for context in chosen(self.context, devices // tensor):
                for expert in chosen(self.expert, experts):
                    if devices % expert == 0:
                        yield from self._splits(problem, Split(tensor, context, expert))

    def why_none(self, problem: TrainingProblem) -> str:
        """Why there are no families: the first rule that the smallest degrees break."""
        devices, architecture = problem.fabric.devices, problem.architecture
        every = (self.tensor, self.context, self.expert)
        tensor, context, expert = (min(values) if values else 1 for values in every)
        if devices % (tensor * context):
            return f"{devices} devices are no multiple of t x c = {tensor} x {context}"
        split = Split(tensor, context, expert)
        if architecture.experts is not None and split.tensor > 1:
            split = replace(split, sequence_parallel=True)
        try:
            require_split(architecture, problem.sequence, split)
        except InputError as error:
            return str(error)
        return f"{devices} devices, {architecture.layers} blocks: no pipeline of the space divides"

    def _splits(self, problem: TrainingProblem, plain: Split) -> Iterator[Split]:
        """The splits without and with sequence parallelism."""
        divided = replace(plain, sequence_parallel=True)
        can = plain.tensor > 1 and _is_allowed(problem, divided)
        if can and self.sequence_parallel != "never":
            yield divided
        if (not can or self.sequence_parallel != "always") and _is_allowed(problem, plain):
            yield plain

    def recomputes(self, problem: TrainingProblem) -> tuple[Recompute, ...]:
        """The kinds of recomputation that differ for this model's attention."""
        fused = problem.attention == "fused"
        found = tuple(one for one in self.recompute if not (fused and one == "selective"))
        if not found:
            raise InputError(
                "recompute selective alone: the fused attention recomputes its scores anyway; "
                "choose none or full"
            )
        return found


def _is_allowed(problem: TrainingProblem, split: Split) -> bool:
    try:
        require_split(problem.architecture, problem.sequence, split)
    except InputError:
        return False
    return True


def chosen(values: tuple[int, ...] | None, of: int) -> tuple[int, ...]:
    """The divisors of the number ``of``; if ``values`` are given, the divisors among them."""
    if values is None:
        return divisors(of)
    return tuple(sorted(one for one in set(values) if of % one == 0))


def divisors(of: int) -> tuple[int, ...]:
    """All divisors, ascending."""
    low = [one for one in range(1, int(of**0.5) + 1) if of % one == 0]
    return tuple(sorted({*low, *(of // one for one in low)}))
