"""Optimizers that need whole matrices, states in 8 bits, scaled losses: as in a plain loop."""

from collections.abc import Mapping
from copy import deepcopy
from functools import partial
from importlib.util import find_spec
from math import log2
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="the executor needs torch")

import torch.distributed as dist  # noqa: E402
import training_plans as make  # noqa: E402
from models import ResidualMLP, vectors  # noqa: E402
from ranks import Ranks  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.nn import functional as F  # noqa: E402, N812

from stagewright.cli.factories import parse_groups, parse_optimizer  # noqa: E402
from stagewright.executor.training import checkpoint  # noqa: E402
from stagewright.executor.training.checkpoint import Header  # noqa: E402
from stagewright.executor.training.runtime import Executor  # noqa: E402
from stagewright.formulations.plans.plan import PipelinePlan, Stage  # noqa: E402
from stagewright.graphs.documents.errors import InputError  # noqa: E402

MICROBATCHES, STEPS = 4, 6
TWO = make.one_f_one_b(make.straight([2, 2]), MICROBATCHES)
LATER = make.one_f_one_b(make.straight([1, 3]), MICROBATCHES)
SPLIT = make.gpipe([Stage((0, 2), ("d0", "d1")), Stage((2, 4), ("d2",))], MICROBATCHES)
ADAFACTOR = parse_optimizer("adafactor:lr=0.05")
MUON = parse_optimizer("muon:lr=0.02")
OTHERS = parse_groups(["norm|bias|stem:optimizer=adamw,lr=0.01,eps=1e-3"], MUON)
IN_8_BITS = pytest.param(
    "adamw8bit:lr=0.01",
    marks=pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed"),
)


def deep(width: int = 0) -> nn.Module:
    torch.manual_seed(0)
    return ResidualMLP(2).double()


class Wide(nn.Module):
    """Matrices of which torchao keeps the state in 8 bits."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(6, 1024), nn.Linear(1024, 4)
        self.blocks = nn.Sequential(nn.Linear(1024, 4), nn.Linear(4, 1024))

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.head(self.blocks(self.stem(x).tanh()).tanh())
        return inner


def batches(dtype: Any = torch.float64) -> list[Any]:
    every = (vectors(2 * MICROBATCHES, i) for i in range(STEPS))
    return [(inputs.to(dtype), targets) for inputs, targets in every]


def plain(
    module: nn.Module,
    stepping: torch.optim.Optimizer | list[torch.optim.Optimizer],
    given: Any,
    scaler: Any = None,
    clip: float = float("inf"),
    autocast: Any = None,
) -> tuple[dict[str, Tensor], list[float]]:
    """The parameters after a loop over microbatches, and every step's scale of losses."""
    optimizers = stepping if isinstance(stepping, list) else [stepping]
    scaler, scales = scaler or torch.amp.GradScaler("cpu", enabled=False), []
    for inputs, targets in given:
        for one in optimizers:
            one.zero_grad()
        for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            with torch.autocast("cpu", autocast, enabled=autocast is not None):
                loss = F.cross_entropy(module(x), y)
            scaler.scale(loss / MICROBATCHES).backward()
        for one in optimizers:
            scaler.unscale_(one)
        if clip < float("inf"):
            nn.utils.clip_grad_norm_(module.parameters(), clip)
        for one in optimizers:
            scaler.step(one)
        scaler.update()
        scales.append(scaler.get_scale())
    return module.state_dict(), scales


def run(_: Any, rank: int, plan: PipelinePlan, model: nn.Module, given: Any, options: Any) -> Any:
    executor = Executor(plan, model, **options)
    for batch in given:
        executor.step(*batch)
    return executor.parameters_on_first_rank()


def halves(
    _: Any, rank: int, plans: Any, model: nn.Module, given: Any, options: Any, folder: Path
) -> Any:
    """The first three steps by one plan, the others by the next one, from a checkpoint."""
    first, second = (Executor(plan, deepcopy(model), **deepcopy(options)) for plan in plans)
    for batch in given[:3]:
        first.step(*batch)
    path = checkpoint.save(folder, first.state(), Header(3, "flush", "some"))
    dist.barrier()
    second.load_state(checkpoint.read(path, second.wanted(checkpoint.read_kinds(path))), 3)
    for batch in given[3:]:
        second.step(*batch)
    kept = [one.state_bytes for one in second._weights.values()]
    return second.parameters_on_first_rank(), kept


