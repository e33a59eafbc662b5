"""Profiles of layers and links, and predictions beside measurements."""
