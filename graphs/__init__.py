"""The inputs: device topologies, layer chains, operator graphs, jobs, and pure graph algorithms."""
