"""The independent checker, and certificates with their proofs."""
