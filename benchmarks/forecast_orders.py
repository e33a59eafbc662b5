"""Four orders of four models beside their predictions, on two ranks of this machine.

Three of the models are of ``transformers``, which must be installed for them.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from rich.progress import track
from scipy.stats import spearmanr
from torch import Tensor, nn

from benchmarks.any_models import hugging_face
from benchmarks.forecasts import (
    CLASSES,
    HEADS,
    MICROBATCHES,
    PIXELS,
    SAMPLES,
    SEQUENCE,
    VOCABULARY,
    images,
    planned,
)
from benchmarks.ranks import CPU, SGD, on_ranks
from benchmarks.report import Table, percent
from stagewright.executor.measuring.links import describe, measure_links
from stagewright.executor.measuring.machine import MeasuringMachine, reference_seconds
from stagewright.executor.measuring.whole_models import Profiled, mean_of_ranks
from stagewright.executor.training.losses import loss_of_run
from stagewright.executor.training.runtime import Executor
from stagewright.executor.training.trace_recorder import waited_seconds
from stagewright.formulations.plans.plan import PipelinePlan

Given = tuple[Tensor | dict[str, Tensor], Tensor | tuple[()]]

ORDERS = ("1f1b", "zb-h1", "zbv", "interleaved")
WIDTH, DEPTH = 128, 8
STEPS = 3  # of a round, that count


def mlp() -> nn.Module:
    """Layers of 512, without anything between them that is made once."""
    inner = [nn.Sequential(nn.GELU(), nn.Linear(4 * WIDTH, 4 * WIDTH)) for _ in range(DEPTH)]
    return nn.Sequential(nn.Linear(64, 4 * WIDTH), *inner, nn.Linear(4 * WIDTH, CLASSES))


def labelled_tokens() -> Given:
    """A language model's mini-batch."""
    random = torch.Generator().manual_seed(0)
    found = torch.randint(VOCABULARY, (MICROBATCHES * SAMPLES, SEQUENCE), generator=random)
    return {"input_ids": found, "labels": found}, ()


def labelled_images() -> Given:
    """A vision model's mini-batch."""
    shown, classes = images(MICROBATCHES)
    return {"pixel_values": shown, "labels": classes % 2}, ()  # of two, transformers' default


def vectors() -> Given:
    """64 samples of noise for each microbatch, and their classes."""
    random = torch.Generator().manual_seed(0)
    count = 64 * MICROBATCHES
    return (
        torch.randn(count, 64, generator=random),
        torch.randint(CLASSES, (count,), generator=random),
    )


OF_TOKENS: dict[str, Any] = {"vocab_size": 2 * VOCABULARY, "use_cache": False}
NO_DROPOUT = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
SIZES = {"hidden_size": WIDTH, "num_hidden_layers": DEPTH, "num_attention_heads": HEADS}
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Given]]] = {
    "Llama": (
        hugging_face(
            "LlamaForCausalLM", "LlamaConfig", **OF_TOKENS, **SIZES, intermediate_size=2 * WIDTH,
            num_key_value_heads=2,
        ),
        labelled_tokens,
    ),
    "GPT-2": (
        hugging_face(
            "GPT2LMHeadModel", "GPT2Config", **OF_TOKENS, n_positions=SEQUENCE, n_embd=WIDTH,
            n_layer=DEPTH, n_head=HEADS, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            bos_token_id=0, eos_token_id=0,
        ),
        labelled_tokens,
    ),
    "ViT": (
        hugging_face(
            "ViTForImageClassification", "ViTConfig", **SIZES, **NO_DROPOUT,
            intermediate_size=2 * WIDTH, image_size=PIXELS, patch_size=8,
        ),
        labelled_images,
    ),
    "MLP": (mlp, vectors),
}  # fmt: skip


class Outcome(NamedTuple):
    """An order's seconds of an iteration, predicted and measured in each round.

    ``waited`` is for how long of the measured ones a rank had no core, ``slower`` how many times as
    long a fixed computation took as when the model was profiled.
    """

    predicted: float
    rounds: tuple[float, ...]
    waited: float
    slower: float

    @property
    def measured(self) -> float:
        """The median over the rounds."""
        return median(self.rounds)

    @property
    def spread(self) -> float:
        """Interquartile range of the rounds, of their median."""
        low, high = np.percentile(self.rounds, [25, 75]).tolist()
        return (high - low) / self.measured


class Step(NamedTuple):
    """Seconds without a core, and of a step, on the rank that had most; those of the reference."""

    waited: float
    seconds: float
    reference: float


