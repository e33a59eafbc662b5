"""Iterations that a user measured, from CSV files and from logs as they are."""

from pathlib import Path

import pytest

from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.measured_runs import (
    MeasuredIteration,
    read_measured,
    read_outcome,
)

MEGATRON = (
    " [2025-11-20 10:00:{0}] iteration {0:8d}/     500 | consumed samples: 512 | elapsed time per "
    "iteration (ms): {1:.1f}{2} | throughput per GPU (TFLOP/s/GPU): 401.2 | learning rate: 1.0E-05 "
    "| global batch size:   512 | lm loss: 9.1E+00 | number of nan iterations:   0 |"
)
TITAN = (
    "[rank0]:[titan] 2025-11-20 10:00:00,000 - root - INFO - \x1b[31mstep: {0:2}  \x1b[32mloss:  "
    "8.1000  \x1b[38;2;180;60;0mgrad_norm:  1.2000  \x1b[36mmemory: 38.00GiB(48.03%)  \x1b[34mtps: "
    "{1:,}  \x1b[36mtflops: 380.11  \x1b[35mmfu: 38.43%\x1b[0m"
)
OLD_TITAN = "step: {0:2}  loss:  8.1  memory: 38.00GiB(48.03%)  tps: {1:,}  mfu: 38.43%"
SPEED = (
    "[2025-11-20 10:00:00,000] [INFO] [timer.py:264:stop] epoch=0/micro_step={0}/global_step={0}, "
    "RunningAvgSamplesPerSec=50.0, CurrSamplesPerSec={1}, MemAllocated=6.0GB, "
    "MaxMemAllocated=38.0GB"
)
TIMERS = (
    "[INFO] [logging.py:96:log_dist] [Rank 0] time (ms) | fwd_microstep: 10.00 | bwd_microstep: 9\n"
    "[Rank 0] time (ms) | fwd: {1:.2f} | bwd: 500.00 | bwd_inner: 450.00 | bwd_allreduce: 50.00 | "
    "step: 100.00"
)
PIPES = "steps: {0} loss: 8.1000 iter time (s): {1:0.3f} samples/sec: 51.200"
OLD_SPEED = (
    "[timer.py:189:stop] 0/{0}, SamplesPerSec={1}, MemAllocated=6.0GB, MaxMemAllocated=38.0GB"
)
NEW_TIMERS = (
    "[Rank 0] rank=0 time (ms) | forward_microstep: 1.0 | backward_microstep: 9.0 | step_\n"
    "[Rank 0] rank=0 time (ms) | forward: {1:.2f} | backward: 500.00 | backward_inner: 450.00 | "
    "backward_allreduce: 50.00 | step: 100.00"
)
NEOX = (
    " samples/sec: 7.8 | iteration {0:8d}/   10000 | elapsed time per iteration (ms): {1:.1f} | lr"
)
BAR = (
    "Epoch 0: :   3%|2 | {0}/300 [1:42<55:37, v_num=0, reduced_train_loss=8.1, global_step={0}.0, "
    "consumed_samples=512.0, train_step_timing in s={1:.3f}]\r"
)
NEMO = (
    "0: [NeMo I] Training epoch 0, iteration {0}/99 | lr: 1e-05 | global_batch_size: 512 | "
    "global_step: {0} | reduced_train_loss: 8.1 | train_step_timing in s: {1:.2f} | consumed"
)
BRIDGE = "Step Time : {1:.2f}s GPU utilization: 528.1MODEL_TFLOP/s/GPU"
# The first two of five warm up; seconds of 512 samples of 4096 tokens on 64 GPUs.
LOGS = {
    "megatron": (MEGATRON, (90_000, 20_000, 10_100, 10_000, 9_000), 10.0),
    "megatron with a mean": (MEGATRON, (90_000, 20_000, 10_100, 10_000, 9_000), 10.0),
    "torchtitan": (TITAN, (100, 1_000, 3_000, 4_096, 5_000), 8.0),
    "torchtitan of 2024": (OLD_TITAN, (100, 1_000, 3_000, 4_096, 5_000), 8.0),
    "deepspeed": (SPEED, (1.0, 5.0, 51.2, 64.0, 80.0), 8.0),
    "torchtitan of two ranks": (f"{TITAN}\n{TITAN}", (100, 1_000, 3_000, 4_096, 5_000), 8.0),
    "deepspeed of 2022": (OLD_SPEED, (1.0, 5.0, 51.2, 64.0, 80.0), 8.0),
    "deepspeed's timers of 2023": (NEW_TIMERS, (9_000, 800, 390, 400, 410), 1.0),
    "gpt-neox": (NEOX, (90_000, 20_000, 10_100, 10_000, 9_000), 10.0),
    "nemo's progress bar": (BAR, (90, 20, 10.1, 10, 9), 10.0),
    "nemo": (NEMO, (90, 20, 10.1, 10, 9), 10.0),
    "megatron-bridge": (BRIDGE, (90, 20, 10.1, 10, 9), 10.0),
    "deepspeed's timers": (TIMERS, (9_000, 800, 390, 400, 410), 1.0),
    "deepspeed's pipelines": (PIPES, (90, 20, 10.1, 10, 9), 10.0),
}


