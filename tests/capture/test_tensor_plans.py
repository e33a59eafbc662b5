"""Whose plan says how a model is divided."""

from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="capturing needs torch")

from torch import nn  # noqa: E402

from stagewright.executor.capture.tensor_plans import PLANS, plans_in  # noqa: E402


class OfLibrary(nn.Linear):
    """A model with the plan of its architecture, as those of transformers have it."""

    def __init__(self, plan: Any) -> None:
        super().__init__(2, 2)
        self._tp_plan = plan

    @property
    def tp_plan(self) -> Any:
        """The plan."""
        return self._tp_plan


class Wrapper(nn.Module):
    """A module around another."""

    def __init__(self, inner: nn.Module, plan: Any = None) -> None:
        super().__init__()
        self.inner = inner
        if plan is not None:
            self.tp_plan = plan


def outer(plan: Any, inner: nn.Module) -> OfLibrary:
    model = OfLibrary(plan)
    model.inner = inner
    return model


def found(model: nn.Module) -> list[tuple[str, str, Any, bool]]:
    return [(one.path, one.kind, one.rules, one.is_of_architecture) for one in plans_in(model)]


ONE, OTHER = {"a": "colwise"}, {"b": "rowwise"}


def test_the_outermost_model_of_the_library_has_the_plan() -> None:
    model = outer(ONE, Wrapper(OfLibrary(OTHER)))
    assert found(model) == [("", "OfLibrary", ONE, True)]
    assert found(Wrapper(model)) == [("inner", "OfLibrary", ONE, True)]
    assert found(outer({}, OfLibrary(OTHER))) == [("inner", "OfLibrary", OTHER, True)]
    assert found(OfLibrary(None)) == []


def test_a_module_of_the_users_has_its_own() -> None:
    model = outer(ONE, Wrapper(nn.Linear(2, 2), OTHER))
    assert found(model) == [("", "OfLibrary", ONE, True), ("inner", "Wrapper", OTHER, False)]
    assert found(Wrapper(nn.Linear(2, 2), {})) == [("", "Wrapper", {}, False)]


def test_an_architecture_without_a_plan_may_have_one_here() -> None:
    (name,) = PLANS
    module, _, kind = name.rpartition(".")
    block = type(kind, (nn.Linear,), {"__module__": module, "__qualname__": kind})(2, 2)
    assert found(Wrapper(block)) == [("inner", kind, PLANS[name], False)]
    block.tp_plan = ONE
    assert found(Wrapper(block)) == [("inner", kind, ONE, False)]


@pytest.mark.parametrize(
    ("path", "name", "inner"),
    [
        ("", "a.b", "a.b"),
        ("a", "a.b", "b"),
        ("a", "a", ""),
        ("a", "ab.c", None),
        ("a.b", "a", None),
    ],
)
def test_names_within_a_module(path: str, name: str, inner: str | None) -> None:
    model: nn.Module = Wrapper(nn.Linear(2, 2), ONE)
    for part in reversed(path.split(".") if path else []):
        around = nn.Module()
        around.add_module(part, model)
        model = around
    (plan,) = plans_in(model)
    assert plan.path == path
    assert plan.inner(name) == inner
