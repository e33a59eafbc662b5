"""The pages that ``--help`` prints: text that fits the terminal, and an example at the end."""

from collections.abc import Callable
from inspect import cleandoc
from typing import Any

import typer
from typer.core import TyperCommand

from stagewright.cli.completing import complete_values

EXAMPLES: dict[str, str] = {
    "plan": """
        stagewright plan --model model.json --cluster cluster.json \\
            --microbatches 8 -o plan.json""",
    "sweep": """
        stagewright sweep --model model.json --cluster cluster.json \\
            --devices 2,4 --microbatches 8,16 -o sweep.csv --png sweep.png""",
    "serve": """
        stagewright serve --port 8754 --workers 2""",
    "token": """
        stagewright token alice --scope submit""",
    "backup": """
        stagewright backup jobs-monday.sqlite --store jobs.sqlite""",
    "jobs": """
        stagewright jobs --server http://127.0.0.1:8754""",
    "what-if": """
        stagewright what-if --model model.json --cluster cluster.json \\
            --microbatches 8 --time-limit 3""",
    "check": """
        stagewright check plan.json --model model.json --cluster cluster.json""",
    "simulate": """
        stagewright simulate plan.json --model model.json \\
            --cluster cluster.json --jitter 0.1""",
    "show": """
        stagewright show plan.json --html timeline.html --png timeline.png
        stagewright show plan.json --html plan.html --cluster cluster.json""",
    "diff": """
        stagewright diff plan.json other.json""",
    "train-plan": """
        stagewright train-plan config.json --device h100 --gpus 64 \\
            --global-batch 512 --sequence 4096 -o layout.json
        stagewright train-plan profiles.json --servers a100:2x4,v100:3x8 \\
            --global-batch 256 -o plan.json""",
    "memory": """
        stagewright memory layout.json --png memory.png
        stagewright memory config.json --layout "p8 t8 d2 b1 full" \\
            --sequence 4096""",
    "partition": """
        stagewright partition --model model.json --cluster cluster.json \\
            --microbatches 8 --stages 2""",
    "divide": """
        stagewright divide workload.json --devices 4 --memory 16GB""",
    "schedule": """
        stagewright schedule --stages 4 --microbatches 8 --times 1,1,1 \\
            --kind zbv --html schedule.html
        stagewright schedule --stages 4 --microbatches 8 --times 1,2 --compare""",
    "jobshop": """
        stagewright jobshop ft06.txt --time-limit 30""",
    "import": """
        stagewright import graph.txt --from pipedream -o model.json
        stagewright import profiles --from sailor --config config.json \\
            --sequence 2048 -o profiles.json""",
    "model": """
        stagewright model bert-large --device a100 -o model.json
        stagewright model config.json --device h100 --precision bf16 \\
            --sequence 4096 -o model.json""",
    "cluster": """
        stagewright cluster 8x4 --intra 100GB/s --inter 100Gbps \\
            --latency-inter 5us --device v100 -o cluster.json
        stagewright cluster 4x8 --device h100 -o cluster.json
        stagewright cluster a100:2x4,v100:3x8 --inter 12.5GB/s -o cluster.json
        stagewright cluster 4 --nvidia-smi topo.txt --inter 50GB/s -o cluster.json""",
    "profile": """
        stagewright profile --module net:build --data net:batches --on cuda \\
            --microbatch-sizes 1,2,4 -o model.json""",
    "profile-links": """
        stagewright profile-links --ranks 2 -o cluster.json""",
    "capture": """
        stagewright capture --module net:build --data net:batches \\
            --device v100 -o graph.json""",
    "run": """
        stagewright run plan.json --module net:build --data net:batches \\
            --optimizer adamw:lr=1e-3 --steps 1000 --log run.csv""",
    "train": """
        stagewright train --module net:build --data net:batches \\
            --cluster cluster.json --steps 1000 --folder trained""",
    "compare": """
        stagewright compare plan.json trace.json --png compared.png""",
    "export": """
        stagewright export plan.json --to megatron --model model.json \\
            -o megatron.sh
        stagewright export plan.json --to slurm --cpus 8 --time 4:00:00 \\
            -o job.sbatch --command 'stagewright run plan.json
            --module net:build --data net:batches --steps 1000'""",
    "allocate": """
        stagewright allocate --jobs jobs.json --cluster v100=36,p100=9x4 \\
            --policy max-min -o allocation.json""",
    "rounds": """
        stagewright rounds --jobs jobs.json --cluster v100=2x4,p100=2x4 \\
            --allocation allocation.json --rounds 6""",
    "simulate-cluster": """
        stagewright simulate-cluster --jobs jobs.json \\
            --cluster v100=2x4,p100=1x4 --policy max-min --png rounds.png""",
    "run-cluster": """
        stagewright run-cluster --jobs jobs.json --cluster v100=2 \\
            --program net:train --folder shared -o measured.json""",
    "estimate": """
        stagewright estimate --reference throughputs.json --jobs jobs.json \\
            -o estimated.json""",
    "cloud": """
        stagewright cloud prices.json --rates v100=1.0,p100=0.55,k80=0.2 \\
            --v100-hours 96 --gpus 4""",
    "planners": """
        stagewright planners --json""",
    "policies": """
        stagewright policies --json""",
    "doctor": """
        stagewright doctor""",
}  # fmt: skip
"""Lines of at most 76 characters, as a help page of 80 has them."""


ROOT_EXAMPLES = """Examples:
stagewright plan --model model.json --cluster cluster.json --microbatches 8
stagewright plan --help
stagewright --install-completion"""


class Page(TyperCommand):
    """A command with a page of its own."""

    def get_params(self, ctx: Any) -> list[Any]:
        """The parameters with ``--help``."""
        return with_plain_flags(super().get_params(ctx))


def with_plain_flags(params: list[Any]) -> list[Any]:
    """``params``, of which flags do not say on the page that their type is ``<bool>``."""
    for one in params:
        if getattr(one, "is_flag", False):
            one.metavar = ""
    return params


def add_command(app: typer.Typer, name: str, command: Callable[..., int], panel: str) -> None:
    """Add a command with its page: the paragraphs of its docstring, and its examples."""
    complete_values(command)
    paragraphs = cleandoc(command.__doc__ or "").split("\n\n")
    examples = cleandoc(EXAMPLES[name])
    app.command(
        name,
        cls=Page,
        help="\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs),
        epilog=f"{'Examples' if examples.count('stagewright ') > 1 else 'Example'}:\n{examples}",
        rich_help_panel=panel,
    )(command)
