"""Timelines, charts and pages."""
