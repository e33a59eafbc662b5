"""Order of output gradients, weight gradients and synchronisations (out-of-order backprop)."""
