"""Stages whose layers a group of devices computes together: each device has a shard of them."""
