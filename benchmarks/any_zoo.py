"""All models of the table, by name."""

from benchmarks.any_models import MODELS
from benchmarks.any_zoo_torch import TORCH
from benchmarks.any_zoo_torchvision import TORCHVISION
from benchmarks.any_zoo_transformers import TRANSFORMERS

ZOO = {one.name: one for one in (*MODELS.values(), *TRANSFORMERS, *TORCHVISION, *TORCH)}
