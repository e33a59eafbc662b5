"""Models: chains and graphs of layers, analytic and named ones."""
