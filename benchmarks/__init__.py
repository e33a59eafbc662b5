"""Benchmarks: ``python -m benchmarks [--quick] [NAME ...]``; results stand in the README."""
