"""``python -m stagewright`` is the command ``stagewright``."""

import os
import signal

if "RANK" in os.environ:
    # No traceback for a rank that its launcher interrupts during start-up.
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from stagewright.cli import main

if __name__ == "__main__":
    main()
