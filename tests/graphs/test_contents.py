"""Files that are no documents are named for what they are."""

import bz2
import gzip
import json
import lzma
import pickle
from pathlib import Path

import pytest

from stagewright.graphs.documents.documents import read_text
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.importers.cloud_prices import read_model_rates
from stagewright.graphs.importers.hf_config import read_hf_config
from stagewright.graphs.machines.cluster import Link, load_cluster, save_cluster, uniform_servers

PAIR = uniform_servers(1, 2, Link(1e9), memory_bytes=1e9)


@pytest.fixture
def text(tmp_path: Path) -> str:
    save_cluster(PAIR, tmp_path / "good.json")
    return (tmp_path / "good.json").read_text()


def refusal(folder: Path, data: bytes) -> str:
    file = folder / "c.json"
    file.write_bytes(data)
    with pytest.raises(InputError) as caught:
        load_cluster(file)
    message = str(caught.value)
    assert message.startswith(str(file))
    assert "\n" not in message
    return message


def test_a_byte_order_mark_is_skipped(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_bytes(text.encode("utf-8-sig"))
    assert load_cluster(tmp_path / "c.json") == PAIR


def test_lines_of_windows_end_as_others(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"one\r\ntwo\r\n")
    assert read_text(tmp_path / "a") == "one\ntwo\n"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda text: gzip.compress(text.encode()), "but gzip; unpack it (gunzip)"),
        (lambda text: bz2.compress(text.encode()), "but bzip2"),
        (lambda text: lzma.compress(text.encode()), "but xz"),
        (lambda text: pickle.dumps([1, 2.5]), "but binary, such as a pickle"),
        (lambda text: b"PK\x03\x04\xff", "but a zip archive"),
        (lambda text: b"\x89PNG\r\n\x1a\n\x00", "but a PNG picture"),
        (lambda text: text.encode("utf-16"), "but UTF-16; save it as UTF-8"),
        (lambda text: text.encode("utf-16-be"), "text of another encoding; save it as UTF-8"),
        (lambda text: '{"a": "é"}'.encode("latin-1"), "not a text file (UTF-8 expected)"),
        (lambda text: b"", "not a complete JSON document: the file is empty"),
        (lambda text: b" <!DOCTYPE html>\n<html>", "but an HTML page; get the file itself"),
        (lambda text: b'<?xml version="1.0"?><a/>', "but XML or HTML"),
        (lambda text: b"format: x\nversion: 1\n", "but YAML as it seems"),
        (lambda text: b"---\nformat: x\n", "but YAML as it seems"),
    ],
)
def test_another_kind_of_file_is_named(change, told: str, tmp_path: Path, text: str) -> None:
    assert told in refusal(tmp_path, change(text))


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("{", "// mine\n{", "JSON has no comments; delete // in line 1"),
        ("{", "{\n # mine\n", "JSON has no comments; delete # in line 2"),
        ("{", "/* mine */ {", "JSON has no comments; delete /* in line 1"),
        ("\n}", ",\n}", "JSON has no comma before } or ]; delete the one in line "),
        ('"format"', "'format'", "strings of JSON have double quotes; write them for ' in line 2"),
        ("{", '{"url": "http://a#b, }", "x": None, ', "write null for None in line 1"),
    ],
)
def test_what_json_does_not_have_is_named(
    old: str, new: str, told: str, tmp_path: Path, text: str
) -> None:
    assert told in refusal(tmp_path, text.replace(old, new, 1).encode())


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity"])
def test_numbers_are_finite(number: str, tmp_path: Path, text: str) -> None:
    message = refusal(tmp_path, text.replace("1000000000.0", number, 1).encode())
    assert "should be a finite number" in message


def test_a_text_that_ends_in_a_string_says_nothing_of_what_is_in_it(tmp_path: Path) -> None:
    assert "comment" not in refusal(tmp_path, b'{"format": "http://nowhere')


def test_other_readers_name_it_too(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    for read in (read_hf_config, read_model_rates):
        file.write_bytes(gzip.compress(json.dumps({}).encode()))
        with pytest.raises(InputError, match=r"config\.json: not a text file in UTF-8, but gzip"):
            read(file)
        file.write_text("model_type: gpt2\n")
        with pytest.raises(InputError, match="YAML"):
            read(file)
    with pytest.raises(InputError, match=r"config\.json: not a complete JSON document, but YAML"):
        read_hf_config(tmp_path)  # a folder's own configuration
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(InputError, match="is a folder; name a file in it"):
        read_model_rates(empty)
