"""The examples run, and the README's code does what it says."""

import importlib
import os
import re
import runpy
from collections.abc import Callable
from importlib.util import find_spec
from itertools import islice
from pathlib import Path

import pytest
from documentation import (
    EXAMPLES,
    README,
    ROOT,
    as_a_script,
    blocks,
    in_this_process,
    require_passage,
    require_schemas,
    run,
    spelled,
)
from profiles import slow_after

from stagewright.formulations.parallelism.document import load_layout
from stagewright.formulations.plans.plan import load_plan
from stagewright.graphs.machines.cluster import load_cluster
from stagewright.graphs.models.chain import load_model
from stagewright.graphs.models.layer_profiles import load_layer_profiles

pytestmark = pytest.mark.real

OPERATORS = ROOT / "docs/operators-of-a-step.md"
PROFILES = sorted((EXAMPLES / "profiles").glob("*.json"))
CLUSTERS = sorted((EXAMPLES / "clusters").glob("*.json"))
DEVICES = sorted((EXAMPLES / "devices").glob("*.json"))


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder to write to, with the examples where the README's commands expect them."""
    (tmp_path / "examples").symlink_to(EXAMPLES)
    return tmp_path


def test_the_python_example_plans(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, training = blocks(README, "python")
    monkeypatch.chdir(place)
    shortened = code.replace("time_limit=10", "time_limit=1")
    assert shortened != code
    exec(compile(shortened, "README.md", "exec"), {})
    assert "layers (0, " in capsys.readouterr().out
    exec(compile(f"import stagewright\n{training}", "README.md", "exec"), {})
    assert ": llama on 16 h100, " in capsys.readouterr().out
    plan = load_plan(place / "plan.json")
    assert plan.model == "bert-large"
    assert plan.certificate is not None


@pytest.mark.parametrize("execute", slow_after(1, [in_this_process, as_a_script]))
def test_the_walk_through_runs_as_written(
    place: Path, monkeypatch: pytest.MonkeyPatch, execute: Callable[[str], str]
) -> None:
    (model,) = blocks(README, "json")
    (place / "model.json").write_text(model, encoding="utf-8")
    monkeypatch.delenv("COLUMNS", raising=False)  # the width without a terminal
    monkeypatch.chdir(place)
    printed = execute("".join(blocks(README, "sh")))
    assert require_schemas(place) == {"model", "cluster", "plan", "layout"}
    plan = load_plan(place / "plan.json")
    assert plan.stages[-1].layers[1] == len(load_model(place / "model.json"))
    page = (place / "timeline.html").read_text(encoding="utf-8")
    assert page.lower().startswith("<!doctype html>")
    assert (place / "timeline.png").read_bytes().startswith(b"\x89PNG")
    # What the README and a page say of this output.
    require_passage("layout", spelled(load_layout(place / "layout.json").layout))
    (table,) = re.findall(r"^ layout +time +MFU .*?^transformer-70b", printed, re.DOTALL | re.M)
    assert len(re.findall(r" \d+\.\d% ", table)) == 10
    assert "bound" in printed


@pytest.mark.slow
def test_the_documentation_trains_by_plans(place: Path) -> None:
    pytest.importorskip("torch", reason="running a plan needs torch")
    pipeline, hugging_face = blocks(README, "bash")
    operators, learning = blocks(OPERATORS, "bash")
    assert "examples.hugging_face" in hugging_face
    for commands, told in (
        (pipeline, r"10 steps on \d ranks"),
        (operators, r"20 steps on 2 ranks"),
        (learning, r"100 steps on \d rank.* by the plan of round \d"),
    ):
        output = run(["bash", "-euc", commands], place)
        assert re.search(told, output)
        if commands is not learning:
            assert "measured / predicted" in output
            assert (place / "compared.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_the_readme_trains_a_model_of_hugging_face(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch", reason="running a plan needs torch")
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    # Commands of the test find a torchvision that may be of another build than torch.
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests/shared/site'}{os.pathsep}{ROOT}")
    output = run(["bash", "-euc", blocks(README, "bash")[1]], place)
    assert re.search(r"10 steps on \d ranks", output)
    assert "transformer.wte.weight" in torch.load(place / "gpt2.pt")


@pytest.mark.slow
def test_devices_divide_a_model_as_the_documentation_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters after three steps are those of a plain loop."""
    torch = pytest.importorskip("torch", reason="running a plan needs torch")
    if find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    from benchmarks.plain_loop import loop

    # Commands of the test find a torchvision that may be of another build than torch.
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'tests/shared/site'}{os.pathsep}{ROOT}")
    (commands,) = blocks(ROOT / "docs/layouts.md", "bash")
    output = run(["bash", "-euc", commands], tmp_path)
    assert "llama.plan.json: valid" in output
    assert "3 steps on 4 ranks" in output
    found = torch.load(tmp_path / "llama.pt")
    importlib.import_module("benchmarks.torchvision_operators")
    network = importlib.import_module("examples.hugging_face")
    torch.manual_seed(0)
    model, data = network.llama().double(), list(islice(network.batches(), 3))
    expected = loop(model, data, 4, lambda parameters: torch.optim.SGD(parameters, lr=0.1)).state
    for name, one in expected.items():  # the model's own norms and loss are in float32
        torch.testing.assert_close(found[name], one, rtol=1e-6, atol=1e-8, msg=name)


@pytest.mark.parametrize("path", PROFILES, ids=lambda path: path.stem)
def test_profiles_are_complete(path: Path) -> None:
    chain = load_model(path)
    assert chain.source.startswith("measured: " if ".cpu." in path.name else "analytic: ")
    for layer in chain.layers:
        assert chain.microbatch_size in {cost.microbatch_size for cost in layer.costs}
        for cost in layer.costs:
            assert cost.forward_seconds > 0
            assert cost.output_bytes > 0


@pytest.mark.parametrize("path", [path for path in PROFILES if ".cpu." in path.name])
def test_measured_profiles_name_the_machine_and_several_sizes(path: Path) -> None:
    chain = load_model(path)
    assert re.search(r"torch \d+\.\d+.* on 1 of \d+ cores of .+; medians of \d+", chain.source)
    for layer in chain.layers:
        assert len(layer.costs) >= 2
        assert layer.parameter_bytes > 0


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda path: path.stem)
def test_clusters_are_named_after_their_files(path: Path) -> None:
    assert load_cluster(path).name == path.stem


def test_documents_are_those_that_the_script_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = runpy.run_path(str(EXAMPLES / "documents.py"))
    monkeypatch.setitem(script["main"].__globals__, "HERE", tmp_path)
    script["main"]()
    written = sorted(tmp_path.rglob("*.json"))
    kept = {path for path in (*PROFILES, *CLUSTERS, *DEVICES) if ".cpu." not in path.name}
    assert {path.relative_to(tmp_path) for path in written} == {
        path.relative_to(EXAMPLES) for path in kept
    }
    for path in written:
        assert path.read_text() == (EXAMPLES / path.relative_to(tmp_path)).read_text()


def test_layer_profiles_are_those_that_the_script_writes() -> None:
    script = runpy.run_path(str(EXAMPLES / "layer_profiles.py"))
    (path,) = (EXAMPLES / "layers").glob("*.json")
    assert load_layer_profiles(path) == script["profiles"]()
