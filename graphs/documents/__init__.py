"""Strict JSON documents, units and errors, used by all other modules."""
