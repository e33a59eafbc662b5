"""The CPU seconds of the tests are within a budget for every folder.

``tests/durations.csv`` has the measured CPU seconds of every file by suite: ``make durations``
writes them on a quiet machine; ``[tool.test-seconds]`` of ``pyproject.toml`` has the budgets.

``python .ci/budget.py`` checks; ``python .ci/budget.py write`` reads ``build/durations`` first.
Exit code 1 if a folder is over its budget, all budgets together are over the limit, or a file of
tests was not measured.
"""

import csv
import sys
import tomllib
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "tests" / "durations.csv"
MOST = 330.0  # CPU seconds of ``make test``: three minutes on two cores


def main() -> int:
    """Check, or write the measured seconds and check."""
    if sys.argv[1:] == ["write"]:
        write()
    faults = [*unmeasured(), *over_budget()]
    print("\n".join(faults) or "The tests are within their budgets.")
    return bool(faults)


def write() -> None:
    """Sums of what the workers measured, by suite and file."""
    seconds: Counter[tuple[str, str]] = Counter()
    for path in (ROOT / "build" / "durations").glob("*.csv"):
        for suite, file, spent in csv.reader(path.open(encoding="utf-8")):
            seconds[suite, file] += float(spent)
    with MEASURED.open("w", encoding="utf-8", newline="") as file:
        rows = csv.writer(file, lineterminator="\n")
        rows.writerow(("suite", "file", "seconds"))
        rows.writerows((*key, f"{spent:.1f}") for key, spent in sorted(seconds.items()))


def unmeasured() -> list[str]:
    """Files of tests without measured seconds, and measured files that are gone."""
    there = {str(path.relative_to(ROOT)) for path in ROOT.glob("tests/*/test_*.py")}
    known = {file for _, file, _ in measured()}
    return [
        *(f"{file} was not measured: make durations" for file in sorted(there - known)),
        *(f"{file} is measured but gone: make durations" for file in sorted(known - there)),
    ]


def over_budget() -> list[str]:
    """Folders whose quick tests take more CPU seconds than their budget."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    budgets: dict[str, float] = settings["tool"]["test-seconds"]
    spent: Counter[str] = Counter()
    for suite, file, seconds in measured():
        if suite == "quick":
            spent[Path(file).parent.name] += seconds
    faults = [
        f"tests/{folder}: {seconds:.0f} CPU s of a budget of {budgets.get(folder, 0):.0f}"
        for folder, seconds in sorted(spent.items())
        if seconds > budgets.get(folder, 0)
    ]
    if sum(budgets.values()) > MOST:
        faults.append(
            f"budgets are {sum(budgets.values()):.0f} CPU s together, of at most {MOST:.0f}"
        )
    return faults


def measured() -> list[tuple[str, str, float]]:
    """Suite, file and CPU seconds."""
    rows = csv.reader(MEASURED.open(encoding="utf-8"))
    next(rows)
    return [(suite, file, float(seconds)) for suite, file, seconds in rows]


if __name__ == "__main__":
    sys.exit(main())
