"""Switching between cloud instances while prices change."""
