"""``train-plan`` on servers of several kinds, and ``check`` of what ``train-plan`` wrote."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from stagewright.cli import interruptible
from stagewright.cli.commands import ask, with_option
from stagewright.cli.console import kept, percent, print_answer, print_table, progress, say, tell
from stagewright.cli.layouts.inputs import read_groups, read_server_pools
from stagewright.graphs.documents.documents import format_of, read_text, write_bytes
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import counted, format_bytes, format_seconds, parse_bytes
from stagewright.graphs.machines.devices import ACCELERATORS
from stagewright.service.options import whole_numbers

if TYPE_CHECKING:
    from stagewright.cli.layouts.layouts import TrainPlanOptions
    from stagewright.formulations.parallelism.profiles.pipelines import ProfiledProblem
    from stagewright.service.layouts.mixed import MixedProblem
    from stagewright.service.layouts.profiled import (
        CheckProfiledAnswer,
        ProfiledAnswer,
        ProfiledPoolAnswer,
    )
    from stagewright.service.layouts.requests import CheckLayoutAnswer

BOTH = ("global_batch", "time_limit", "cluster", "server_bandwidth", "network_bandwidth", "memory",
        "reserve", "png", "output", "as_json")  # fmt: skip
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
    from stagewright.graphs.models.layer_profiles import FORMAT

    if is_model(path):
        return False
    source = _foreign(path)
    if source is not None:
        what = "has no config.json" if path.is_dir() else f"seems to be a profile of {source}"
        raise InputError(
            f"{path} {what}; import profiles first: stagewright import {path} --from {source} "
            "--config config.json --sequence 2048 -o profiles.json"
        )
    return format_of(path) == FORMAT


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
    given: "TrainPlanOptions", config: Path, are_profiles: bool, time_limit: float
) -> int:
    """Find the fastest plan on servers of several kinds; exit code 1 if none fits.

    The layers were measured, or are computed for a config.json.
    """
    from stagewright.formulations.parallelism.profiles.document import save_profiled_plan
    from stagewright.service.layouts.mixed import within_rates
    from stagewright.service.layouts.profiled import ProfiledRequest, find_profiled_plan

    batch = given.global_batch
    if batch is None:
        raise InputError(f"{config} needs --global-batch, the samples between two updates")
    mixed = None if are_profiles else _mixed(given, config)
    problem = _profiled(given, config, batch) if mixed is None else mixed.problem
    name = problem.profiles.name if mixed is None else config.name
    request = ask(ProfiledRequest, problem=problem, time_limit=time_limit)
    with interruptible() as stop, progress(f"planning {name}", stop):
        answer = find_profiled_plan(request, stop)
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
    from stagewright.service.layouts.problems import profiled_problem

    profiles = load_layer_profiles(file)
    pools = read_server_pools(given.servers, given.cluster, _rates(given), profiles.device_kinds)
    try:
        return profiled_problem(profiles, pools, batch=batch, reserve_bytes=_reserve(given))
    except InputError as error:
        raise InputError(with_option(str(error), (), _SPELLED)) from None


def _mixed(given: "TrainPlanOptions", config: Path) -> "MixedProblem":
    """The problem of the layers of a config.json, computed for each kind."""
    from stagewright.graphs.machines.networks import fabric_of_kind
    from stagewright.service.layouts.mixed import MICROBATCHES, TENSOR_DEGREES, mixed_problem

    kinds = {kind.strip().lower() for kind, _, _ in read_groups(given.servers or "", "--servers")}
    for kind in sorted(kinds - ACCELERATORS.keys()):
        raise InputError(f"--servers: {kind!r} is none of {', '.join(sorted(ACCELERATORS))}")
    rates = _rates(given)
    try:
        pools = read_server_pools(given.servers, None, rates, sorted(kinds))
    except InputError as error:
        raise InputError(with_option(str(error), rates, {})) from None
    problems = {}
    for pool in sorted(pools.pools, key=lambda one: one.devices):  # the largest server of a kind
        inside = None if pool.inside is None else pool.inside.device_bytes_per_second
        fabric = fabric_of_kind(
            pool.device_kind,
            pool.devices,
            per_server=pool.devices,
            server_bandwidth=inside,
            memory_bytes=pool.memory_bytes,
        )
        problems[pool.device_kind] = given.problem(config, fabric)
    try:
        return mixed_problem(
            problems,
            pools,
            precision=given.precision,
            tensor=_some(given.tensor, "--tensor") or TENSOR_DEGREES,
            microbatches=_some(given.microbatch_sizes, "--microbatch-sizes") or MICROBATCHES,
            reserve_bytes=_reserve(given),
        )
    except InputError as error:
        raise InputError(with_option(str(error), ("precision",), _SPELLED)) from None


_SPELLED = {"batch": "--global-batch", "reserve_bytes": "--reserve"}


def _rates(given: "TrainPlanOptions") -> dict[str, str | None]:
    names = ("memory", "server_bandwidth", "network_bandwidth")
    return {name: getattr(given, name) for name in names}


def _reserve(given: "TrainPlanOptions") -> float | None:
    return None if given.reserve is None else parse_bytes(given.reserve, "--reserve")


def _some(text: str | None, option: str) -> tuple[int, ...]:
    return () if text is None else whole_numbers(text, option)


def _draw(png: Path, title: str, answer: "ProfiledAnswer") -> None:
    from stagewright.executor.drawing.charts.stage_bars import stages_png

    seconds = format_seconds(answer.iteration_seconds or 0.0)
    write_bytes(png, stages_png(answer.stages, f"{title}: {seconds} per iteration"))


def _print(name: str, batch: int, answer: "ProfiledAnswer") -> None:
    bound = format_seconds(answer.bound_seconds) if answer.bound_seconds is not None else "-"
    if answer.iteration_seconds is None:
        say(
            f"{name}: {answer.status}", *([answer.reason] if answer.reason else []), *answer.remarks
        )
        return
    _print_stages(answer)
    _print_pools(answer)
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


def _print_stages(answer: "ProfiledAnswer") -> None:
    print_table(
        ("stage", "layers", "<GPUs", "replicas", "tensor", "forward", "backward", "all-reduce",
         "update", "memory", "of"),
        [
            (
                str(s), f"{one.first}-{one.stop - 1}", _name(answer.pools, one.pool),
                str(one.replicas), str(one.tensor), format_seconds(one.forward_seconds),
                format_seconds(one.backward_seconds), format_seconds(one.reduce_seconds),
                format_seconds(one.update_seconds), format_bytes(one.memory_bytes),
                format_bytes(one.capacity_bytes),
            )
            for s, one in enumerate(answer.stages)
        ],
    )  # fmt: skip


def _name(pools: "Sequence[ProfiledPoolAnswer]", number: int) -> str:
    """The name of a pool: its kind, with server size and zone if other pools share it."""
    one = pools[number]
    same = [other for other in pools if other.device_kind == one.device_kind]
    size = f" of {one.per_server}" if len({other.per_server for other in same}) > 1 else ""
    zone = f" in {one.zone}" if len({other.zone for other in same}) > 1 else ""
    return f"{one.device_kind}{size}{zone}"


def _print_pools(answer: "ProfiledAnswer") -> None:
    print_table(
        ("<GPUs", "servers", "each", "used", "fullest GPU", "of"),
        [
            (
                _name(answer.pools, number),
                str(one.servers),
                str(one.per_server),
                f"{one.used} of {one.devices}",
                "-" if one.peak_bytes is None else format_bytes(one.peak_bytes),
                format_bytes(one.capacity_bytes),
            )
            for number, one in enumerate(answer.pools)
        ],
    )


def check_profiled(path: Path, as_json: bool) -> int:
    """Compute a plan's time and memory again, and print what differs; exit code 1 if any."""
    from stagewright.formulations.parallelism.profiles.document import load_profiled_plan
    from stagewright.service.layouts.profiled import CheckProfiledRequest, check_profiled_plan

    request = ask(CheckProfiledRequest, document=load_profiled_plan(path))
    answer = check_profiled_plan(request)
    return _print_checked(path, answer, answer.iteration_seconds, as_json)


def _print_checked(
    path: Path, answer: "CheckLayoutAnswer | CheckProfiledAnswer", seconds: float, as_json: bool
) -> int:
    if as_json:
        print_answer(answer)
    elif answer.violations:
        say(*(f"{path}: {one}" for one in answer.violations))
    else:
        say(
            f"{path}: valid, {format_seconds(seconds)} per iteration; the search behind its bound "
            "is not run again: train-plan does"
        )
    return 1 if answer.violations else 0


def is_layout(path: Path) -> bool:
    """Whether a file is a layout; a folder with a config.json, or a model by name, is not."""
    from stagewright.formulations.parallelism.document import FORMAT
    from stagewright.graphs.importers.hf_hub import is_model

    return not is_model(path) and format_of(path) == FORMAT


def check_layout(path: Path, as_json: bool) -> int:
    """Compute a layout's time and memory again, and print what differs; exit code 1 if any."""
    from stagewright.formulations.parallelism.document import load_layout, violations
    from stagewright.service.layouts.requests import CheckLayoutAnswer

    plan = load_layout(path)
    found = violations(plan)
    answer = CheckLayoutAnswer(status="invalid" if found else "valid", violations=found)
    return _print_checked(path, answer, plan.iteration_seconds, as_json)
