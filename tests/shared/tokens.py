"""Stop tokens that set themselves."""

from dataclasses import dataclass


@dataclass
class After:
    """A stop token that is set once it has been asked so many ``times``."""

    times: int

    def is_set(self) -> bool:
        self.times -= 1
        return self.times < 0
