"""The optimal way through changing prices."""
