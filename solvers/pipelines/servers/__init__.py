"""The server-aware relaxation: a search over labels, its tables and its bound."""
