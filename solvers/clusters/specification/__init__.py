"""The policies as the thesis writes them, in CVXPY: the written-out reference of ``policies``."""
