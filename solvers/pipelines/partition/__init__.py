"""PRM: the partition with the smallest bottleneck."""
