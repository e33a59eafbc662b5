"""Jobs of the planning service: what may be asked, and a store of requests, events and answers."""
