"""The pages that ``--help`` prints: text that fits the terminal, and an example at the end."""

import re
from collections.abc import Callable, Iterator, MutableMapping
from importlib import import_module
from inspect import cleandoc
from pathlib import Path
from typing import Any

from typer.core import TyperCommand

PANELS: dict[str, dict[str, str]] = {
    "Plan": {
        "plan": "pipelines.planning", "sweep": "pipelines.sweeping",
        "what-if": "pipelines.sweeping", "check": "pipelines.plans", "diff": "pipelines.plans",
        "simulate": "pipelines.plans", "show": "pipelines.plans",
    },
    "Training of transformers": {
        "train-plan": "layouts.layouts", "memory": "layouts.layouts", "rates": "layouts.rates",
        "tune": "layouts.tuning", "calibrate": "layouts.rates", "anchor": "layouts.rates",
    },
    "Scheduling problems": {
        "partition": "schedules.problems", "divide": "schedules.problems",
        "schedule": "schedules.schedules", "jobshop": "schedules.problems",
    },
    "Models and clusters": {
        "import": "documents.inputs", "model": "documents.inputs", "cluster": "documents.inputs",
        "profile": "training.profiling", "profile-links": "training.profiling",
        "capture": "training.profiling", "devices": "documents.known",
        "models": "documents.known", "frameworks": "documents.known",
    },
    "Run": {
        "run": "training.running", "train": "training.rounds", "compare": "pipelines.comparing",
        "export": "pipelines.exporting",
    },
    "The planning service": {
        "serve": "serving", "token": "serving", "backup": "serving", "jobs": "solving",
    },
    "Clusters and jobs": {
        "price-jobs": "clusters.allocating", "allocate": "clusters.allocating",
        "rounds": "clusters.rounds",
        "simulate-cluster": "clusters.simulating", "run-cluster": "clusters.allocating",
        "estimate": "clusters.allocating", "cloud": "clusters.cloud",
    },
    "About": {
        "planners": "pipelines.planning", "policies": "clusters.allocating", "doctor": "doctor",
    },
}  # fmt: skip
"""The commands under their headings, and the module of each."""

