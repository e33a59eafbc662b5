"""Search over parallel layouts."""
