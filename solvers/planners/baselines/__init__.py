"""Published planners with few decisions, to compare with: DP, GPipe, PipeDream, HetPipe."""
