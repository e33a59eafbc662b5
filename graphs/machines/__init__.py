"""Clusters: devices, links, named topologies, and the order of devices."""
