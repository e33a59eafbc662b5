"""Commands on pipelines: their plans, sweeps and comparisons with runs."""
