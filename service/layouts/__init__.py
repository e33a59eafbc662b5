"""Layouts of the training of large transformers, by estimates and by measured profiles."""
