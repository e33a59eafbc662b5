"""The canonical forms of problems that backends take, and the backends' answers."""
