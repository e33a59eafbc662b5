"""Only the price list multiplies bytes by a bandwidth, and has one price of a collective."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from stagewright.formulations.parallelism.profiles.cluster import Route
from stagewright.formulations.plans.pipeline import PipelineProblem
from stagewright.formulations.prices.collectives import all_reduce_seconds
from stagewright.graphs.machines.cluster import Link, uniform_servers
from stagewright.graphs.machines.fabric import Fabric, Level
from stagewright.graphs.machines.groups import links
from stagewright.graphs.models.chain import Chain, Layer, LayerCost

ROOT = Path(__file__).parents[2]
ROOMS = ("graphs", "formulations", "solvers", "executor", "service", "stagewright/cli")
RATES = ("bytes_per_second", "seconds_per_byte", "bandwidth")
SAME = {"min", "max", "float", "abs", "minimum", "maximum", "append", "copy", "array", "asarray"}
ALLOWED = {
    "formulations/parallelism/profiles/cluster.py": "the bandwidth of a tensor group together",
    "formulations/pipelines/bppm.py": "a theorem's ratio of the best and the worst link",
    "graphs/machines/groups.py": "the bandwidth of a unit's ways out together",
    "graphs/machines/networks.py": "the part of a link's bandwidth that collectives reach",
    "graphs/machines/parts.py": "several links together, and links slower as measured",
    "graphs/machines/topology.py": "the part of NVLink's bandwidth that transfers reach",
    "graphs/models/operators/cost_book.py": "fits a link to measured transfers",
    "solvers/planners/baselines/hierarchy.py": "PipeDream's own model of a stage, in a kernel",
    "stagewright/cli/documents/clusters.py": "the bandwidth of an oversubscribed network",
    "stagewright/cli/documents/machines.py": "the bandwidth of several cards together",
}


def is_named(name: str) -> bool:
    return name.removesuffix("s").endswith(RATES)


def is_rate(node: ast.AST, named: set[str]) -> bool:
    """Whether an expression is a bandwidth, by its name or that of what it is taken from."""
    match node:
        case ast.Name(id=name):
            return is_named(name) or name in named
        case ast.Attribute(value=of, attr=name):
            return is_named(name) or (name in SAME and is_rate(of, named))
        case ast.Subscript(value=of) | ast.Starred(value=of):
            return is_rate(of, named)
        case ast.Call(func=function, args=args):
            name = getattr(function, "attr", getattr(function, "id", ""))
            taken = name in SAME and any(is_rate(one, named) for one in args)
            return taken or is_rate(function, named)
        case ast.IfExp(body=one, orelse=other):
            return is_rate(one, named) or is_rate(other, named)
    return False


def names_of_rates(tree: ast.AST) -> set[str]:
    """Names that a function gives to bandwidths."""
    found: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target, value = node.targets[0], node.value
            both = isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple)
            pairs = zip(target.elts, value.elts, strict=False) if both else [(target, value)]
            found |= {
                one.id for one, of in pairs if isinstance(one, ast.Name) and is_rate(of, found)
            }
    return found


def products(tree: ast.AST) -> Iterator[tuple[int, ast.AST, ast.AST]]:
    """Line and factors of products and quotients, but for a number times, or by a number."""
    for node in ast.walk(tree):
        match node:
            case ast.BinOp(left=ast.Constant(), op=ast.Mult()) | ast.BinOp(right=ast.Constant()):
                continue  # in another unit, or twice the bandwidth
            case (
                ast.BinOp(left=one, op=ast.Mult() | ast.Div(), right=other)
                | ast.AugAssign(target=one, op=ast.Mult() | ast.Div(), value=other)
            ):
                yield node.lineno, one, other


def is_ring(node: ast.AST) -> bool:
    """Whether an expression is (k - 1) / k of something, or a multiple."""
    match node:
        case ast.BinOp(left=ast.BinOp(op=ast.Mult(), right=above), op=ast.Div(), right=below):
            pass
        case ast.BinOp(left=above, op=ast.Div(), right=below):
            pass
        case _:
            return False
    return ast.unparse(above) == f"{ast.unparse(below)} - 1"


def priced(source: str) -> Iterator[int]:
    """Lines that multiply by a bandwidth or divide by it, or compute what a ring passes on."""
    if not any(one in source for one in (*RATES, "- 1) / ")):
        return
    for part in ast.iter_child_nodes(ast.parse(source)):
        for function in part.body if isinstance(part, ast.ClassDef) else [part]:
            named = names_of_rates(function)
            for line, *factors in products(function):
                if any(is_rate(one, named) for one in factors):
                    yield line
            yield from (node.lineno for node in ast.walk(function) if is_ring(node))


def test_only_the_price_list_multiplies_bytes_by_a_bandwidth() -> None:
    paths = [path.relative_to(ROOT) for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    found = [
        f"{path}:{line}"
        for path in paths
        if path.parent != Path("formulations/prices") and str(path) not in ALLOWED
        for line in priced((ROOT / path).read_text(encoding="utf-8"))
    ]
    assert not found, f"ask stagewright.formulations.prices instead: {found}"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ("def f(n, link): return n / link.bandwidth_bytes_per_second", [1]),
        ("def f(n, way): return n * (1 / way.pair_bytes_per_second)", [1]),
        ("def f(n, a, i, j): return a.latency[i, j] + n * a.seconds_per_byte[i, j]", [1]),
        ("def f(n, at):\n    rate = float(at.bandwidths().min())\n    return n / rate", [3]),
        ("class A:\n    def f(self, n, x):\n        n /= x.bandwidth\n        return n", [3]),
        ("def f(k, n): return 2 * (k - 1) / k * n", [1]),
        ("def f(link): return 2 * link.bandwidth_bytes_per_second / 1e9", []),
        ("def f(n, link): return link_seconds(n, link.bandwidth_bytes_per_second)", []),
    ],
)
def test_what_a_price_is(source: str, lines: list[int]) -> None:
    assert [*priced(source)] == lines


RATE, LATENCY, BYTES = 12.5e9, 20e-6, 100e6


@pytest.mark.parametrize("k", [2, 8, 64, 256, 1024])
def test_an_all_reduce_costs_a_plan_a_layout_and_a_profiled_layout_the_same(k: int) -> None:
    layer = Layer("a", BYTES, (LayerCost(k, 1.0, 1e6, 1e6, backward_seconds=1.0),))
    link = Link(RATE, LATENCY)
    problem = PipelineProblem(Chain("c", "x", k, (layer,)), uniform_servers(k, 1, link, link), 1)
    group = links(Fabric("x", 1e9, (Level("network", k, RATE, LATENCY),)), ((1, k),))
    expected = 2 * (k - 1) * (BYTES / k / RATE + LATENCY)
    assert [
        problem.reduce_seconds(0, 1, range(k)),
        all_reduce_seconds(group, BYTES),
        Route(RATE, RATE, LATENCY).reduce_seconds(BYTES, k),
    ] == pytest.approx([expected] * 3, rel=1e-12)
