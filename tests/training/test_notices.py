"""What a rank remarks is one line; other warnings are shown as Python shows them."""

import warnings

from stagewright.executor.training.ranks.endings import said_notices
from stagewright.graphs.documents.errors import Notice


def test_a_notice_is_one_line_in_a_rank() -> None:
    usual = warnings.formatwarning
    with said_notices():
        assert warnings.formatwarning(Notice("one\n two"), Notice, "f.py", 3) == (
            "stagewright: one two\n"
        )
        other = warnings.formatwarning(UserWarning("x"), UserWarning, "f.py", 3)
    assert other == usual(UserWarning("x"), UserWarning, "f.py", 3)
    assert warnings.formatwarning is usual
