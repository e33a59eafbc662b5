import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.models.chain import (
    Chain,
    Layer,
    LayerCost,
    load_model,
    profile_on,
    save_model,
    update_seconds_on,
)

CHAIN = Chain(
    "two",
    "measured: by hand",
    4,
    (
        Layer(
            "first",
            1e6,
            (
                LayerCost(2, 0.2, 20.0, 10.0, backward_seconds=0.4, device_kind="v100"),
                LayerCost(4, 0.3, 40.0, 20.0, backward_seconds=0.6, device_kind="v100"),
                LayerCost(4, 0.9, 40.0, 20.0, backward_seconds=1.8),
            ),
        ),
        Layer(
            "second",
            2e6,
            (
                LayerCost(
                    4,
                    0.1,
                    5.0,
                    7.0,
                    input_gradient_seconds=0.1,
                    weight_gradient_seconds=0.2,
                    device_kind="v100",
                ),
                LayerCost(4, 0.5, 5.0, 7.0, backward_seconds=0.9),
            ),
        ),
    ),
)


def test_parts_may_take_longer_than_the_whole_backward():
    cost = LayerCost(1, 1.0, 0.0, 0.0, 2.0, 1.5, 1.0)
    problem = PipelineProblem(
        Chain("m", "test", 1, (Layer("l", 0.0, (cost,)),)), uniform_servers(1, 1, Link(1e9)), 1
    )
    assert problem.compute_seconds(0, 1, (0,)) == (1.0, 2.0)
    assert problem.gradient_seconds(0, 1, (0,)) == (1.5, 1.0)
    assert problem.layer_with_whole_backward(0, 1) is None
    kind = problem.kinds[0]
    assert problem.least_backward(kind, 1) == (1.5, 2.0)
    without = replace(
        problem,
        chain=replace(
            problem.chain, layers=(Layer("l", 0.0, (replace(cost, backward_seconds=None),)),)
        ),
    )
    assert without.compute_seconds(0, 1, (0,)) == (1.0, 2.5)
    assert without.digest != problem.digest


def test_costs_are_interpolated_between_measured_sizes():
    costs = profile_on(CHAIN, "v100").at(3)
    np.testing.assert_allclose(costs.forward_seconds, [0.25, 0.075])
    np.testing.assert_allclose(costs.backward_seconds, [0.5, 0.225])
    np.testing.assert_allclose(costs.saved_bytes, [30, 3.75])
    np.testing.assert_allclose(costs.output_bytes, [15, 5.25])


def test_costs_below_the_measured_sizes_are_proportional():
    np.testing.assert_allclose(profile_on(CHAIN, "v100").at(1).forward_seconds, [0.1, 0.025])


@pytest.mark.parametrize("size", [1, 3, 8])
def test_a_microbatch_outside_of_the_measured_sizes_is_refused(size):
    chain = replace(CHAIN, microbatch_size=size)
    with pytest.raises(InputError, match=rf"microbatch_size is {size}, layer '.*' has costs for"):
        profile_on(chain, "v100")


def test_the_optimizers_step_is_one_figure_of_a_device_kind():
    first, *others = CHAIN.layers
    costs = tuple(replace(cost, update_seconds=0.5) for cost in first.costs)
    chain = replace(CHAIN, layers=(replace(first, costs=costs), *others))
    np.testing.assert_allclose(update_seconds_on(chain, "v100"), [0.5, 0.0])
    with pytest.raises(InputError, match="the same at every microbatch size"):
        replace(first, costs=(costs[0], *first.costs[1:]))


def test_another_device_kind_falls_back_on_the_costs_for_any_device():
    np.testing.assert_allclose(profile_on(CHAIN, "k80").at(4).forward_seconds, [0.9, 0.5])


def test_a_kind_without_costs_is_refused():
    only_v100 = replace(
        CHAIN,
        layers=tuple(
            replace(layer, costs=tuple(c for c in layer.costs if c.device_kind))
            for layer in CHAIN.layers
        ),
    )
    with pytest.raises(InputError, match=r"costs for 'v100', the cluster has .* 'k80'"):
        profile_on(only_v100, "k80").at(4)


