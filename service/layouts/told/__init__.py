"""Answers about layouts in tables and lines: for the command line, the page and notebooks."""
