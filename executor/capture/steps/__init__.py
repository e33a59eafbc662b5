"""A whole training step of a module as a graph of operators."""
