"""Places for jobs on the servers of one type of accelerator."""


class FreeServers:
    """The free accelerators of one type, server by server."""

    def __init__(self, count: int, per_server: int | None, lost: set[int]) -> None:
        self.size = per_server or count
        self.free = [
            set(range(start, start + self.size)) - lost for start in range(0, count, self.size)
        ]

    def take(self, numbers: tuple[int, ...]) -> bool:
        """Take exactly these, if all are free."""
        if any(number not in self.free[number // self.size] for number in numbers):
            return False
        for number in numbers:
            self.free[number // self.size].remove(number)
        return True

    def place(self, scale: int, together: bool) -> tuple[int, ...] | None:
        """Take ``scale`` accelerators on as few servers as possible, preferably the fullest.

        None if there are not enough, or if ``together`` and they do not fit on the fewest servers.
        """
        fitting = [(len(free), at) for at, free in enumerate(self.free) if len(free) >= scale]
        chosen = [min(fitting)[1]] if fitting else self._several(scale)
        least = -(-scale // self.size)
        if not chosen or (together and len(chosen) > least):
            return None
        numbers = [number for server in chosen for number in sorted(self.free[server])][:scale]
        for number in numbers:
            self.free[number // self.size].remove(number)
        return tuple(sorted(numbers))

    def _several(self, scale: int) -> list[int]:
        """Servers with the most room first, the last the one with the least that is enough."""
        holders = [server for server, free in enumerate(self.free) if free]
        by_room = sorted(holders, key=lambda server: (-len(self.free[server]), server))
        chosen: list[int] = []
        missing = scale
        while by_room and missing > 0:
            enough = [server for server in by_room if len(self.free[server]) >= missing]
            server = enough[-1] if enough else by_room[0]
            by_room.remove(server)
            chosen.append(server)
            missing -= len(self.free[server])
        return chosen if missing <= 0 else []
