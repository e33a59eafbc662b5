"""What each policy asks for: one module states one policy's problem."""
