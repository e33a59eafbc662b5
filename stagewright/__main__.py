"""``python -m stagewright`` is the command ``stagewright``."""

import os
import signal

if "RANK" in os.environ:
    # A rank that its launcher interrupts while it still loads needs no traceback for that.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from stagewright.cli import main

if __name__ == "__main__":
    main()