def forecast_orders(rank: int, name: str, turns: int, rounds: int) -> list[list[Outcome]]:
    """Every order of a model, profiled once in each turn and run in alternation."""
    del rank
    make, batch_of = MODELS[name]
    batch = inputs, _ = batch_of()
    loss, takes_loss = loss_of_run(None, inputs)
    size = len(next(iter(inputs.values())) if isinstance(inputs, dict) else inputs) // MICROBATCHES
    profile = Profiled(
        make=make, name=name, batch=batch, sizes=(size,), loss=loss, takes_loss=takes_loss,
        optimizer=SGD, clips=False, rounds=9, machine=MeasuringMachine(CPU), dtype=torch.float32,
        autocast=None, is_checked=False,
    )  # fmt: skip
    found = []
    for _ in range(turns):
        cluster = describe(measure_links(CPU), CPU)
        dist.barrier()
        chain = mean_of_ranks(profile.measure())
        plans = [planned(chain, cluster, "order", order) for order in ORDERS]
        executors = [
            Executor(plan, make, None if takes_loss else loss, SGD, example=inputs)
            for plan in plans
        ]
        taken = [[_calm(executor, batch) for executor in executors] for _ in range(1 + rounds)][1:]
        found.append([_outcome(*one) for one in zip(plans, zip(*taken, strict=True), strict=True)])
    return found


def _calm(executor: Executor, batch: Given) -> list[Step]:
    """Some steps in a row, of which the first brings the model into the caches.

    Of the rest, the half in which the ranks waited least for a core.
    """
    steps = [_step(executor, batch) for _ in range(1 + 2 * STEPS)][1:]
    return sorted(steps)[:STEPS]


def _step(executor: Executor, batch: Given) -> Step:
    reference = torch.tensor(reference_seconds(CPU))
    dist.all_reduce(reference)
    before, began = waited_seconds() or 0.0, perf_counter()
    executor.step(*batch)
    found = torch.tensor([(waited_seconds() or 0.0) - before, perf_counter() - began])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return Step(*found.tolist(), float(reference) / dist.get_world_size())


def _outcome(plan: PipelinePlan, rounds: Sequence[list[Step]]) -> Outcome:
    assert plan.predicted is not None
    assert plan.reference_seconds is not None
    steps = [step for of_round in rounds for step in of_round]
    return Outcome(
        plan.predicted.iteration_seconds,
        tuple(median(step.seconds for step in of_round) for of_round in rounds),
        median(step.waited for step in steps),
        median(step.reference for step in steps) / plan.reference_seconds,
    )


def orders_table(quick: bool) -> Table:
    """The orders in the calmest of several turns of each model."""
    turns, rounds = (1, 2) if quick else (2, 4)
    rows: list[tuple[object, ...]] = []
    for name in track(list(MODELS)[-1:] if quick else MODELS, "orders beside their predictions"):
        every: list[list[Outcome]] = on_ranks(2, forecast_orders, name, turns, rounds)[0]
        rows += rows_of(name, every)
    columns = (
        *("model", "order", "predicted, ms", "measured, ms", "spread", "measured / predicted"),
        *("at equal speed", "place, predicted / measured", "Spearman; pairs as predicted"),
        "waited for a core",
    )
    title = (
        f"Orders beside their predictions: models of {DEPTH} blocks of width {WIDTH} and an MLP, "
        f"two ranks, {MICROBATCHES} microbatches; in alternation, median of {rounds} rounds of "
        f"{STEPS} of {2 * STEPS} steps in the calmest of {turns} turns; target: 0.85 to 1.15, and "
        "the places of the orders"
    )
    return Table("executor-orders", title, columns, tuple(rows))


def rows_of(name: str, every: list[list[Outcome]]) -> Iterator[tuple[object, ...]]:
    """The rows of a model: those of the turn in which ranks waited least for a core."""
    calm = min(every, key=lambda turn: sum(one.waited / one.measured for one in turn))
    places = _places(calm)
    for order, one in zip(ORDERS, calm, strict=True):
        predicted = 1 + sum(other.predicted < one.predicted for other in calm)
        measured = 1 + sum(other.measured < one.measured for other in calm)
        ratio = one.measured / one.predicted
        yield (
            *(name, order, 1e3 * one.predicted, 1e3 * one.measured, percent(one.spread), ratio),
            *(ratio / one.slower, f"{predicted} / {measured}", places),
            percent(one.waited / one.measured),
        )


def _places(orders: Sequence[Outcome]) -> str:
    """How far measured places are the predicted ones.

    Two orders are a tie if they are predicted as far apart as one order differs between rounds.
    """
    spread = max(one.spread for one in orders)
    pairs = [sorted(pair) for pair in combinations(orders, 2)]
    far = [(one, other) for one, other in pairs if other.predicted > (1 + spread) * one.predicted]
    kept = sum(one.measured < other.measured for one, other in far)
    rank = spearmanr(*zip(*((one.predicted, one.measured) for one in orders), strict=True))
    return f"{rank.statistic:.1f}; {kept} of {len(far)}, {len(pairs) - len(far)} ties"
