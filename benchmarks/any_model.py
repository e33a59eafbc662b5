"""Models that were written elsewhere: captured, and trained in two stages.

``python -m benchmarks any_model [--quick]``. Each model is captured and trained in two stages by
us, and by torch's ``pipeline()`` split at about half, in processes of their own; a plain loop of
the same steps is beside both. What is known is kept in ``build/any-model.jsonl``, so that a run
that was ended goes on there.
"""

import json
import multiprocessing
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor, fx, nn
from torch.distributed.pipelining import SplitPoint, pipeline

from benchmarks.any_models import MODELS, AnyModel
from benchmarks.any_zoo_torch import TORCH
from benchmarks.any_zoo_torchvision import TORCHVISION
from benchmarks.any_zoo_transformers import TRANSFORMERS
from benchmarks.plain_loop import cut, difference, loop, own_loss
from benchmarks.ranks import CPU
from benchmarks.report import Table
from stagewright.executor.capture.layers import LayeredModel
from stagewright.executor.measuring.whole_models import captured_by_size, check_capture
from stagewright.executor.training.data.batches import pair
from stagewright.executor.training.losses import loss_of_run
from stagewright.executor.training.runtime import Executor
from stagewright.formulations.plans.plan import PipelinePlan, Schedule, ScheduledAction, Stage
from stagewright.graphs.documents.errors import InputError

MICROBATCHES, SAMPLES, STEPS = 4, 4, 3
ZOO = {one.name: one for one in (*MODELS.values(), *TRANSFORMERS, *TORCHVISION, *TORCH)}
QUICK_MODELS = ("gpt2", "u-net")
DTYPE = torch.float64
SETTINGS: dict[str, Any] = {"device": CPU, "dtype": DTYPE, "autocast": None}
LIMIT_SECONDS = 150.0
KEPT = Path(__file__).parents[1] / "build" / "any-model.jsonl"
SHOWN = 110  # characters of a reason
PACKAGES = ("transformers", "torchvision")


@dataclass(frozen=True, slots=True)
class Trial:
    """A model trained ``by`` "plan" or by "torch": its difference from the plain loop, or why not.

    ``layers`` are those that were captured, and how.
    """

    model: str
    by: str
    layers: str | None = None
    apart: float | None = None
    why: str = ""


def layers_of(one: AnyModel) -> LayeredModel:
    """The captured model."""
    batch = next(one.batches(SAMPLES, 1, DTYPE))
    takes_loss = isinstance(batch, dict)
    found = captured_by_size(
        one.make,
        batch if takes_loss else batch[0],
        [SAMPLES],
        takes_loss,
        **SETTINGS,
    )
    return found[SAMPLES]


def _optimizer(one: AnyModel) -> Any:
    return partial(torch.optim.SGD, lr=one.lr, momentum=0.9)


def _batches(one: AnyModel) -> list[Any]:
    return list(one.batches(SAMPLES * MICROBATCHES, STEPS, DTYPE))


def _expected(one: AnyModel) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
    """The state of the plain loop, and that before it."""
    model = one.make()
    looped = loop(model, _batches(one), MICROBATCHES, _optimizer(one), loss=one.loss)
    return looped.state, one.make().state_dict()


# --- By plans ------------------------------------------------------------------------------------


def by_plan(one: AnyModel) -> tuple[str, float]:
    """How it is captured, and the difference from the plain loop of two stages of its layers.

    A step is compared with the model's own first, as the command `profile` does.
    """
    batch = next(one.batches(SAMPLES, 1, DTYPE))
    inputs = batch if isinstance(batch, dict) else batch[0]
    loss, takes_loss = loss_of_run(one.loss, inputs)
    layered = layers_of(one)
    check_capture(
        *(one.make, layered, pair(batch, has_loss=not takes_loss), SAMPLES, loss, takes_loss),
        **SETTINGS,
    )
    pairs = [pair(batch, has_loss=not takes_loss) for batch in _batches(one)]
    executor = Executor(
        two_stages(len(layered)),
        one.make(),
        one.loss,
        _optimizer(one),
        example=pairs[0][0],
        dtype=DTYPE,
    )
    for inputs, targets in pairs:
        executor.step(inputs, targets)
    state = executor.parameters_on_first_rank()
    assert state is not None
    way = "exported" if layered.guards else "traced"
    return f"{way}, {len(layered)}", difference(state, *_expected(one))


def two_stages(layers: int) -> PipelinePlan:
    """Both on one device: a microbatch's forwards and backwards before those of the next."""
    half = layers // 2
    stages = (Stage((0, half), ("d0",)), Stage((half, layers), ("d0",)))
    actions = [f"{of}{m}" for m in range(MICROBATCHES) for of in ("0F", "1F", "1B", "0B")]
    times = tuple(
        ScheduledAction("d0", action, float(i), i + 1.0) for i, action in enumerate(actions)
    )
    return PipelinePlan("", "given", "model", "d0", MICROBATCHES, stages, Schedule(times))


# --- By torch's own pipelines --------------------------------------------------------------------


class OwnLoss(nn.Module):
    """A model of which only the loss is asked, so that torch's stages pass on tensors."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **keywords: Any) -> Tensor:
        """The loss."""
        return own_loss(self.model(**keywords))


def half(model: nn.Module) -> str:
    """The middle one of the longest list of blocks, or of the model's parts."""
    lists = {
        name: one
        for name, one in model.named_modules()
        if isinstance(one, nn.ModuleList | nn.Sequential) and len(one) > 1
    }
    if not lists:
        return _middle(model)
    name, longest = max(lists.items(), key=lambda one: _size(one[1]) * min(len(one[1]), 4))
    return f"{name}.{_middle(longest)}".removeprefix(".")


