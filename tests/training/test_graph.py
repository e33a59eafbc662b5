"""Windows that are captured and replayed train the same, to the bit; a CPU stands for the GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

import training_plans as make  # noqa: E402
from models import WIDTH, ResidualMLP, vectors  # noqa: E402
from races import in_two_streams  # noqa: E402
from recorded_graph import HostReads, RecordedGraphs  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from stagewright.executor.training import preparation, runtime  # noqa: E402
from stagewright.executor.training.interpreter.last_stage import NonFiniteLoss  # noqa: E402
from stagewright.executor.training.losses import cross_entropy  # noqa: E402
from stagewright.executor.training.model_checks import require_windows  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.plans.actions import parse_action  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan, Stage  # noqa: E402
from stagewright.graphs.documents.errors import InputError  # noqa: E402

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
MEAN = nn.functional.cross_entropy


def plan(text: str, *cuts: int, recompute: Any = "none") -> PipelinePlan:
    order = [parse_action(word) for word in text.split()]
    bounds = [*zip((0, *cuts), (*cuts, 6), strict=True)]
    stages = [Stage(bound, ("a",), recompute=recompute) for bound in bounds]
    microbatches = 1 + max(one.microbatch or 0 for one in order)
    return make.plan_in_order(stages, microbatches, {"a": order}, begins="backward")


BY_LAYER = plan(
    "5I0 4I0 5W0 3I0 4W0 2I0 3W0 1I0 2W0 0I0 0W0 0F0 1W0 1F0 2F0 3F0 4F0 5F0", 1, 2, 3, 4, 5
)
BY_TWO = "1I0 1I1 1W1 0I1 0I0 1W0 0W1 0W0 0F0 0F1 1F1 1F0"
MICROBATCHED = plan(BY_TWO, 3)


def model() -> nn.Module:
    torch.manual_seed(0)
    return ResidualMLP()


def normalised() -> nn.Module:
    """Layers that change their buffers in every forward."""
    torch.manual_seed(0)
    return nn.Sequential(
        *[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)) for _ in range(6)]
    )


def counted(output: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """A sum over the even targets, and their number."""
    chosen = targets % 2 == 0
    losses = nn.functional.cross_entropy(output, targets, reduction="none")
    return (losses * chosen).sum(), chosen.sum()


@contextmanager
def cpu_for_gpu() -> Iterator[RecordedGraphs]:
    graphs = RecordedGraphs()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparation, "make_streams", lambda _: graphs)
        patch.setattr(runtime, "require_capturable", lambda plan, *_, **__: require_windows(plan))
        yield graphs


def train(
    how: PipelinePlan,
    *,
    graph: bool,
    made: Callable[[], nn.Module] = model,
    loss: Any = MEAN,
    drain: int = 9,
    slower: int = 9,
) -> tuple[Any, list[Any]]:
    """Parameters and losses; the learning rate changes before step ``slower``."""
    executor, losses = Executor(how, made(), loss, SGD, graph=graph), []
    for i in range(8):
        if i == slower:
            for group in (group for one in executor.optimizers for group in one.param_groups):
                group["lr"] = 0.01
        losses.append(executor.step(*vectors(12, i)))
        if i == drain:
            executor.finish()
    executor.finish()
    return executor.parameters_on_first_rank(), losses


@pytest.mark.parametrize(
    ("how", "options", "captures", "replays"),
    [
        pytest.param(BY_LAYER, {}, 1, 6, id="a stage per layer"),
        pytest.param(in_two_streams(BY_LAYER), {}, 1, 6, id="two streams"),
        pytest.param(MICROBATCHED, {"loss": counted}, 1, 6, id="microbatches, a counting loss"),
        pytest.param(MICROBATCHED, {"loss": cross_entropy}, 1, 6, id="the loss by default"),
        pytest.param(MICROBATCHED, {"made": normalised}, 1, 6, id="buffers"),
        *[
            pytest.param(plan(BY_TWO, 3, recompute=how), {"made": made}, 1, 6, id=how)
            for how, made in (("full", model), ("layer", normalised))
        ],
        pytest.param(BY_LAYER, {"drain": 3}, 2, 4, id="drained"),
        pytest.param(BY_LAYER, {"slower": 4}, 2, 6, id="another learning rate"),
    ],
)
def test_replays_train_the_same_to_the_bit(
    how: PipelinePlan, options: dict[str, Any], captures: int, replays: int
) -> None:
    expected, right = train(how, graph=False, **options)
    with cpu_for_gpu() as graphs:
        found, losses = train(how, graph=True, **options)
    assert (graphs.captures, graphs.replays) == (captures, replays)
    assert losses == right
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_what_the_host_reads_in_a_window_is_found() -> None:
    """The check above would fail: a loss that looks at its value."""

    def looking(output: Tensor, targets: Tensor) -> Tensor:
        loss = MEAN(output, targets)
        return loss if float(loss.detach()) < 100 else 2 * loss

    with cpu_for_gpu(), pytest.raises(HostReads, match="_local_scalar_dense"):
        train(BY_LAYER, graph=True, loss=looking)


def test_a_loss_that_is_not_finite_is_named() -> None:
    with cpu_for_gpu():
        executor = Executor(BY_LAYER, model(), MEAN, SGD, graph=True)
        for i in range(5):
            executor.step(*vectors(12, i))
        inputs, targets = vectors(12, 5)
        with pytest.raises(NonFiniteLoss, match="loss of microbatch 0 on stage 5 is nan in step 6"):
            executor.step(inputs * float("inf"), targets)


def refused(
    how: PipelinePlan, one: Callable[[], nn.Module] = model, optimizer: Any = SGD, **options: Any
) -> str:
    with pytest.raises(InputError) as caught:
        Executor(how, one(), MEAN, optimizer, graph=True, **options).step(*vectors(12, 0))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_what_cannot_be_captured_is_refused() -> None:
    assert refused(BY_LAYER, device="cpu") == (
        "graph captures work of a GPU, this rank computes on cpu"
    )
    forward_first = make.plan_in_order(
        [Stage((0, 6), ("a",))], 1, {"a": [parse_action(word) for word in ("0F0", "0B0")]}
    )
    assert "begins with the backwards and has one device" in refused(forward_first)
    assert "the plan has the whole 0B0" in refused(plan("0B0 0F0"))
    with cpu_for_gpu():
        message = refused(
            plan("0I0 0W0 0F0"),
            lambda: nn.Sequential(nn.Linear(6, 6), *[nn.Dropout() for _ in range(5)]),
        )
        adam = refused(BY_LAYER, optimizer=partial(torch.optim.Adam, lr=0.1))
    assert "draws random numbers, which every replay would repeat" in message
    assert adam == "graph: Adam counts its steps on the host; give capturable=True"
