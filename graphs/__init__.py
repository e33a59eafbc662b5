"""What is given: device topologies, layer chains, operator graphs, and pure graph algorithms."""
