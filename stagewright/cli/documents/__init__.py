"""Commands that write models and clusters."""
