"""How it is carried out: simulation of a plan; lowering and the torch runtime build on it."""