def _middle(module: nn.Module) -> str:
    names = [name for name, _ in module.named_children()]
    return names[len(names) // 2]


def _size(module: nn.Module) -> int:
    return sum(one.numel() for one in module.parameters())


def by_torch(one: AnyModel) -> tuple[str, float, str]:
    """Where it is split, its parameters' difference from the plain loop, and a reason.

    The stages of a microbatch are called one after the other in this process.
    """
    batches, model = _batches(one), one.make()
    has_own = isinstance(batches[0], dict)
    at = half(model)
    whole = OwnLoss(model) if has_own else model
    first = next(one.batches(SAMPLES, 1, DTYPE))
    split = {f"model.{at}" if has_own else at: SplitPoint.BEGINNING}
    pipe = pipeline(whole, () if has_own else (first[0],), first if has_own else None, split)
    if pipe.num_stages != 2:
        raise RuntimeError(f"{pipe.num_stages} stages")
    stages, of = pipe.split_gm, one.loss or nn.functional.cross_entropy
    pipe.executor = fx.Interpreter(stages)  # its own detaches the stages from each other
    stepping = _optimizer(one)(stages.parameters())
    for batch in batches:
        stepping.zero_grad()
        for piece in cut(batch, MICROBATCHES):
            output = pipe(**piece) if has_own else pipe(piece[0])
            if isinstance(output, tuple) and len(output) == 1:
                (output,) = output
            loss = output if has_own else of(output, piece[1])
            (loss / MICROBATCHES).backward()
        stepping.step()
    found = {
        key.partition(".")[2]: value
        for key, value in stages.named_parameters(remove_duplicate=False)
    }
    prefix = "model." if has_own else ""
    own, why = {}, ""
    for names in names_of(model):
        copies = [found[f"{prefix}{one}"] for one in names if f"{prefix}{one}" in found]
        own[names[0]] = copies[0]
        if any(one is not copies[0] for one in copies):
            why = f"{names[0]!r} and {names[1]!r} are one parameter, trained as two"
    return at, difference(own, *({key: of[key] for key in own} for of in _expected(one))), why


def names_of(model: nn.Module) -> list[list[str]]:
    """All names of every parameter."""
    found: dict[Tensor, list[str]] = {}
    for name, one in model.named_parameters(remove_duplicate=False):
        found.setdefault(one, []).append(name)
    return list(found.values())


# --- Rows ----------------------------------------------------------------------------------------


def in_process(function: Callable[[AnyModel], Any], name: str) -> Any:
    """What ``function`` of a model gives in a new process, or as a string why it gives nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo", *PACKAGES])
    receive, send = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(send, function, name))
    process.start()
    send.close()
    try:
        if not receive.poll(LIMIT_SECONDS):
            return f"no answer in {LIMIT_SECONDS:g} s"
        return receive.recv()
    except EOFError:
        return "the process died"
    finally:
        process.kill()
        process.join()


def _answer(send: Any, function: Callable[[AnyModel], Any], name: str) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        send.send(function(ZOO[name]))
    except Exception as error:  # whatever a model or torch raises is the row's reason
        text = " ".join(str(error).split())
        send.send(text if isinstance(error, InputError) else f"{type(error).__name__}: {text}")


WAYS = {"plan": by_plan, "torch": by_torch}


def kept() -> dict[tuple[str, str], Trial]:
    """What is known, by model and way; the last line of a model counts."""
    lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    return {(one["model"], one["by"]): Trial(**one) for one in map(json.loads, lines)}


def add(name: str, by: str) -> None:
    """Train a model in one way, and keep what came of it."""
    found = in_process(WAYS[by], name)
    trial = Trial(name, by, why=found) if isinstance(found, str) else Trial(name, by, *found)
    KEPT.parent.mkdir(exist_ok=True)
    with KEPT.open("a", encoding="utf-8") as file:
        file.write(json.dumps(asdict(trial)) + "\n")


def _cells(name: str, known: Mapping[tuple[str, str], Trial]) -> tuple[object, ...]:
    """A line of the table."""
    ours, theirs = known[name, "plan"], known[name, "torch"]
    return (
        *(name, ours.layers, _equal(ours), _short(ours.why)),
        *(_equal(theirs), _short(theirs.why)),
    )


def _equal(trial: Trial) -> str:
    if trial.apart is None:
        return "no"
    return f"{'yes' if trial.apart <= ZOO[trial.model].rounding else 'NO'}, {trial.apart:.0e}"


def _short(reason: str) -> str:
    reason = re.sub(r"/\S*/(?=\w+\.py)", "", reason)
    return reason if len(reason) <= SHOWN else f"{reason[: SHOWN - 3]}..."


def tables(quick: bool) -> Iterator[Table]:
    """The table."""
    names = QUICK_MODELS if quick else tuple(ZOO)
    left = [(name, by) for by in WAYS for name in names if (name, by) not in kept()]
    for name, by in track(left, "any model"):
        add(name, by)
    known = kept()
    packages = ", ".join(f"{name} {version(name)}" for name in PACKAGES)
    title = (
        f"Models of {packages} and torch, small, without dropout: {STEPS} steps of "
        f"{MICROBATCHES} microbatches of {SAMPLES} in float64, SGD with momentum, in two stages "
        "in one process, beside a plain loop over the microbatches; the difference is the largest "
        "of a parameter or buffer of the state dict (torch's pipeline(): of a parameter), relative "
        "to what the steps have changed"
    )
    columns = ("model", "captured, layers", "equal", "why not", "torch's pipeline()", "why not")
    yield Table("any-model", title, columns, tuple(_cells(name, known) for name in names))
