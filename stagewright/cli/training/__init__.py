"""Commands that measure models and machines, and that train."""
