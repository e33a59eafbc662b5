"""One rank's instructions, carried out: computations, transfers, updates."""
