"""The layers of a rank's stages, their weights and gradients."""
