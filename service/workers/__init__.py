"""Workers of the planning service: each job is answered in a process of its own."""
