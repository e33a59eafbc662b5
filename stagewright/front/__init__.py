"""The use cases as Python functions, by subject; ``import stagewright`` loads them when asked."""
