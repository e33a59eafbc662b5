"""The canonical shapes that backends take, and what they answer."""
