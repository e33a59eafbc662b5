"""Plans of pipelines: planned, checked, simulated, swept and exported."""
