"""Mini-batches of a run: their structure, the ranks that read them, and resumed passes."""
