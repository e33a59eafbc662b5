"""The discrete-event run of a plan."""
