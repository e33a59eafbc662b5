"""Steps that every planner takes: its protocol, proposals, class bounds, progress, warm starts."""
