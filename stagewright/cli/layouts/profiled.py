"""``train-plan`` by layer profiles, and ``check`` of what ``train-plan`` wrote."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from stagewright.cli import interruptible
from stagewright.cli.commands import ask, with_option
from stagewright.cli.console import kept, percent, print_answer, print_table, progress, say, tell
from stagewright.cli.layouts.inputs import read_server_pools
from stagewright.graphs.documents.documents import format_of, read_text, write_bytes
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import counted, format_bytes, format_seconds, parse_bytes

if TYPE_CHECKING:
    from stagewright.cli.layouts.layouts import TrainPlanOptions
    from stagewright.service.layouts.profiled import (
        CheckProfiledAnswer,
        ProfiledAnswer,
        ProfiledPoolAnswer,
    )
    from stagewright.service.layouts.requests import CheckLayoutAnswer

_PROFILES_ONLY = ("servers",)
BOTH = ("global_batch", "time_limit", "cluster", "server_bandwidth", "network_bandwidth", "memory",
        "reserve", "png", "output", "as_json")  # fmt: skip
"""Options of train-plan by what they are for; all others are for a config.json."""


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
    known = (*_PROFILES_ONLY, *BOTH)
    stray = [
        name for name in given if (name not in known if are_profiles else name in _PROFILES_ONLY)
    ]
    if stray:
        options = ", ".join(_option(context, name) for name in stray)
        what = "a file of layer profiles" if are_profiles else "not a file of layer profiles"
        apply = "does not apply" if len(stray) == 1 else "do not apply"
        raise InputError(f"{options} {apply} to {path}, which is {what}")


def _option(context: typer.Context, name: str) -> str:
    return next(one.opts[0] for one in context.command.params if one.name == name)


def plan_profiles(given: "TrainPlanOptions", time_limit: float) -> int:
    """Find the fastest plan by layer profiles; exit code 1 if none fits."""
    from stagewright.formulations.parallelism.profiles.document import save_profiled_plan
    from stagewright.graphs.models.layer_profiles import load_layer_profiles
    from stagewright.service.layouts.problems import profiled_problem
    from stagewright.service.layouts.profiled import ProfiledRequest, find_profiled_plan

    batch = given.global_batch
    if batch is None:
        raise InputError(f"{given.config} needs --global-batch, the samples between two updates")
    assert given.config is not None
    profiles = load_layer_profiles(given.config)
    names = ("memory", "server_bandwidth", "network_bandwidth")
    rates = {name: getattr(given, name) for name in names}
    pools = read_server_pools(given.servers, given.cluster, rates, profiles.device_kinds)
    reserve = None if given.reserve is None else parse_bytes(given.reserve, "--reserve")
    try:
        problem = profiled_problem(profiles, pools, batch=batch, reserve_bytes=reserve)
    except InputError as error:
        options = {"batch": "--global-batch", "reserve_bytes": "--reserve"}
        raise InputError(with_option(str(error), (), options)) from None
    request = ask(ProfiledRequest, problem=problem, time_limit=time_limit)
    with interruptible() as stop, progress(f"planning {profiles.name}", stop):
        answer = find_profiled_plan(request, stop)
    if answer.plan is not None and given.png is not None:
        _draw(given.png, f"{profiles.name}, batch {batch}", answer)
    written = kept(answer.plan, given, save_profiled_plan)
    tell(
        answer,
        given,
        lambda answer: _print(profiles.name, batch, answer),
        (given.png, *written) if answer.plan is not None else (),
    )
    return 0 if answer.plan is not None else 1


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


def check_tuning(path: Path, as_json: bool) -> int:
    """Compute a tuning's predictions and claim again, and print what differs; exit code 1 if any.

    The search that proved the bound on all other layouts is not run again.
    """
    from stagewright.formulations.parallelism.trials import load_tuning, violations
    from stagewright.service.layouts.requests import CheckLayoutAnswer
    from stagewright.solvers.parallelism.tree import compiled_walk

    found = violations(load_tuning(path), compiled_walk())
    answer = CheckLayoutAnswer(status="invalid" if found else "valid", violations=found)
    if as_json:
        print_answer(answer)
    else:
        said = "valid; the search behind its bound is not run again: tune does"
        say(*(f"{path}: {one}" for one in found or (said,)))
    return 1 if found else 0


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
