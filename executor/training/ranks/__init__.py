"""The processes of a run: how they start, find each other, communicate and end."""
