"""Proof that a program carries out its plan, before any process starts."""
