"""Which tests run on one worker: those that share something costly, which is then made once.

The marks of ``--dist loadgroup`` do not reach pytest-xdist 3.8's scheduler under pytest 9.2.
"""

from functools import cache
from pathlib import Path

from xdist.scheduler import LoadScopeScheduling

POOL = "ranks: Ranks"  # a test's argument: the pool of gloo processes
OF_A_FILE = 'scope="module"'


class SharedFixtures(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """Tests with the pool of ranks go to one worker, those with a file's fixture together."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        text = _text(self.config.rootpath / file)
        if POOL in text:
            return POOL
        return file if OF_A_FILE in text else nodeid


@cache
def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8")
