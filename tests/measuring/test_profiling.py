import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from models import VOCABULARY, ResidualMLP, WithBatchNorm, tokens, vectors
from plans import small_problem
from ranks import Ranks
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from stagewright.cli.factories import load_factory
from stagewright.cli.training.profiling import ProfileOptions, profile
from stagewright.executor.capture.tracing import capture
from stagewright.executor.measuring.links import (
    MeasuredLinks,
    describe,
    fit,
    measure_links,
    reduce_share,
)
from stagewright.executor.measuring.machine import MeasuringMachine
from stagewright.executor.measuring.profiling import first_batch, measure_layers
from stagewright.executor.measuring.whole_models import mean_of_ranks
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Cluster, Link, uniform_servers
from stagewright.graphs.models.chain import Chain, load_model

pytestmark = pytest.mark.real

CPU = MeasuringMachine(torch.device("cpu"), kind="core")
FLOAT = 4  # bytes


def measured(
    model: nn.Module, batch: Any, sizes: tuple[int, ...] = (2, 4), **options: Any
) -> Chain:
    return measure_layers(capture(model), batch, sizes, machine=CPU, rounds=2, **options)


class Known(nn.Module):
    """Layers of which it is known what they keep and hand over."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10)
        self.relu = nn.ReLU()
        self.second = nn.Linear(10, 8)
        self.last = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        wide = self.relu(self.first(x))
        return self.last(self.second(wide) + wide[:, :8])


def test_bytes_of_known_layers() -> None:
    chain = measured(Known(), vectors(8), sizes=(1, 4))
    parameters = [(6 + 1) * 10, 0, (10 + 1) * 8, (8 + 1) * 4]
    assert chain.parameter_bytes.tolist() == [FLOAT * count for count in parameters]
    for layer, kept, leaving in zip(
        chain.layers, [6, 10, 10, None], [10, 10, 8, None], strict=True
    ):
        if kept is None:
            assert [cost.output_bytes for cost in layer.costs] == [FLOAT] * 2  # the loss
            continue
        for cost in layer.costs:
            assert cost.saved_bytes == FLOAT * kept * cost.microbatch_size
            assert cost.output_bytes == FLOAT * leaving * cost.microbatch_size


def test_values_that_pass_by_count_as_output() -> None:
    costs = [layer.costs[0] for layer in measured(ResidualMLP(3), vectors(4)).layers]
    values = [1, 1, 2, 2]  # that leave all layers but the last; the last block's end joined
    assert [cost.output_bytes for cost in costs[:-1]] == [FLOAT * 2 * 6 * n for n in values]


def test_times_are_split_between_inputs_and_weights() -> None:
    chain = measured(Known(), vectors(8))
    assert [layer.name for layer in chain.layers] == ["first", "relu", "second", "last"]
    for layer in chain.layers:
        for cost in layer.costs:
            assert cost.device_kind == "core"
            assert cost.forward_seconds > 0
            assert cost.total_backward_seconds > 0
    assert all(cost.input_gradient_seconds == 0 for cost in chain.layers[0].costs)
    assert all(cost.weight_gradient_seconds == 0 for cost in chain.layers[1].costs)
    assert chain.microbatch_size == 4
    assert "processor time" in chain.source
    assert "medians of 2 rounds" in chain.source


def test_a_layer_that_no_run_splits_has_its_whole_backward_as_input_gradient() -> None:
    model = Known()
    model.second.register_full_backward_hook(lambda *_: None)
    first, _, hooked, last = (layer.costs[-1] for layer in measured(model, vectors(8)).layers)
    assert hooked.input_gradient_seconds == hooked.backward_seconds
    assert hooked.weight_gradient_seconds == 0
    assert first.weight_gradient_seconds > 0
    assert last.weight_gradient_seconds > 0


def test_measuring_changes_no_parameter() -> None:
    model = WithBatchNorm()
    before = [parameter.clone() for parameter in model.parameters()]
    measured(model, vectors(8))
    assert all(map(torch.equal, before, model.parameters()))
    assert all(parameter.grad is None for parameter in model.parameters())


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(6, 4)
        self.right = nn.Linear(6, 4)

    def forward(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return self.left(a), self.right(b)


def test_several_inputs_outputs_and_targets() -> None:
    (a, first), (b, second) = vectors(4), vectors(4, 1)

    def loss(outputs: tuple[Tensor, Tensor], targets: tuple[Tensor, Tensor]) -> Tensor:
        return torch.stack(list(map(cross_entropy, outputs, targets))).mean()

    chain = measured(TwoInputs(), ((a, b), (first, second)), loss=loss)
    assert chain.layers[0].costs[0].output_bytes == FLOAT * 2 * (4 + 6)


@pytest.mark.parametrize(
    ("batch", "sizes", "words"),
    [
        (vectors(3), (2, 4), "a microbatch of 4 samples .* has 3"),
        (tokens(4), (2,), "layer 'first' fails on inputs of shape"),
        ((vectors(4)[0], torch.zeros(4, 9)), (2,), "layer 'last' does not run on the data"),
        (((vectors(4)[0],) * 2, vectors(4)[1]), (2,), "2 input tensors .* takes 1"),
        ((vectors(4)[0].tolist(), vectors(4)[1]), (2,), "inputs hold no tensor"),
    ],
)
def test_data_that_do_not_fit_are_refused(batch: Any, sizes: tuple[int, ...], words: str) -> None:
    with pytest.raises(InputError, match=words):
        measured(Known(), batch, sizes)


def test_autocast_halves_what_matrix_products_hand_over() -> None:
    whole, half = (
        measured(Known(), vectors(4), (2,), autocast=kind) for kind in (None, torch.bfloat16)
    )
    assert half.layers[0].costs[0].output_bytes * 2 == whole.layers[0].costs[0].output_bytes
    assert half.layers[0].parameter_bytes == whole.layers[0].parameter_bytes
    assert "bfloat16" in half.source


def test_a_loss_must_be_one_number() -> None:
    with pytest.raises(InputError, match=r"one number .* a tensor of shape \(2,\)"):
        measured(Known(), vectors(4), (2,), loss=lambda outputs, targets: outputs.sum(1))


NUMBERS = (6 * 10, 10 * 8, 8 * 4), 10 + 8 + 4  # of matrices, and of biases
WHOLE = sum(NUMBERS[0]) + NUMBERS[1]
FACTORED = 6 + 10 + 10 + 8 + 8 + 4 + NUMBERS[1]  # rows and columns of matrices


@pytest.mark.parametrize(
    ("optimizer", "groups", "state"),
    [
        (partial(torch.optim.SGD, lr=0.1), {}, 0.0),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), {}, 1.0),
        (torch.optim.AdamW, {}, 2.0),
        (torch.optim.Adafactor, {}, FACTORED / WHOLE),
        (
            torch.optim.Muon,
            {"bias": {"optimizer": torch.optim.Adam}},
            1 + NUMBERS[1] / WHOLE,
        ),
    ],
)
def test_the_optimizers_step_is_measured_layer_by_layer(
    optimizer: Any, groups: Any, state: float
) -> None:
    options = {"optimizer": optimizer, "groups": groups}
    chain = measured(Known(), vectors(4), clips=state == 1.0, **options)
    assert chain.optimizer_bytes_per_parameter_byte == pytest.approx(state, rel=1e-12)
    for layer in chain.layers:
        (seconds,) = {cost.update_seconds for cost in layer.costs}
        assert seconds is not None
        assert (seconds > 0) == (layer.parameter_bytes > 0)


def test_an_optimizer_that_does_not_take_a_layer_is_refused() -> None:
    with pytest.raises(InputError, match=r"does not take parameter 'first.bias': .*2D"):
        measured(Known(), vectors(4), optimizer=torch.optim.Muon)


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Linear(5, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


def test_layers_that_need_two_samples_are_marked() -> None:
    least = [layer.min_samples for layer in measured(Normed(), vectors(4), (2, 4)).layers]
    assert least == [None, 2, None]
    assert {layer.min_samples for layer in measured(Known(), vectors(4), (2,)).layers} == {None}
    single = measured(
        Known(), vectors(4), (2,), loss=lambda out, to: cross_entropy(out.squeeze(), to)
    )
    assert [layer.min_samples for layer in single.layers][-1] == 2
    with pytest.raises(InputError, match=r"layer 'norm' fails on inputs of .*more than 1"):
        measured(Normed(), vectors(4), (1, 4))


def _broken() -> Iterator[tuple[Tensor, Tensor]]:
    raise ValueError("no such\nfile")
    yield


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        (3, "the data raised TypeError: 'int' object is not iterable"),
        (_broken(), "the data raised ValueError: no such file"),
        ([], "is nothing, not a pair"),
        (torch.zeros(2, 2), "is a Tensor, not a pair"),
        ([vectors(2) + vectors(2)], "is a tuple, not a pair"),
    ],
)
def test_data_without_pairs_are_refused(batches: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        first_batch(batches)


def test_the_command_writes_a_model_that_can_be_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "model.json"
    named = {"module": "models:TiedTransformer", "data": "models:token_batches"}
    momentum = "sgd:lr=0.1,momentum=0.9"
    more: dict[str, Any] = {"microbatch_sizes": "2,1", "repetitions": 1, "output": file}
    asked = ProfileOptions(**named, **more, dtype="bfloat16", optimizer=momentum, as_json=True)
    assert profile(asked) == 0
    assert json.loads(capsys.readouterr().out)["layers"] == 8
    chain = load_model(file)
    assert chain.name == "TiedTransformer"
    assert chain.optimizer_bytes_per_parameter_byte == 1
    assert "bfloat16" in chain.source
    assert [layer.name for layer in chain.layers][:2] == ["token", "position"]
    assert chain.layers[-1].parameter_bytes == FLOAT * VOCABULARY * 6  # tied: in both layers
    assert [cost.microbatch_size for cost in chain.layers[0].costs] == [1, 2]
    kind = chain.layers[0].costs[0].device_kind
    assert kind is not None
    cluster = uniform_servers(1, 2, Link(1e9), kind=kind)
    from stagewright.solvers.planning import plan  # here, for the ranks import this file, too

    assert plan(PipelineProblem(chain, cluster, 4), "dp").plan is not None


@pytest.mark.parametrize("sizes", ["", "1,x", "0,2"])
def test_the_command_refuses_bad_sizes(sizes: str) -> None:
    named = {"module": "models:TiedTransformer", "data": "models:tokens"}
    with pytest.raises(InputError, match="--microbatch-sizes"):
        profile(ProfileOptions(**named, microbatch_sizes=sizes))


def test_factories_are_found_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine_at_home.py").write_text("class A:\n    make = staticmethod(lambda: 3)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])
    assert load_factory("mine_at_home:A.make", "--module")() == 3


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("models", "--module 'models' names no PACKAGE:FUNCTION"),
        (":x", "names no PACKAGE:FUNCTION"),
        ("no_such_thing.at_all:x", "no module 'no_such_thing'"),
        ("json.no_such_thing:x", "no module 'json.no_such_thing'"),
        ("models:nothing", "has no 'nothing'"),
        ("models:WIDTH", "'WIDTH' is of type int"),
        ("breaks_on_import:x", "importing 'breaks_on_import' raised ZeroDivisionError: division"),
        ("imports_nothing:x", "importing 'imports_nothing' raised ModuleNotFoundError: .*nowhere"),
        ("raises:make", "'raises:make' raised ValueError: one two"),
        ("raises:hides", r"raised ValueError: vague \(from ZeroDivisionError: division by zero\)"),
    ],
)
def test_faults_of_factories_are_told_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: str
) -> None:
    (tmp_path / "breaks_on_import.py").write_text("1 / 0\n")
    (tmp_path / "imports_nothing.py").write_text("import nowhere\n")
    (tmp_path / "raises.py").write_text(
        "def make():\n    raise ValueError('one\\ntwo')\n"
        "def hides():\n    try:\n        1 / 0\n"
        "    except ArithmeticError as error:\n        raise ValueError('vague') from error\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=words) as error:
        load_factory(text, "--module")()
    assert "\n" not in str(error.value)


@given(
    bandwidth=st.floats(1e7, 1e12),
    latency=st.floats(1e-7, 1e-2),
    sizes=st.sets(st.integers(10, 10**8), min_size=2, max_size=6),
)
def test_links_without_noise_are_found(bandwidth: float, latency: float, sizes: set[int]) -> None:
    seconds = [2 * latency + size / bandwidth for size in sorted(sizes)]
    found = fit(sorted(sizes), seconds)
    if seconds[-1] > 1.01 * seconds[0]:
        assert found[0] == pytest.approx(bandwidth, rel=1e-3)
        for size, taken in zip(sorted(sizes), seconds, strict=True):
            assert 2 * found[1] + size / found[0] == pytest.approx(taken, rel=1e-6)


@pytest.mark.parametrize("seconds", [(1e-3, 1e-3), (2e-3, 1e-3), (1e-9, 1e-3)])
def test_noise_gives_no_negative_link(seconds: tuple[float, float]) -> None:
    bandwidth, latency = fit((1000, 2000), seconds)
    assert 0 < bandwidth < float("inf")
    assert latency >= 0


@pytest.mark.parametrize("share", [1.0, 0.3])
def test_the_share_of_an_all_reduce_is_what_the_cost_model_needs(share: float) -> None:
    problem = small_problem(layers=1, devices=3)
    cluster = replace(problem.cluster, all_reduce_share=share)
    problem = replace(problem, cluster=cluster)
    seconds, size = problem.reduce_seconds(0, 1, (0, 1, 2)), problem.gradient_bytes(0, 1)
    bandwidth = np.where(np.isfinite(cluster.bandwidth), cluster.bandwidth, 0.0)
    assert reduce_share(3, int(size), seconds, bandwidth, cluster.latency) == pytest.approx(share)
    faster = replace(problem, cluster=replace(cluster, all_reduce_share=None))
    latency = 4 * float(cluster.latency.max())
    assert faster.reduce_seconds(0, 1, (0, 1, 2)) - latency == pytest.approx(
        share * (seconds - latency)
    )


def _measure(_: dist.ProcessGroup, rank: int) -> tuple[MeasuredLinks, Cluster]:
    links = measure_links(torch.device("cpu"), (1000, 1_000_000), rounds=2)
    return links, describe(links, torch.device("cpu"), kind=f"kind{rank}")


def test_links_between_ranks(ranks: Ranks) -> None:
    told: list[tuple[MeasuredLinks, Cluster]] = ranks.run(_measure, 3)
    links, cluster = told[0]
    for other, same in told:
        assert (other.bandwidth == links.bandwidth).all()
        assert same.digest() == cluster.digest()
    assert 0 < links.all_reduce_share <= 1
    assert cluster.all_reduce_share == pytest.approx(links.all_reduce_share, rel=1e-3)
    assert links.message_seconds is not None
    assert (links.message_bytes_per_second or 1) > 0
    assert links.message_seconds >= 0
    assert cluster.message_seconds == pytest.approx(links.message_seconds, rel=1e-3)
    for pair in itertools.permutations(range(3), 2):
        assert links.bandwidth[pair] > 0
        assert links.latency[pair] >= 0
        assert cluster.bandwidth[pair] == pytest.approx(links.bandwidth[pair], rel=1e-3)
    assert [device.kind for device in cluster.devices] == ["kind0", "kind1", "kind2"]
    assert [device.name for device in cluster.devices] == ["s0g0", "s0g1", "s0g2"]
    assert cluster.servers == ((0, 1, 2),)


def _profile(_: dist.ProcessGroup, __: int) -> tuple[Chain, Chain]:
    own = measured(Known(), vectors(8), sizes=(2,))
    return own, mean_of_ranks(own)


def test_ranks_write_the_mean_of_what_they_measure(ranks: Ranks) -> None:
    told: list[tuple[Chain, Chain]] = ranks.run(_profile, 2)
    (one, mean), (other, same) = told
    assert same == mean
    assert mean.source.endswith("by 2 ranks at once")
    references = [one.reference_seconds or 0.0, other.reference_seconds or 0.0]
    assert min(references) > 0
    assert mean.reference_seconds == pytest.approx(sum(references) / 2)
    for i, layer in enumerate(mean.layers):
        costs = layer.costs[0], one.layers[i].costs[0], other.layers[i].costs[0]
        for name in ("forward_seconds", "input_gradient_seconds", "update_seconds"):
            found, *each = (getattr(cost, name) for cost in costs)
            assert found == pytest.approx(sum(each) / 2, rel=1e-3, abs=1e-12)
        assert costs[0].saved_bytes == costs[1].saved_bytes


def _measure_alone(_: dist.ProcessGroup, __: int, sizes: tuple[int, ...]) -> str:
    with pytest.raises(InputError) as error:
        measure_links(torch.device("cpu"), sizes)
    return str(error.value)


def test_links_need_two_ranks_and_two_sizes(ranks: Ranks) -> None:
    assert "at least two ranks" in ranks.run(_measure_alone, 1, (1000, 2000))[0]
    assert "[1000, 1000]" in ranks.run(_measure_alone, 2, (1000, 1000))[0]


def test_examples_learn_and_repeat() -> None:
    from examples.models import batches, images, resnet50, transformer

    model, steps = transformer(), itertools.islice(batches(), 2)
    for (inputs, targets), (again, _) in zip(steps, batches(), strict=False):
        assert torch.equal(inputs, again)
        assert torch.equal(inputs[:, 1:], targets[:, :-1])
        assert cross_entropy(model(inputs), targets).isfinite()
    assert len(capture(model)) == 8
    inputs, targets = next(images())
    assert len(inputs) == len(targets)
    assert len(capture(resnet50())) == 18
