"""``train-plan`` on servers of several kinds, and ``check`` of what ``train-plan`` wrote."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from stagewright.cli.commands import ask, spelling
from stagewright.cli.console import kept, percent, print_answer, print_table, say, tell
from stagewright.cli.options import read_by_kind, read_groups
from stagewright.cli.solving import find
from stagewright.graphs.documents.documents import format_name, format_of, read_text, write_file
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import counted, format_seconds

if TYPE_CHECKING:
    from stagewright.cli.layouts.layouts import TrainPlanOptions
    from stagewright.formulations.parallelism.profiles.cluster import Pool, ServerPools
    from stagewright.formulations.parallelism.profiles.pipelines import ProfiledProblem
    from stagewright.graphs.machines.cluster import Cluster
    from stagewright.graphs.models.architecture import Architecture
    from stagewright.service.layouts.mixed import MixedProblem
    from stagewright.service.layouts.profiled import (
        CheckProfiledAnswer,
        ProfiledAnswer,
    )
    from stagewright.service.layouts.requests import CheckLayoutAnswer

BOTH = ("global_batch", "time_limit", "server", "cluster", "server_bandwidth", "network_bandwidth",
        "memory", "reserve", "png", "output", "as_json")  # fmt: skip
"""Options of train-plan that apply to layer profiles too, which also have ``servers``."""
MIXED = (*BOTH, "servers", "sequence", "precision", "attention", "tensor", "microbatch_sizes",
         "images", "encoder_tokens")  # fmt: skip
"""Options that apply to a config.json on servers of several kinds."""


def is_profiles(path: Path) -> bool:
    """Whether a file has layer profiles; a folder with a config.json, or a model by name, has not.

    Raises
    ------
    InputError
        If it is a file or folder of profiles that are not imported yet.
    """
    from stagewright.graphs.importers.hf_hub import is_model
    from stagewright.graphs.models.layer_profiles import LayerProfiles

    if is_model(path):
        return False
    source = _foreign(path)
    if source is not None:
        what = "has no config.json" if path.is_dir() else f"seems to be a profile of {source}"
        raise InputError(
            f"{path} {what}; import profiles first: stagewright import {path} --from {source} "
            "--config config.json --sequence 2048 -o profiles.json"
        )
    return format_of(path) == format_name(LayerProfiles)


def _foreign(path: Path) -> str | None:
    """The project that seems to have written these profiles; None if none does."""
    from pydantic_core import from_json

    if path.is_dir():
        return "metis" if any(path.glob("DeviceType.*.json")) else "sailor"
    try:
        found = from_json(read_text(path))
    except ValueError:
        return None
    if not isinstance(found, dict) or not found:
        return None
    if "execution_time" in found:
        return "metis"
    return "sailor" if all(key.isdecimal() for key in found) else None


def on_command_line(context: typer.Context) -> list[str]:
    """The names of the parameters that the command line gives."""
    return [
        name
        for name in context.params
        if context.get_parameter_source(name).name == "COMMANDLINE"  # type: ignore[union-attr]
    ]


def require_options(context: typer.Context, path: Path, are_profiles: bool) -> None:
    """Refuse options that were given and do not apply to what is planned."""
    given = [name for name in on_command_line(context) if name != "config"]
    if are_profiles:
        known, what = {*BOTH, "servers"}, f"{path}, which is a file of layer profiles"
    elif "servers" in given:
        known, what = {*MIXED} - {"cluster"}, "a config.json on --servers"
    else:
        return
    stray = [name for name in given if name not in known]
    if stray:
        options = ", ".join(_option(context, name) for name in stray)
        apply = "does not apply" if len(stray) == 1 else "do not apply"
        raise InputError(f"{options} {apply} to {what}")


def _option(context: typer.Context, name: str) -> str:
    return next(one.opts[0] for one in context.command.params if one.name == name)


def plan_servers(
    given: "TrainPlanOptions", config: Path, architecture: "Architecture | None"
) -> int:
    """Find the fastest plan on servers of several kinds; exit code 1 if none fits.

    The layers were measured, or are computed for an architecture.
    """
    from stagewright.formulations.parallelism.profiles.document import save_profiled_plan
    from stagewright.service.layouts.inputs import renamed
    from stagewright.service.layouts.mixed import within_rates
    from stagewright.service.layouts.profiled import ProfiledAnswer, ProfiledRequest

    batch = given.global_batch
    if batch is None:
        raise InputError(f"{config} needs --global-batch, the samples between two updates")
    with spelling(type(given)), renamed(batch="global_batch", reserve_bytes="reserve"):
        mixed = None if architecture is None else _mixed(given, architecture)
        problem = _profiled(given, config, batch) if mixed is None else mixed.problem
    name = problem.profiles.name if mixed is None else config.name
    request = ask(ProfiledRequest, problem=problem, time_limit=given.time_limit)
    answer = find(ProfiledAnswer, request, f"planning {name}", given.server)
    if mixed is not None:
        answer = within_rates(answer, mixed)
    if answer.plan is not None and given.png is not None:
        _draw(given.png, f"{name}, batch {batch}", answer)
    written = kept(answer.plan, given, save_profiled_plan)
    tell(
        answer,
        given,
        lambda answer: _print(name, batch, answer),
        (given.png, *written) if answer.plan is not None else (),
    )
    return 0 if answer.plan is not None else 1


def _profiled(given: "TrainPlanOptions", file: Path, batch: int) -> "ProfiledProblem":
    """The problem of measured layers."""
    from stagewright.graphs.models.layer_profiles import load_layer_profiles
    from stagewright.service.layouts.inputs import size_of
    from stagewright.service.layouts.problems import profiled_problem

    profiles = load_layer_profiles(file)
    pools = read_server_pools(given.servers, given.cluster, _rates(given), profiles.device_kinds)
    reserve = size_of(given.reserve, "reserve")
    return profiled_problem(profiles, pools, batch=batch, reserve_bytes=reserve)


def _mixed(given: "TrainPlanOptions", architecture: "Architecture") -> "MixedProblem":
    """The problem of the layers of an architecture, computed for each kind."""
    from stagewright.graphs.machines.devices import ACCELERATORS
    from stagewright.graphs.machines.networks import fabric_of_kind
    from stagewright.service.layouts.inputs import size_of
    from stagewright.service.layouts.mixed import MICROBATCHES, TENSOR_DEGREES, mixed_problem

    kinds = {kind.strip().lower() for kind, _, _ in read_groups(given.servers or "", "--servers")}
    for kind in sorted(kinds - ACCELERATORS.keys()):
        raise InputError(f"--servers: {kind!r} is none of {', '.join(sorted(ACCELERATORS))}")
    pools = read_server_pools(given.servers, None, _rates(given), sorted(kinds))
    problems = {}
    for pool in sorted(pools.pools, key=lambda one: one.devices):  # the largest server of a kind
        fabric = fabric_of_kind(
            pool.device_kind,
            pool.devices,
            per_server=pool.devices,
            server_bandwidth=None if pool.inside is None else pool.inside.device_bytes_per_second,
            memory_bytes=pool.memory_bytes,
        )
        problems[pool.device_kind] = given.problem(architecture, fabric)
    return mixed_problem(
        problems,
        pools,
        precision=given.precision,
        tensor=given.tensor or TENSOR_DEGREES,
        microbatches=given.microbatch_sizes or MICROBATCHES,
        reserve_bytes=size_of(given.reserve, "reserve"),
    )


def _rates(given: "TrainPlanOptions") -> dict[str, Any]:
    names = ("memory", "server_bandwidth", "network_bandwidth")
    return {name: getattr(given, name) for name in names}


def read_server_pools(
    servers: str | None,
    cluster: "Cluster | None",
    rates: dict[str, str | None],
    kinds: Sequence[str],
) -> "ServerPools":
    """The servers of the options, or of a cluster file.

    ``rates`` are the texts of ``memory``, ``server_bandwidth`` and ``network_bandwidth``: a value
    for all kinds, or values by kind; ``kinds`` those that were profiled.
    """
    from stagewright.formulations.parallelism.profiles.cluster import ServerPools, server_pools

    if (servers is None) == (cluster is None):
        raise InputError(
            "layer profiles need one of --servers, for example a100:2x4,v100:3x8 (2 servers of 4, "
            "3 of 8), and --cluster FILE"
        )
    if cluster is not None:
        stray = [f"--{name.replace('_', '-')}" for name, text in rates.items() if text is not None]
        if stray:
            raise InputError(f"{', '.join(stray)}: the cluster file says it; leave it out")
        return server_pools(cluster)
    found = _shapes(servers or "", kinds)
    by_kind = {name: _by_kind(name, text, kinds) for name, text in rates.items()}
    is_alone = [count for _, count, _ in found] == [1]
    return ServerPools(tuple(_pool(*one, by_kind, is_alone) for one in found))


def _shapes(text: str, kinds: Sequence[str]) -> list[tuple[str, int, int]]:
    """Kind, servers and devices of a server of every pool."""
    return [
        (_measured(kind, kinds, "--servers"), servers, devices)
        for kind, servers, devices in read_groups(text, "--servers")
    ]


def _measured(kind: str, kinds: Sequence[str], option: str) -> str:
    """The kind of device, spelled as in the profiles."""
    for one in kinds:
        if one.lower() == kind.strip().lower():
            return one
    raise InputError(f"{option}: {kind.strip()!r} was not profiled, only {', '.join(kinds)}")


def _by_kind(name: str, text: str | None, kinds: Sequence[str]) -> dict[str, float]:
    """The value of each kind; none is given where the text is None."""
    from stagewright.graphs.documents.units import parse_bandwidth, parse_bytes

    option = f"--{name.replace('_', '-')}"
    parse: Callable[[str, str], float] = parse_bytes if name == "memory" else parse_bandwidth
    return read_by_kind(
        text, option, parse, kinds, lambda kind, option: _measured(kind, kinds, option)
    )


def _pool(
    kind: str, servers: int, devices: int, by_kind: dict[str, dict[str, float]], is_alone: bool
) -> "Pool":
    from stagewright.formulations.parallelism.profiles.cluster import pool_of_kind

    inside = by_kind["server_bandwidth"].get(kind)
    between = by_kind["network_bandwidth"].get(kind)
    given = {
        "memory": by_kind["memory"].get(kind),
        "server-bandwidth": between if inside is None and devices == 1 else inside,
        "network-bandwidth": inside if between is None and is_alone else between,
    }
    _require_known(kind, given)
    return pool_of_kind(
        kind,
        servers,
        devices,
        memory_bytes=given["memory"],
        server_bandwidth=given["server-bandwidth"],
        network_bandwidth=given["network-bandwidth"],
    )


def _require_known(kind: str, given: dict[str, float | None]) -> None:
    """Name all that is missing of a kind that is not in the table of accelerators."""
    from stagewright.graphs.machines.devices import ACCELERATORS

    missing = [f"--{name}" for name, value in given.items() if value is None]
    if missing and kind.lower() not in ACCELERATORS:
        example = f"{missing[0]} {kind}={'40GB' if missing[0] == '--memory' else '10GB/s'}"
        raise InputError(
            f"{kind} is none of the kinds that are known ({', '.join(ACCELERATORS)}): give "
            f"{', '.join(missing)}, for example {example}"
        )


def _draw(png: Path, title: str, answer: "ProfiledAnswer") -> None:
    from stagewright.executor.drawing.charts.layouts import stages_png

    seconds = format_seconds(answer.iteration_seconds or 0.0)
    write_file(png, stages_png(answer.stages, f"{title}: {seconds} per iteration"))


def _print(name: str, batch: int, answer: "ProfiledAnswer") -> None:
    from stagewright.service.layouts.told.measured import profiled_tables

    bound = format_seconds(answer.bound_seconds) if answer.bound_seconds is not None else "-"
    if answer.iteration_seconds is None:
        say(
            f"{name}: {answer.status}", *([answer.reason] if answer.reason else []), *answer.remarks
        )
        return
    for table in profiled_tables(answer):
        print_table(table.head, table.rows)
    each = " and ".join(
        f"{counted(pipelines, 'pipeline', 'pipelines')} of {number} microbatches"
        for number, pipelines in Counter(answer.microbatches).items()
    )
    say(
        f"{each} of {counted(answer.microbatch_size or 0, 'sample', 'samples')}",
        f"{name}: {format_seconds(answer.iteration_seconds)} per iteration, "
        f"{answer.samples_per_second or 0.0:.4g} samples/s ({answer.status} by the model), bound "
        f"{bound} by {answer.proved_by}, gap {percent(answer.gap)}, {answer.wall_seconds:.2f} s",
        f"of all plans of the class: {answer.plan_class}",
        *answer.remarks,
    )


def is_layout(path: Path) -> bool:
    """Whether a file is a layout; a folder with a config.json, or a model by name, is not."""
    from stagewright.formulations.parallelism.document import LayoutPlan
    from stagewright.graphs.importers.hf_hub import is_model

    return not is_model(path) and format_of(path) == format_name(LayoutPlan)


def check_layout(path: Path, as_json: bool) -> int:
    """Compute a layout's time and memory again, and print what differs; exit code 1 if any."""
    from stagewright.formulations.parallelism.document import load_layout, violations

    plan = load_layout(path)
    return _print_checked(path, _checked(violations(plan)), as_json, plan.iteration_seconds)


