"""The answers to problems: searches, planners and backends; only this room imports solvers."""
