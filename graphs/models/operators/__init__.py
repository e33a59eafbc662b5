"""Models as graphs of operators."""
