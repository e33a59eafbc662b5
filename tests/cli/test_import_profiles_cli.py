"""``import --from sailor`` and ``--from metis``: files of layer profiles."""

import json
from pathlib import Path

from typer.testing import CliRunner

from stagewright.cli import app
from stagewright.graphs.models.layer_profiles import load_layer_profiles

TABLE = {"1": {"2": {"0": [1, 2, 3], "1": [4, 5, 6]}}}


def run(*arguments: object):
    return CliRunner().invoke(app, ["import", *map(str, arguments)])


def test_sailors_profiles_become_a_file(tmp_path: Path):
    file, output = tmp_path / "A.json", tmp_path / "profiles.json"
    file.write_text(json.dumps(TABLE))
    told = run(file, "--from", "sailor", "-o", output, "--json")
    assert told.exit_code == 0
    assert json.loads(told.stdout) == {
        "name": tmp_path.name,
        "layers": 2,
        "device_kinds": ["A"],
        "file": str(output),
    }
    assert load_layer_profiles(output).times("A", 1, 2).forward.tolist() == [1, 4]
    assert "2 layers" in run(file, "--from", "sailor", "-o", output).stdout
    printed = run(file, "--from", "sailor", "--device", "b").stdout
    assert json.loads(printed)["measured"][0]["device_kind"] == "b"


def test_metis_profiles_become_a_file(tmp_path: Path):
    output = tmp_path / "out.json"
    (tmp_path / "DeviceType.A_tp1_bs1.json").write_text(
        json.dumps(
            {
                "model": {
                    "model_name": "GPT3",
                    "parameters": {"parameters_per_layer_bytes": [1, 2]},
                },
                "execution_time": {"optimizer_time_ms": 3, "layer_compute_total_ms": [1, 2]},
            }
        )
    )
    told = run(tmp_path, "--from", "metis", "-o", output)
    assert told.exit_code == 0
    assert "the forward is taken as a third" in told.stderr
    assert load_layer_profiles(output).name == "GPT3"


def test_bad_input_is_refused_in_one_line(tmp_path: Path):
    file = tmp_path / "A.json"
    file.write_text(json.dumps(TABLE))
    for arguments, part in (
        ((tmp_path / "none", "--from", "sailor"), "none"),
        ((file, "--from", "metis"), "A.json"),
        ((file, "--from", "sailor", "--contract"), "--contract"),
        ((file, "--from", "sailor", "--microbatch-size", 2), "--microbatch-size"),
        ((tmp_path, "--from", "metis", "--device", "A"), "--device"),
    ):
        answer = run(*arguments)
        assert answer.exit_code == 2
        assert part in answer.stderr
        assert len(answer.stderr.splitlines()) == 1