def check_profiled(path: Path, as_json: bool) -> int:
    """Compute a plan's time and memory again, and print what differs; exit code 1 if any."""
    from stagewright.formulations.parallelism.profiles.document import load_profiled_plan
    from stagewright.service.layouts.profiled import CheckProfiledRequest, check_profiled_plan

    request = ask(CheckProfiledRequest, document=load_profiled_plan(path))
    answer = check_profiled_plan(request)
    return _print_checked(path, answer, as_json, answer.iteration_seconds)


def check_tuning(path: Path, as_json: bool) -> int:
    """Compute a tuning's predictions and claim again, and print what differs; exit code 1 if any.

    The search that proved the bound on all other layouts is not run again.
    """
    from stagewright.formulations.parallelism.trials import load_tuning, violations
    from stagewright.solvers.parallelism.tree import compiled_walk

    return _print_checked(path, _checked(violations(load_tuning(path), compiled_walk())), as_json)


def _checked(violations: tuple[str, ...]) -> "CheckLayoutAnswer":
    from stagewright.service.layouts.requests import CheckLayoutAnswer

    return CheckLayoutAnswer(status="invalid" if violations else "valid", violations=violations)


def _print_checked(
    path: Path,
    answer: "CheckLayoutAnswer | CheckProfiledAnswer",
    as_json: bool,
    seconds: float | None = None,
) -> int:
    """What is wrong with a document, or that it is valid, with the ``seconds`` of a plan."""
    time = "" if seconds is None else f", {format_seconds(seconds)} per iteration"
    again = f"not run again: {'tune' if seconds is None else 'train-plan'} does"
    if as_json:
        print_answer(answer)
    else:
        valid = f"valid{time}; the search behind its bound is {again}"
        say(*(f"{path}: {one}" for one in answer.violations or (valid,)))
    return 1 if answer.violations else 0
