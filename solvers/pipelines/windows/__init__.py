"""Search in windows of a few consecutive stages."""
