"""Search for the order of the computations on each device."""
