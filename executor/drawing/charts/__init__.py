"""Charts as PNG pictures."""
