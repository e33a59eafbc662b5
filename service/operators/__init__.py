"""Placements of operators, the training by such plans, and divisions of operator graphs."""
