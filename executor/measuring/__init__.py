"""Profiles of layers and links, and comparison of predictions with measurements."""
