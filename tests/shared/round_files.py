"""Rounds with launch files: their answers, documents and folders."""

import subprocess
from pathlib import Path

from stagewright.formulations.clusters.round_document import ClusterRound
from stagewright.graphs.documents import documents
from stagewright.service.clusters.answers import RoundsAnswer
from stagewright.service.clusters.requests import RoundsRequest
from stagewright.service.clusters.rounds import rounds


def answered(request: RoundsRequest) -> RoundsAnswer:
    answer = rounds(request)
    assert isinstance(answer, RoundsAnswer)
    return answer


def document(answer: RoundsAnswer) -> ClusterRound:
    assert answer.launch is not None
    return documents.parse(ClusterRound, answer.launch.files["round.json"], "it")


def write(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
        if name.endswith((".sh", ".sbatch")):
            subprocess.run(["bash", "-n", folder / name], check=True)