EXAMPLES: dict[str, str] = {
    "plan": """
        stagewright plan --model model.json --cluster cluster.json \\
            --microbatches 8 -o plan.json""",
    "sweep": """
        stagewright sweep --model model.json --cluster cluster.json \\
            --devices 2,4 --microbatches 8,16 -o sweep.csv --png sweep.png""",
    "serve": "stagewright serve --port 8754 --workers 2",
    "token": "stagewright token alice --scope submit",
    "backup": "stagewright backup jobs-monday.sqlite --store jobs.sqlite",
    "jobs": "stagewright jobs --server http://127.0.0.1:8754",
    "what-if": """
        stagewright what-if --model model.json --cluster cluster.json \\
            --microbatches 8 --time-limit 3""",
    "check": "stagewright check plan.json --model model.json --cluster cluster.json",
    "simulate": """
        stagewright simulate plan.json --model model.json \\
            --cluster cluster.json --jitter 0.1""",
    "show": """
        stagewright show plan.json --html timeline.html --png timeline.png
        stagewright show plan.json --html plan.html --cluster cluster.json""",
    "diff": "stagewright diff plan.json other.json",
    "train-plan": """
        stagewright train-plan config.json --device h100 --gpus 64 \\
            --global-batch 512 --sequence 4096 -o layout.json
        stagewright train-plan --from megatron.sh --device h100
        stagewright train-plan profiles.json --servers a100:2x4,v100:3x8 \\
            --global-batch 256 -o plan.json""",
    "memory": """
        stagewright memory layout.json --png memory.png
        stagewright memory config.json --layout "p8 t8 d2 b1 full" \\
            --sequence 4096""",
    "tune": """
        stagewright tune config.json --device h100 --gpus 64 \\
            --global-batch 512 --sequence 4096 --for megatron -o tuning
        stagewright tune read tuning
        stagewright tune tuning --launch 'sbatch --wait {script}'""",
    "rates": "stagewright rates megatron-h100-26.06 --png rates.png",
    "calibrate": """
        stagewright calibrate runs.csv --config config.json --device h100 \\
            --sequence 4096 --global-batch 512 -o mine.json
        stagewright calibrate log.txt --layout "p2 t4 d8 b1" \\
            --config config.json --device h100 --sequence 4096 -o mine.json""",
    "anchor": """
        stagewright anchor config.json --device h100 --gpus 64 \\
            --global-batch 512 --sequence 4096 -o anchor.py
        stagewright anchor measured.json -o rates.json""",
    "partition": """
        stagewright partition --model model.json --cluster cluster.json \\
            --microbatches 8 --stages 2""",
    "divide": "stagewright divide workload.json --devices 4 --memory 16GB",
    "schedule": """
        stagewright schedule --stages 4 --microbatches 8 --times 1,1,1 \\
            --kind zbv --html schedule.html
        stagewright schedule --stages 4 --microbatches 8 --times 1,2 --compare""",
    "jobshop": "stagewright jobshop ft06.txt --time-limit 30",
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
        stagewright cluster 4 --from topo.txt --inter 50GB/s -o cluster.json""",
    "profile": """
        stagewright profile --module net:build --data net:batches --on cuda \\
            --microbatch-sizes 1,2,4 -o model.json""",
    "profile-links": "stagewright profile-links --ranks 2 -o cluster.json",
    "capture": """
        stagewright capture --module net:build --data net:batches \\
            --device v100 -o graph.json""",
    "run": """
        stagewright run plan.json --module net:build --data net:batches \\
            --optimizer adamw:lr=1e-3 --steps 1000 --log run.csv""",
    "train": """
        stagewright train --module net:build --data net:batches \\
            --cluster cluster.json --steps 1000 --folder trained""",
    "compare": "stagewright compare plan.json trace.json --png compared.png",
    "export": """
        stagewright export plan.json --to megatron --model model.json \\
            -o megatron.sh
        stagewright export plan.json --to slurm --cpus 8 --time 4:00:00 \\
            -o job.sbatch --command 'stagewright run plan.json
            --module net:build --data net:batches --steps 1000'""",
    "price-jobs": """
        stagewright price-jobs --jobs jobs.json --cluster h100=2x8,a100=4x8 \\
            -o priced.json""",
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
    "devices": "stagewright devices l40s",
    "models": "stagewright models gpt_oss",
    "frameworks": "stagewright frameworks torchtitan",
    "planners": "stagewright planners --json",
    "policies": "stagewright policies --json",
    "doctor": "stagewright doctor",
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


class Commands(MutableMapping[str, Any]):
    """The commands by name, each made, and its module imported, when it is asked for."""

    def __init__(self) -> None:
        self.made: dict[str, TyperCommand] = {}
        self.places = {
            name: (heading, module)
            for heading, named in PANELS.items()
            for name, module in named.items()
        }

    def __getitem__(self, name: str) -> TyperCommand:
        if name not in self.made:
            if name not in self.places:
                raise KeyError(name)
            from stagewright.cli.commands import command_of

            function = self.function(name)
            examples = cleandoc(EXAMPLES[name])
            several = examples.count("stagewright ") > 1
            self.made[name] = command_of(
                function,
                name,
                help=_text(function.__doc__),
                epilog=f"{'Examples' if several else 'Example'}:\n{examples}",
                rich_help_panel=self.places[name][0],
            )
        return self.made[name]

    def function(self, name: str) -> Callable[..., int]:
        """The function of a command."""
        module = import_module(f"stagewright.cli.{self.places[name][1]}")
        found: Callable[..., int] = getattr(module, _function(name))
        return found

    def listed(self) -> "Commands":
        """The commands as the list of them shows them: with the first paragraph of their pages."""
        listed = Commands()
        for name, (heading, module) in self.places.items():
            source = (Path(__file__).parent / f"{module.replace('.', '/')}.py").read_text("utf-8")
            function = rf'^def {_function(name)}\(.*?^    """(.*?)(?:\n\n|""")'
            found = re.search(function, source, re.MULTILINE | re.DOTALL)
            assert found is not None
            listed.made[name] = TyperCommand(name, help=_text(found[1]), rich_help_panel=heading)
        return listed

    def __setitem__(self, name: str, command: TyperCommand) -> None:
        self.made[name] = command

    def __delitem__(self, name: str) -> None:
        raise KeyError(f"{name} stays a command")

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self.places, *self.made)))

    def __len__(self) -> int:
        return len({*self.places, *self.made})


def _function(name: str) -> str:
    """The name of the function of a command."""
    return "import_" if name == "import" else name.replace("-", "_")


def _text(doc: str | None) -> str:
    """The paragraphs of a docstring, each in one line."""
    paragraphs = cleandoc(doc or "").split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
