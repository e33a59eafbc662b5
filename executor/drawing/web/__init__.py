"""Self-contained pages: templates, and the scripts that draw on them."""
