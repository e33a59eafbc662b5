"""The page of the service: files that browsers load, in the style of pages of plans."""
