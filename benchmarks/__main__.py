"""Run the benchmarks and print their tables; with ``--write`` also into ``results/``."""

from collections.abc import Callable, Iterable
from time import perf_counter
from typing import Annotated

import typer

from benchmarks import (
    anchored,
    any_model,
    anytime,
    anytime_members,
    backprop,
    backprop_run,
    cloud,
    curve,
    dags,
    elastic,
    estimation,
    executor,
    fastt,
    fastt_run,
    gavel,
    generators,
    goodput,
    gpu,
    jobshop,
    launching,
    layout_peers,
    layout_search,
    layout_simumax,
    layout_simumax_search,
    layout_stages,
    layouts,
    madpipe,
    memory,
    operators,
    periodic,
    pipedream,
    pipedream_thesis,
    policies,
    profiled,
    profiled_metis,
    profiled_plans,
    rates_tables,
    replanning,
    report,
    scale,
    schedule,
    schedules,
    servers,
    spp,
    stack_memory,
    tuning,
    two_buffered,
    unequal,
)
from benchmarks.report import Table

# Each gives its tables; the argument asks for a few small cases only.
BENCHMARKS: dict[str, Callable[[bool], Iterable[Table]]] = {
    "schedule": schedule.tables,
    "schedules": schedules.tables,
    "servers": servers.tables,
    "scale": scale.tables,
    "jobshop": jobshop.tables,
    "backprop": backprop.tables,
    "operators": operators.tables,
    "dags": dags.tables,
    "profiled": profiled.tables,
    "profiled_plans": profiled_plans.tables,
    "profiled_metis": profiled_metis.tables,
    "fastt": fastt.tables,
    "fastt_run": fastt_run.tables,
    "spp": spp.tables,
    "pipedream": pipedream.tables,
    "pipedream_thesis": pipedream_thesis.tables,
    "two_buffered": two_buffered.tables,
    "periodic": periodic.tables,
    "madpipe": madpipe.tables,
    "anytime": anytime.tables,
    "anytime_members": anytime_members.tables,
    "replanning": replanning.tables,
    "policies": policies.tables,
    "elastic": elastic.tables,
    "estimation": estimation.tables,
    "gavel": gavel.tables,
    "cloud": cloud.tables,
    "generators": generators.tables,
    "unequal": unequal.tables,
    "curve": curve.tables,
    "executor": executor.tables,
    "any_model": any_model.tables,
    "memory": memory.tables,
    "launching": launching.tables,
    "backprop_run": backprop_run.tables,
    "gpu": gpu.tables,
    "layouts": layouts.tables,
    "goodput": goodput.tables,
    "rates": rates_tables.tables,
    "anchored": anchored.tables,
    "layout_peers": layout_peers.tables,
    "layout_simumax": layout_simumax.tables,
    "layout_simumax_search": layout_simumax_search.tables,
    "layout_search": layout_search.tables,
    "layout_stages": layout_stages.tables,
    "tuning": tuning.tables,
    "stack_memory": stack_memory.tables,
}


def main(
    names: Annotated[list[str] | None, typer.Argument(help=" | ".join(BENCHMARKS))] = None,
    quick: Annotated[bool, typer.Option("--quick", help="A few small cases of each.")] = False,
    write: Annotated[bool, typer.Option("--write", help="Write the tables to results/.")] = False,
) -> None:
    """Run all benchmarks, or those named."""
    unknown = sorted(set(names or ()) - BENCHMARKS.keys())
    if unknown:
        raise typer.BadParameter(f"{unknown[0]!r} is none of {', '.join(BENCHMARKS)}")
    if quick and write:
        raise typer.BadParameter("--write needs the full run")
    print(report.machine())
    for name in names or BENCHMARKS:
        began = perf_counter()
        for table in BENCHMARKS[name](quick):
            print(f"\n{table}")
            if write:
                report.write(table)
        print(f"\n{name}: {perf_counter() - began:.1f} s", flush=True)


if __name__ == "__main__":
    typer.run(main)
