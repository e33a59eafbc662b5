"""Training by measured layer profiles on mixed clusters."""
