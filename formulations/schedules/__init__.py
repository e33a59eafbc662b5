"""Orders of computations on devices, and the generators that the literature names."""
