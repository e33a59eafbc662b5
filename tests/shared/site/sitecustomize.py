"""Python starts with this where its folder is on PYTHONPATH: a test's commands find torchvision."""

from benchmarks import torchvision_operators  # noqa: F401
