"""What a file holds where JSON in UTF-8 is expected, and what would be right."""

import re

# The first bytes of files that are no text, what they are, and what would be right.
_SIGNATURES: tuple[tuple[bytes, str], ...] = (
    (b"\x1f\x8b", "gzip; unpack it (gunzip)"),
    (b"\x28\xb5\x2f\xfd", "Zstandard; unpack it (zstd -d)"),
    (b"BZh", "bzip2; unpack it (bunzip2)"),
    (b"\xfd7zXZ", "xz; unpack it (unxz)"),
    (b"PK\x03\x04", "a zip archive, as torch.save writes, too"),
    (b"\x89PNG", "a PNG picture"),
    (b"%PDF", "a PDF"),
    (b"\x89HDF", "HDF5"),
    (b"PAR1", "Parquet"),
    (b"\x80", "binary, such as a pickle"),
    (b"\xff\xfe", "UTF-16; save it as UTF-8"),
    (b"\xfe\xff", "UTF-16; save it as UTF-8"),
)

# Outside of strings, which the first alternative skips; nothing is known after an open one.
FOREIGN = re.compile(
    r'"(?:[^"\\]|\\.)*"|(?P<open>")|(?P<comment>//|/\*|#)|(?P<comma>,(?=\s*[]}]))|(?P<quote>\')'
    r"|(?P<word>\b(?:None|True|False)\b)",
    re.DOTALL,
)
_OF_PYTHON = {"None": "null", "True": "true", "False": "false"}


def not_text(data: bytes) -> str:
    """The complaint about a file that is not text in UTF-8."""
    for signature, known in _SIGNATURES:
        if data.startswith(signature):
            return f"not a text file in UTF-8, but {known}"
    return "not a text file (UTF-8 expected)"


def not_json(text: str, error: ValueError) -> str:
    """The complaint about a text for which a JSON parser raised ``error``."""
    begins = text.lstrip()[:200]
    if not begins:
        return "not a complete JSON document: the file is empty"
    if "\0" in begins:
        return "not a complete JSON document, but text of another encoding; save it as UTF-8"
    if begins.startswith("<"):
        what = "an HTML page" if re.search("(?i)<(!doctype )?html", begins) else "XML or HTML"
        return f"not a complete JSON document, but {what}; get the file itself"
    if re.match(r"---\s|[\w-]+:(\s|$)", begins):
        return "not a complete JSON document, but YAML as it seems; convert it to JSON"
    foreign = _foreign(text)
    return f"not a complete JSON document ({error})" + (f": {foreign}" if foreign else "")


def _foreign(text: str) -> str | None:
    """The first syntax that is no JSON (a comment, a quote), with its line; None without any."""
    found = next((one for one in FOREIGN.finditer(text) if one.lastgroup), None)
    if found is None or found.lastgroup == "open":
        return None
    line, what = text.count("\n", 0, found.start()) + 1, found[0]
    return {
        "comment": f"JSON has no comments; delete {what} in line {line}",
        "comma": f"JSON has no comma before }} or ]; delete the one in line {line}",
        "quote": f"strings of JSON have double quotes; write them for ' in line {line}",
        "word": f"write {_OF_PYTHON.get(what)} for {what} in line {line}",
    }[str(found.lastgroup)]
