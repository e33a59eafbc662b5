"""How it is answered: one backend per module; the only room that imports solver libraries."""
