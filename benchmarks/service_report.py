"""``docs/benchmarks/service.md``: each study writes the section under its own heading."""

import re

from benchmarks.report import PAGES

REPORT = PAGES / "service.md"


def put(heading: str, text: str) -> None:
    """Write the section of a heading anew, or add it at the end; and print it."""
    section = f"{heading}\n\n{text.strip()}\n"
    sections = re.split(r"(?m)^(?=#+ )", REPORT.read_text())
    kept = [one.strip() + "\n" for one in sections if one.strip()]
    places = [number for number, one in enumerate(kept) if one.startswith(f"{heading}\n")]
    if places:
        kept[places[0]] = section
    else:
        kept.append(section)
    REPORT.write_text("\n".join(kept))
    print(section)
