"""What a rank computes with: the layers of its stages, their weights and gradients."""
