"""Plans as instructions: lowering, verification, traces."""
