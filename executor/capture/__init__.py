"""Models as layers and stages that can be run in pieces."""
