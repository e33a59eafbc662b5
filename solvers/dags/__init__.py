"""Operator graphs divided into contiguous sets, one per device."""
