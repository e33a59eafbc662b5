"""The policies' problems, one module each."""
