"""Audits what the package is tested with: pinned versions alone, and no known vulnerability.

That every dependency is pinned, installed as pinned and consistent is checked without a network.
Vulnerabilities are asked for at PyPI; where it does not answer this is said, and is no failure.
"""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

CONSTRAINTS = Path(__file__).parents[1] / "constraints.txt"
PACKAGE = "stagewright[dev,executor,cluster,service,vision]"
PER_MACHINE = ("torch", "torchvision")  # built per accelerator, with dependencies of their own
UNPINNED = ("stagewright", "pip")  # pip comes with Python
SECONDS = 120  # for all advisories


def unpinned(requirement: str, pins: dict[str, str]) -> Iterator[str]:
    """What is not installed as it is pinned, of all that a requirement brings."""
    seen: set[str] = set()
    waiting = [Requirement(requirement)]
    while waiting:
        one = waiting.pop()
        if str(one) in seen:
            continue
        seen.add(str(one))
        found = _installed(one.name)
        if found is None:
            yield f"{one.name} is not installed"
            continue
        name = canonicalize_name(one.name)
        if name not in UNPINNED:
            yield from _differs(name, found.version, pins)
        if name not in PER_MACHINE:
            waiting += _dependencies(found, one.extras)


def _installed(name: str) -> Distribution | None:
    try:
        return distribution(name)
    except PackageNotFoundError:
        return None


def _differs(name: str, version: str, pins: dict[str, str]) -> Iterator[str]:
    if name not in pins:
        yield f"{name} {version} is not pinned in {CONSTRAINTS.name}: make lock"
    elif Version(Version(version).public) != Version(pins[name]):
        yield f"{name} {version} is installed, {pins[name]} is pinned: make clean check"


def _dependencies(found: Distribution, extras: set[str]) -> Iterator[Requirement]:
    for text in found.requires or ():
        one = Requirement(text)
        if any(one.marker is None or one.marker.evaluate({"extra": e}) for e in ("", *extras)):
            yield one


def pinned(text: str) -> dict[str, str]:
    """The versions of a file of constraints, by normalised name."""
    pairs = (line.split("==") for line in text.splitlines())
    return {canonicalize_name(name): version for name, version in pairs}


def advisories() -> tuple[list[str], str]:
    """Known vulnerabilities of what is pinned, and what could not be asked for; empty if all."""
    command = [
        sys.executable, "-m", "pip_audit", "--requirement", str(CONSTRAINTS), "--no-deps",
        "--disable-pip", "--format", "json", "--progress-spinner", "off", "--timeout", "5",
    ]  # fmt: skip
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
        told = json.loads(run.stdout)["dependencies"]
    except subprocess.TimeoutExpired:
        return [], f"it did not answer within {SECONDS} s"
    except ValueError:
        last = run.stderr.strip().splitlines()[-1:]
        return [], re.sub(r"\s+", " ", "".join(last))[:200]
    bad = [
        f"{one['name']} {one['version']}: {flaw['id']}, fixed in {flaw['fix_versions']}"
        for one in told
        for flaw in one.get("vulns", ())
    ]
    skipped = [one["name"] for one in told if "skip_reason" in one]
    if not skipped:
        return bad, ""
    some = ", ".join(skipped[:5]) + (", ..." if len(skipped) > 5 else "")
    return bad, f"{len(skipped)} of {len(told)} packages are not known there: {some}"


def main() -> int:
    """Print what is wrong; the exit status."""
    wrong = sorted(set(unpinned(PACKAGE, pinned(CONSTRAINTS.read_text()))))
    consistent = subprocess.run(
        [sys.executable, "-m", "pip", "check"], capture_output=True, text=True
    )
    if consistent.returncode:
        wrong += consistent.stdout.splitlines()
    bad, unasked = advisories()
    print(*wrong, *bad, sep="\n", end="\n" if wrong or bad else "")
    if unasked:
        print(f"NOT AUDITED for known vulnerabilities: {unasked}")
    return 1 if wrong or bad else 0


if __name__ == "__main__":
    sys.exit(main())
