"""Programs of placed operators: lowering, proof, traces."""
