"""Iterations on one GPU, predicted from a model's timed layers, beside those that were measured.

    python -m benchmarks.anchored FOLDER     # all that the machine with the GPU needs, beside torch
    OUT=/OUTPUT bash FOLDER/run.sh           # there; seven minutes at most
    ANCHORED=/OUTPUT python -m benchmarks anchored --write

Without ``ANCHORED`` tiny models run on this machine.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from benchmarks.report import Table, percent
from stagewright.formulations.parallelism.estimate import evaluate
from stagewright.formulations.parallelism.layout import parse_layout
from stagewright.formulations.parallelism.ranges import ranges
from stagewright.formulations.parallelism.training import TrainingProblem
from stagewright.graphs.importers.timed_layers import TimedLayers, read_timed_layers
from stagewright.graphs.machines.networks import fabric_of_kind
from stagewright.graphs.machines.rates import RateSet
from stagewright.graphs.models import architecture as models
from stagewright.service.layouts import anchoring
from stagewright.service.layouts.problems import training_problem

FOLDER, DEVICE, STACK, BATCH = "ANCHORED", "h200", "torchtitan", 8
COLUMNS = (
    "model", "layout", "s", "predicted, s", "least, s", "most, s", "error", "computed, s",
    "allocated, GB", "reserved, GB", "predicted, GB", "error of reserved bytes",
)  # fmt: skip
LLAMA = models.Architecture(
    "llama", 10, 4096, 128_256, models.GroupedAttention(32, 8, 128), models.FeedForward(14_336)
)
MIXTURE = models.Architecture(
    "mixture", 6, 2048, 151_936, models.GroupedAttention(32, 4, 64), models.FeedForward(768),
    experts=models.Experts(128, 8, 768),
)  # fmt: skip
MODELS = (LLAMA, MIXTURE)
_SMALL: dict[str, Any] = {"hidden": 64, "layers": 2, "vocabulary": 512}
_SMALL["attention"] = models.GroupedAttention(4, 2, 16)
TINY = (
    replace(LLAMA, **_SMALL, feed_forward=models.FeedForward(128)),
    replace(MIXTURE, **_SMALL, experts=models.Experts(8, 2, 32)),
)
LAYOUTS = {"llama": ("b1", "b2", "b4", "b4 full"), "mixture": ("b1", "b4 full", "b2", "b4")}
RUN = r"""#!/bin/bash
# Writes everything to $OUT as soon as it is known; a step that fails or hangs ends alone.
cd "$(dirname "$0")" || exit 2
OUT=${OUT:-out} LIMIT=${LIMIT:-420} ROUNDS=${ROUNDS:-20} STEPS=${STEPS:-5}
mkdir -p "$OUT"
step() {
    local limit=$1 left=$((LIMIT - SECONDS)); shift
    echo "== $SECONDS s: $*"
    [ $left -ge 10 ] && timeout -k 5 $((limit < left ? limit : left)) "$@" || echo "== failed: $?"
}
loop() { step "$1" python3 one_gpu_loop.py "${@:2}" --steps "$STEPS" -o "$OUT/loops.jsonl"; }
time_layers() { step 70 python3 "anchor_$1.py" "$OUT/measured-$1$2.json" --rounds "$ROUNDS" $3; }
"""


def write_folder(
    folder: Path, of: tuple[models.Architecture, ...] = MODELS, sequence: int = 4096
) -> None:
    """The scripts of anchor, the loop, and ``run.sh``, which runs them within limits of time."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("one_gpu_loop.py"), folder)
    lines = []
    for model in of:
        problem = _problem(model, sequence, BATCH)
        script = anchoring.anchor_script_of(
            anchoring.AnchorRequest(problem=problem, framework=STACK)
        ).script
        (folder / f"anchor_{model.name}.py").write_text(script)
        layouts = " ".join(f'"{one}"' for one in LAYOUTS[model.name])
        lines += [f"time_layers {model.name}", f"loop 100 anchor_{model.name} {layouts}"]
    compiled = ["time_layers llama -compiled --compile", "loop 80 anchor_llama b1 b4 --compile"]
    (folder / "run.sh").write_text(RUN + "\n".join([*lines, *compiled]) + "\n")


def run_folder(folder: Path, *, quick: bool) -> None:
    """Run the scripts of a folder, in which they write what they measure."""
    here = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    given = [f"OUT={folder}", f"PATH={here}", "LIMIT=200", "bash", str(folder / "run.sh")]
    tiny = ["OMP_NUM_THREADS=1", "ROUNDS=2", "STEPS=2"] if quick else []
    subprocess.run(["env", *tiny, *given], check=True)


def tables(_: bool = False) -> Iterator[Table]:
    """Seconds and peak bytes of every loop of the runs, or of tiny models on this machine."""
    if FOLDER in os.environ:
        yield from tables_of(Path(os.environ[FOLDER]))
        return
    with TemporaryDirectory() as name:
        folder = Path(name)
        write_folder(folder, TINY, 64)
        run_folder(folder, quick=True)
        yield from tables_of(folder)


def tables_of(folder: Path) -> Iterator[Table]:
    """The tables of what a folder's scripts have written."""
    rows = [json.loads(line) for line in (folder / "loops.jsonl").read_text().splitlines()]
    timed = [read_timed_layers(path) for path in sorted(folder.glob("measured-*.json"))]
    for is_compiled in (False, True):
        files = {
            one.model.architecture.name: one
            for one in timed
            if one.through.endswith("compiled") == is_compiled
        }
        ran = [one for one in rows if one["compiled"] == is_compiled and one["model"] in files]
        if ran:
            yield Table(
                "anchored-compiled" if is_compiled else "anchored",
                f"An iteration on one {ran[0]['machine']}, {files[ran[0]['model']].through}: "
                "predicted from timed layers, and measured",
                COLUMNS,
                tuple(_row(files[one["model"]], one) for one in ran),
            )


def _row(timed: TimedLayers, ran: Mapping[str, Any]) -> tuple[object, ...]:
    of, sequence = timed.model.architecture, timed.model.sequence
    rates = anchoring.rates_of_timings(anchoring.AnchoredRequest(timed=timed)).document
    problem = _problem(of, sequence, ran["batch"], rates)
    layout = parse_layout(ran["layout"])
    found = ranges(problem, evaluate(problem, layout))
    computed = evaluate(_problem(of, sequence, ran["batch"]), layout).seconds
    of_torch = found.peak_bytes - problem.reserve_bytes
    seconds, reserved = ran.get("seconds"), ran.get("reserved_bytes")
    return (
        ran["model"], ran["layout"], seconds or "out of memory", found.seconds, found.seconds_low,
        found.seconds_high, percent(found.seconds / seconds - 1) if seconds else None, computed,
        1e-9 * ran.get("allocated_bytes", 0), 1e-9 * (reserved or 0), 1e-9 * of_torch,
        percent(of_torch / reserved - 1) if reserved else None,
    )  # fmt: skip


def _problem(
    model: models.Architecture, sequence: int, batch: int, rates: RateSet | None = None
) -> TrainingProblem:
    """The training on one device; without ``rates`` as the stack's published ones price it."""
    return training_problem(
        model, fabric_of_kind(DEVICE, 1), sequence=sequence, batch=batch, framework=STACK,
        rates=rates,
    )  # fmt: skip


if __name__ == "__main__":
    write_folder(Path(sys.argv[1]))
