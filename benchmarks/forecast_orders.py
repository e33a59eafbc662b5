"""Four orders of four models beside their predictions, on two ranks of this machine.

Three of the models are of ``transformers``, which must be installed for them.
"""

from collections.abc import Callable, Iterator
from statistics import median
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from rich.progress import track
from torch import Tensor, nn

from benchmarks.forecasts import (
    CLASSES,
    HEADS,
    MICROBATCHES,
    PIXELS,
    SAMPLES,
    SEQUENCE,
    VOCABULARY,
    WARM_UP,
    images,
    planned,
)
from benchmarks.ranks import CPU, SGD, on_ranks
from benchmarks.report import Table, percent
from stagewright.executor.measuring.links import MeasuringMachine, describe, measure_links
from stagewright.executor.measuring.whole_models import Profiled, mean_of_ranks
from stagewright.executor.training.losses import loss_of_run
from stagewright.executor.training.runtime import Executor
from stagewright.executor.training.trace_recorder import waited_seconds

Given = tuple[Tensor | dict[str, Tensor], Tensor | tuple[()]]

ORDERS = ("1f1b", "zb-h1", "zbv", "interleaved")
WIDTH, DEPTH = 128, 8


def llama() -> nn.Module:
    """A small Llama of transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=2 * VOCABULARY, hidden_size=WIDTH, intermediate_size=2 * WIDTH,
            num_hidden_layers=DEPTH, num_attention_heads=HEADS, num_key_value_heads=2,
            use_cache=False,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    """A small GPT-2 of transformers."""
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=2 * VOCABULARY, n_positions=SEQUENCE, n_embd=WIDTH, n_layer=DEPTH,
            n_head=HEADS, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, use_cache=False,
            bos_token_id=0, eos_token_id=0,
        )
    )  # fmt: skip


def vit() -> nn.Module:
    """A small vision transformer of transformers."""
    from transformers import ViTConfig, ViTForImageClassification

    return ViTForImageClassification(
        ViTConfig(
            hidden_size=WIDTH, num_hidden_layers=DEPTH, num_attention_heads=HEADS,
            intermediate_size=2 * WIDTH, image_size=PIXELS, patch_size=8,
            hidden_dropout_prob=0, attention_probs_dropout_prob=0,
        )
    )  # fmt: skip


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


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Given]]] = {
    "Llama": (llama, labelled_tokens),
    "GPT-2": (gpt2, labelled_tokens),
    "ViT": (vit, labelled_images),
    "MLP": (mlp, vectors),
}


class Outcome(NamedTuple):
    """Seconds of an iteration, and for how long of the measured ones a rank had no core."""

    predicted: float
    measured: float
    waited: float


def forecast_orders(rank: int, name: str, turns: int, steps: int) -> list[list[Outcome]]:
    """Every order of a model, profiled once in each turn."""
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
        turn = []
        for order in ORDERS:
            plan = planned(chain, cluster, "order", order)
            executor = Executor(plan, make, None if takes_loss else loss, SGD, example=inputs)
            taken = [_step(executor, batch) for _ in range(WARM_UP + 2 * steps)][WARM_UP:]
            calm = sorted(taken)[:steps]
            assert plan.predicted is not None
            waited, seconds = (median(values) for values in zip(*calm, strict=True))
            turn.append(Outcome(plan.predicted.iteration_seconds, seconds, waited))
        found.append(turn)
    return found


def _step(executor: Executor, batch: Given) -> tuple[float, float]:
    """Seconds without a core, and of a step, on the rank that had most of them."""
    dist.barrier()
    before, began = waited_seconds() or 0.0, perf_counter()
    executor.step(*batch)
    found = torch.tensor([(waited_seconds() or 0.0) - before, perf_counter() - began])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found[0]), float(found[1])


def orders_table(quick: bool) -> Table:
    """The orders in the calmest of several turns of each model."""
    turns, steps = (1, 3) if quick else (2, 15)
    rows: list[tuple[object, ...]] = []
    for name in track(list(MODELS)[-1:] if quick else MODELS, "orders beside their predictions"):
        every: list[list[Outcome]] = on_ranks(2, forecast_orders, name, turns, steps)[0]
        rows += rows_of(name, every)
    columns = (
        *("model", "order", "predicted, ms", "measured, ms", "measured / predicted"),
        *("place, predicted / measured", "waited for a core"),
    )
    title = (
        f"Orders beside their predictions: models of {DEPTH} blocks of width {WIDTH} and an MLP, "
        f"two ranks, {MICROBATCHES} microbatches; median of {steps} of {2 * steps} steps in the "
        f"calmest of {turns} turns; target: 0.85 to 1.15, and the places of the orders"
    )
    return Table("executor-orders", title, columns, tuple(rows))


def rows_of(name: str, every: list[list[Outcome]]) -> Iterator[tuple[object, ...]]:
    """The rows of a model: those of the turn in which ranks waited least for a core."""
    calm = min(every, key=lambda turn: sum(one.waited / one.measured for one in turn))
    for order, one in zip(ORDERS, calm, strict=True):
        predicted = 1 + sum(other.predicted < one.predicted for other in calm)
        measured = 1 + sum(other.measured < one.measured for other in calm)
        yield (
            *(name, order, 1e3 * one.predicted, 1e3 * one.measured, one.measured / one.predicted),
            *(f"{predicted} / {measured}", percent(one.waited / one.measured)),
        )
