"""Readers of other projects' profiles."""