def require_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], rtol: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=rtol, atol=rtol / 1e3, msg=name)


# --- Whole matrices ------------------------------------------------------------------------------


def stepping_of(module: nn.Module, optimizer: Any, groups: Any) -> list[torch.optim.Optimizer]:
    """The optimizers of the whole model: of its matrices, and of the rest."""
    if not groups:
        return [optimizer([*module.parameters()])]
    matrices = [n for n, _ in module.named_parameters() if n.endswith("weight")]
    matrices = [n for n in matrices if "norm" not in n and "stem" not in n]
    named = dict(module.named_parameters())
    rest = [one for name, one in named.items() if name not in matrices]
    adamw = torch.optim.AdamW(rest, lr=0.01, eps=1e-3)
    return [optimizer([named[name] for name in matrices]), adamw]


@pytest.mark.parametrize(
    ("optimizer", "groups"), [(ADAFACTOR, {}), (MUON, OTHERS)], ids=["adafactor", "muon"]
)
def test_stages_step_whole_matrices(
    ranks: Ranks, tmp_path: Path, optimizer: Any, groups: Any
) -> None:
    """To the bit in plain stages; replicas add gradients in another order."""
    options = {"optimizer": optimizer, "groups": groups, "dtype": torch.float64}
    module = deep()
    expected, _ = plain(module, stepping_of(module, optimizer, groups), batches())
    found = ranks.run(run, 2, TWO, deep(), batches(), options)[0]
    require_equal(found, expected, 0.0)
    resumed = ranks.run(halves, 2, (TWO, LATER), deep(), batches(), options, tmp_path)[0][0]
    require_equal(resumed, expected, 0.0)
    # Muon computes in bfloat16, which makes more of a last bit.
    shared = ranks.run(run, 3, SPLIT, deep(), batches(), options)[0]
    require_equal(shared, expected, 1e-2 if groups else 1e-9)


@pytest.mark.parametrize("shards", ["optimizer", "weights"])
@pytest.mark.parametrize(
    ("optimizer", "groups", "complaint"),
    [
        (ADAFACTOR, {}, "the optimizer Adafactor steps otherwise on a part of a parameter"),
        (MUON, OTHERS, "treats every number alone, .*: Muon only supports 2D parameters"),
        (
            torch.optim.AdamW,
            {"weight": {"optimizer": MUON}},
            "treats every number alone, .*: Muon only supports 2D parameters",
        ),
    ],
)
def test_shares_of_matrices_are_refused(
    ranks: Ranks, shards: Any, optimizer: Any, groups: Any, complaint: str
) -> None:
    plan = make.gpipe([Stage((0, 4), ("d0", "d1"), shards=shards)], MICROBATCHES)
    options = {"optimizer": optimizer, "groups": groups, "dtype": torch.float64}
    with pytest.raises(Exception, match=complaint):
        ranks.run(run, 2, plan, deep(), batches(), options)


def test_a_parameter_that_an_optimizer_does_not_take_is_named() -> None:
    plan = make.gpipe(make.straight([4]), MICROBATCHES)
    with pytest.raises(InputError, match=r"parameter '\w+.*bias': Muon only supports 2D .* group"):
        Executor(plan, deep(), None, MUON)
    groups = {"bias": {"optimizer": torch.optim.AdamW, "momentum": 0.5}}
    with pytest.raises(InputError, match="group 'bias': AdamW has no 'momentum' for a group"):
        Executor(plan, deep(), None, torch.optim.SGD, groups=groups)


@pytest.mark.parametrize(
    ("group", "complaint"),
    [
        ("bias:optimizer=lion", "'lion' is not known; one of adadelta, adafactor"),
        ("bias:optimizer=adamw,momentum=1", "--parameter-group .*: adamw has no 'momentum'"),
        ("bias:optimizer=3", "'3' is not known"),
    ],
)
def test_groups_with_wrong_optimizers_are_refused(group: str, complaint: str) -> None:
    with pytest.raises(InputError, match=complaint):
        parse_groups([group], MUON)


