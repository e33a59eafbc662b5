"""Models as graphs of their blocks, by torch.export."""
