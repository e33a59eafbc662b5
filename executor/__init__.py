"""The run of plans: simulation, programs by rank, training with torch, measuring, export."""