@pytest.mark.skipif(find_spec("torchao") is not None, reason="torchao is installed")
def test_the_package_of_states_in_8_bits_is_named() -> None:
    with pytest.raises(InputError, match="adamw8bit is of torchao: pip install torchao"):
        parse_optimizer("adamw8bit")


@pytest.mark.parametrize("text", [IN_8_BITS])
def test_states_in_8_bits(ranks: Ranks, tmp_path: Path, text: str) -> None:
    """Their bytes are those in memory, also of a run that was resumed."""
    module, given = Wide(), batches(torch.float32)
    options = {"optimizer": parse_optimizer(text)}
    expected, _ = plain(module, options["optimizer"]([*module.parameters()]), given)
    plans = [make.one_f_one_b(make.straight(cut), MICROBATCHES) for cut in ([2, 1], [1, 2])]
    found = ranks.run(halves, 2, plans, Wide(), given, options, tmp_path)
    require_equal(found[0][0], expected, 1e-6)
    codes = 2 * (6 * 1024 + 3 * 4 * 1024)  # one byte for each of both moments
    numbers = 2 * 4 * (2 * 1024 + 2 * 4)
    assert codes + numbers < sum(sum(kept) for _, kept in found) < 1.5 * codes + numbers


# --- Scaled losses -------------------------------------------------------------------------------


class Steep(nn.Module):
    """The gradient of the first layer is 1e12 times that of its values."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.stem, self.head = nn.Linear(6, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        inner = self.stem(x)
        found: Tensor = self.head(inner + 1e12 * (inner - inner.detach()))
        return found


@pytest.mark.parametrize("devices", ["a", "ab"])
@pytest.mark.parametrize("clip", [float("inf"), 1e10])
def test_updates_are_left_out_in_all_stages(ranks: Ranks, devices: str, clip: float) -> None:
    """Only the first stage's gradients are infinite, until the scale has fallen."""
    given, lr = batches(torch.float32), 0.1
    scaler = partial(torch.amp.GradScaler, "cpu", 2.0**106, 2.0**10, 2.0**-20, 2)
    module = Steep()
    parts = ((module.stem, lr * 1e-12), (module.head, lr))
    stepping = torch.optim.SGD([{"params": [*one.parameters()], "lr": own} for one, own in parts])
    expected, scales = plain(module, stepping, given, scaler(), clip)
    assert [round(log2(one)) for one in scales] == [86, 86, 96, 76, 76, 86]
    options = {
        "optimizer": partial(torch.optim.SGD, lr=lr),
        "groups": {"stem": {"lr": lr * 1e-12}},
        "scaler": scaler(),
        "clip_norm": None if clip == float("inf") else clip,
    }
    plan = make.one_f_one_b([Stage((0, 1), tuple(devices)), Stage((1, 2), ("z",))], MICROBATCHES)
    found = ranks.run(run, 1 + len(devices), plan, Steep(), given, options)[0]
    require_equal(found, expected, 1e-5)


@pytest.mark.parametrize("loss", [F.cross_entropy, None], ids=["mean", "sum"])
def test_float16_is_scaled_and_resumed(ranks: Ranks, tmp_path: Path, loss: Any) -> None:
    """A sum, which the loss is without another one, is scaled as a mean after the first step."""
    given, sgd = batches(torch.float32), partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    module = deep().float()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**24, growth_interval=2)
    stepping = sgd([*module.parameters()])
    expected, scales = plain(module, stepping, given, deepcopy(scaler), autocast=torch.float16)
    assert scales[0] < 2.0**24  # the first update is left out
    assert scales[-1] != scales[2]  # and after the checkpoint the scale changes
    options = {"optimizer": sgd, "dtype": torch.float16, "scaler": scaler, "loss": loss}
    plans = TWO, LATER
    found = ranks.run(halves, 2, plans, deep().float(), given, options, tmp_path)[0][0]
    require_equal(found, expected, 1e-6)


@pytest.mark.parametrize("weights", ["stash", "double-buffer"])
def test_losses_are_scaled_under_flush_alone(weights: str) -> None:
    made = make.straight([4])
    plan = (
        make.one_f_one_b(made, MICROBATCHES, "stash")
        if weights == "stash"
        else make.overlapping(made, MICROBATCHES)
    )
    with pytest.raises(InputError, match=f"float16.* needs a finite plan .* '{weights}'"):
        Executor(plan, deep().float(), dtype=torch.float16)
