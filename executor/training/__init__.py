"""The torch runtime: interpreter, weights, launcher, checkpoints."""