@pytest.mark.parametrize("name", LOGS)
def test_a_log_gives_the_median_after_the_warm_up(name: str, tmp_path: Path) -> None:
    line, values, seconds = LOGS[name]
    mean = "/9900.0" if "mean" in name else ""
    log = tmp_path / "log.txt"
    lines = [line.format(step, value, mean) for step, value in enumerate(values, 1)]
    if "torchtitan" in name:
        lines.append("validate step:  5  loss: 8.0  memory: 10.00GiB(10.00%)  tps: 9,999")
    log.write_text("\n".join(["a first line", *lines, "Training completed"]))
    (found,) = read_measured(log)
    assert found.seconds_of(64, 4096, 512) == pytest.approx(seconds)
    assert found.batch == (512 if line in (MEGATRON, NEMO) else None)
    has_memory = "MaxMemAllocated" in line or "GiB" in line
    assert found.memory_bytes == (38 * 2**30 if has_memory else None)
    assert found.place.startswith(f"{log}:2-" if "microstep" not in line else f"{log}:3-")


def test_a_summary_of_transformers_is_a_mean(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    log.write_text("\n{'loss': 8.1}\n{'train_runtime': 80.0, 'train_samples_per_second': 64.0}\n")
    (found,) = read_measured(log)
    assert (found.place, found.seconds_of(64, 4096, 512)) == (f"{log}:3", 8.0)


def test_only_iterations_of_the_last_batch_count(tmp_path: Path) -> None:
    log = tmp_path / "log.txt"
    slow = [MEGATRON.format(step, 5_000, "").replace("  512 |", "  256 |") for step in range(30)]
    log.write_text("\n".join([*slow, *(MEGATRON.format(30 + i, 9_000, "") for i in range(4))]))
    (found,) = read_measured(log)
    assert (found.seconds, found.batch) == (9.0, 512)


def test_rows_of_a_csv_have_what_they_say(tmp_path: Path) -> None:
    table = tmp_path / "runs.csv"
    table.write_text("layout,seconds,gpus,memory_gb\np2 t4 d8 b1,12.5,64,\nd8 b2,3,,70.5\n")
    first, second = read_measured(table)
    assert (first.place, first.layout, first.seconds) == (f"{table}:2", "p2 t4 d8 b1", 12.5)
    assert (first.gpus, first.memory_bytes) == (64, None)
    assert (second.gpus, second.memory_bytes) == (None, 70.5e9)


@pytest.mark.parametrize(
    ("name", "text", "wrong"),
    [
        ("runs.csv", "layout,seconds\nd8 b1,0\n", ":2: seconds must be a number above 0, got '0'"),
        ("runs.csv", "layout,seconds\nd8,1\nd8,fast\n", ":3: seconds .* above 0, got 'fast'"),
        ("runs.csv", "layout,seconds,gpus\nd8,1,7.5\n", ":2: gpus must be a whole number"),
        ("runs.csv", "layout,seconds\n,1\n", ":2: no layout, for example p2 t4"),
        ("runs.csv", "layout,seconds\nd8,1,2\n", ":2: more cells than columns"),
        ("runs.csv", "layout,time\nd8,1\n", ":1: column 'time' is not known; columns are layout"),
        ("runs.csv", "layout,gpus\nd8,1\n", ":1: no layout and seconds"),
        ("runs.csv", "layout,seconds\n", ": no row below"),
        (
            "log.txt",
            "hello\n",
            ": no line of an iteration as Megatron, NeMo, torchtitan, DeepSpeed or",
        ),
        ("log.txt", f"\n{PIPES.format(1, 3)}\n", ":2: the only iteration; give two or more"),
        ("log.txt", "\n".join(PIPES.format(i, 0) for i in "123"), ":1-3: the iterations take no"),
    ],
)
def test_what_is_wrong_is_named_by_its_line(
    name: str, text: str, wrong: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(InputError, match=wrong):
        read_measured(tmp_path / name)


def test_runs_without_a_time_are_answers_too(tmp_path: Path) -> None:
    log = tmp_path / "run.log"
    iterations = "".join(
        f"iteration {i}/ 20 | elapsed time per iteration (ms): 900.0 | lm loss: 1.0 |\n"
        for i in range(1, 5)
    )
    for text, outcome in (
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate", "out of memory"),
        (f"{iterations}RuntimeError: CUDA error: out of memory", "out of memory"),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=1.0", "out of memory"),
        ("Traceback (most recent call last):\n  ...\nKeyError: 'DATA'", "crashed"),
        ("torch.distributed.elastic.multiprocessing.errors.ChildFailedError:", "crashed"),
    ):
        log.write_text(text)
        assert read_outcome(log) == outcome, text
    log.write_text("it has begun\n")
    assert read_outcome(log, ended=True) == "crashed"
    with pytest.raises(InputError, match="no line of an iteration"):
        read_outcome(log)
    peaks = "[Rank {}] (after 2 iterations) memory (MB) | allocated: 9.0 | max allocated: 9.5 | "
    ranks = "".join(f"{peaks}max reserved: {1000 + 10 * r}.0\n".format(r) for r in (0, 8))
    log.write_text(ranks + iterations)
    found = read_outcome(log)
    assert isinstance(found, MeasuredIteration)
    assert (found.seconds, found.memory_bytes) == (0.9, 2**20 * 1080)
