"""Mini-batches: what they are made of, who reads them, and what of them."""
