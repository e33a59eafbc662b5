"""Strict JSON documents, units and errors: what every other module stands on."""
