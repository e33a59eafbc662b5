"""One module per solver library, and the registry of backends."""