@given(st.integers(1, 4), st.integers(1, 4))
def test_costs_never_fall_when_samples_grow(one, other):
    small, large = sorted((one, other))
    few, many = profile_on(CHAIN, "v100").at(small), profile_on(CHAIN, "v100").at(large)
    assert (few.forward_seconds <= many.forward_seconds * (1 + 1e-12)).all()
    assert (few.saved_bytes <= many.saved_bytes * (1 + 1e-12)).all()


def test_a_model_survives_its_file(tmp_path: Path):
    save_model(CHAIN, tmp_path / "model.json")
    loaded = load_model(tmp_path / "model.json")
    assert loaded == CHAIN
    assert loaded.digest() == CHAIN.digest()
    assert list(tmp_path.iterdir()) == [tmp_path / "model.json"]


def test_any_change_of_the_model_changes_its_digest():
    faster = replace(CHAIN.layers[0].costs[0], forward_seconds=0.2000001)
    layer = replace(CHAIN.layers[0], costs=(faster, *CHAIN.layers[0].costs[1:]))
    assert replace(CHAIN, layers=(layer, CHAIN.layers[1])).digest() != CHAIN.digest()


def _document(tmp_path: Path) -> dict:
    save_model(CHAIN, tmp_path / "model.json")
    return json.loads((tmp_path / "model.json").read_text())


def _set(document: dict, path: tuple, value: object) -> None:
    for key in path[:-1]:
        document = document[key]
    document[path[-1]] = value


FIRST_COST = ("layers", 0, "costs", 0)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("version",), 2, "version 2 is not known; this release reads 1"),
        (("format",), "stagewright-cluster", "expected a 'stagewright-model' document"),
        (("layers",), [], "model 'two' has no layers"),
        (("microbatch_size",), 0, "microbatch_size must be at least 1, got 0"),
        (("colour",), "red", "colour: unknown field"),
        ((*FIRST_COST, "forward_ms"), 3, r"layers\[0\]\.costs\[0\]\.forward_ms: unknown field"),
        ((*FIRST_COST, "forward_seconds"), -1, r"forward_seconds must be finite and not negative"),
        ((*FIRST_COST, "forward_seconds"), 1e6, "times are seconds"),
        ((*FIRST_COST, "output_bytes"), 1e308, "are the sizes in bytes"),
        ((*FIRST_COST, "forward_seconds"), "fast", r"forward_seconds: .*got 'fast'"),
        ((*FIRST_COST, "update_seconds"), -1, r"update_seconds must be finite and not negative"),
        (("layers", 0, "min_samples"), 0, "min_samples must be at least 1, got 0"),
        ((*FIRST_COST, "backward_seconds"), None, "give backward_seconds, or both"),
        ((*FIRST_COST, "input_gradient_seconds"), 1, "give backward_seconds, or both"),
        ((*FIRST_COST, "microbatch_size"), 4, "two costs for one device kind and size"),
        ((*FIRST_COST, "saved_bytes"), float("nan"), r"saved_bytes: .*finite"),
        (("layers", 1, "name"), "first", "two layers are named 'first'"),
        (("layers", 1, "parameter_bytes"), -2, "parameter_bytes must be finite and not negative"),
        (("layers", 1, "costs", 0, "device_kind"), "k80", "every layer needs the same kinds"),
    ],
)
def test_bad_documents_get_one_line(tmp_path: Path, path, value, message):
    document = _document(tmp_path)
    _set(document, path, value)
    file = tmp_path / "bad.json"
    file.write_text(json.dumps(document))
    with pytest.raises(InputError, match=message) as caught:
        load_model(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_a_truncated_document_gets_one_line(tmp_path: Path):
    save_model(CHAIN, tmp_path / "model.json")
    text = (tmp_path / "model.json").read_text()
    (tmp_path / "model.json").write_text(text[: len(text) // 2])
    with pytest.raises(InputError, match="not a complete JSON document"):
        load_model(tmp_path / "model.json")


def test_missing_and_binary_files_get_one_line(tmp_path: Path):
    with pytest.raises(InputError, match="No such file"):
        load_model(tmp_path / "absent.json")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="not a text file"):
        load_model(tmp_path / "binary")


def test_writing_into_a_missing_folder_leaves_nothing_behind(tmp_path: Path):
    with pytest.raises(InputError, match="cannot be written"):
        save_model(CHAIN, tmp_path / "absent" / "model.json")
    assert list(tmp_path.iterdir()) == []
