"""The accelerators that a cluster's jobs share: types, counts, servers and prices."""

import re
from pathlib import Path
from typing import Literal

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.errors import InputError
from stagewright.graphs.documents.units import require_amount, require_count, require_type
from stagewright.graphs.machines.cluster import Cluster, load_cluster

_MAX_ACCELERATORS = 10_000_000

_SPELLING = re.compile(
    r"(?P<name>[A-Za-z][\w.-]*)=(?P<count>\d{1,9})(x(?P<per_server>\d{1,9}))?(@(?P<price>[\d.eE+-]+))?"
)


@documents.record
class Accelerator:
    """One type of accelerator: their number, number per server, and dollars per hour of one.

    ``per_server`` is None where servers do not matter, ``dollars_per_hour`` where cost does not.
    """

    name: str
    count: int
    per_server: int | None = None
    dollars_per_hour: float | None = None

    def __post_init__(self) -> None:
        place = f"accelerator {self.name!r}: "
        if not self.name:
            raise InputError("an accelerator has an empty name")
        require_count(self.count, place + "count", _MAX_ACCELERATORS)
        if self.per_server is not None:
            require_count(self.per_server, place + "per_server", self.count)
            if self.count % self.per_server:
                raise InputError(
                    f"{place}{self.count} do not fill servers of {self.per_server}; "
                    "make the accelerators of the other servers a separate type"
                )
        if self.dollars_per_hour is not None:
            require_amount(self.dollars_per_hour, place + "dollars_per_hour")

    @property
    def servers(self) -> int:
        """Number of servers; all accelerators are on one where servers do not matter."""
        return self.count // (self.per_server or self.count)


@documents.record
class Pool:
    """The accelerators of a cluster, by type."""

    accelerators: tuple[Accelerator, ...]
    format: Literal["stagewright-pool"] = "stagewright-pool"
    version: Literal[1] = 1

    def __post_init__(self) -> None:
        if not self.accelerators:
            raise InputError("the pool has no accelerators")
        names = self.names
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise InputError(f"two types of accelerators are named {twice!r}")

    @property
    def names(self) -> tuple[str, ...]:
        """The types' names, in order."""
        return tuple(accelerator.name for accelerator in self.accelerators)


def parse_pool(text: str) -> Pool:
    """Parse a pool: ``v100=36,p100=9x4,k80=16@0.45``.

    ``36`` accelerators; ``9x4`` are 9 servers of 4; ``@`` precedes the dollars per hour of one.

    Raises
    ------
    InputError
        If a part has another form, or a type appears twice.
    """
    require_type(text, str, "cluster")
    accelerators = []
    for part in text.split(","):
        match = _SPELLING.fullmatch(part.strip())
        if match is None:
            raise InputError(
                f"cluster {text!r}: {part.strip()!r} is not an accelerator type; write name=count, "
                "name=SERVERSxPER_SERVER or name=count@DOLLARS_PER_HOUR, for example v100=9x4@2.48"
            )
        accelerators.append(_accelerator(match))
    return Pool(tuple(accelerators))


def _accelerator(match: re.Match[str]) -> Accelerator:
    count, per_server = int(match["count"]), match["per_server"]
    try:
        price = None if match["price"] is None else float(match["price"])
    except ValueError:
        raise InputError(f"{match[0]!r}: {match['price']!r} is not a price per hour") from None
    if per_server is None:
        return Accelerator(match["name"], count, None, price)
    require_count(count, f"{match[0]!r}: the number of servers", _MAX_ACCELERATORS)
    require_count(int(per_server), f"{match[0]!r}: the number per server", _MAX_ACCELERATORS)
    return Accelerator(match["name"], count * int(per_server), int(per_server), price)


def pool_of_cluster(cluster: Cluster) -> Pool:
    """The devices of ``cluster`` by kind, with servers if all servers of a kind have equal size."""
    accelerators = []
    kinds = [device.kind for device in cluster.devices]
    for kind in dict.fromkeys(kinds):
        on_servers = [sum(kinds[device] == kind for device in server) for server in cluster.servers]
        sizes = {size for size in on_servers if size}
        accelerators.append(
            Accelerator(kind, kinds.count(kind), sizes.pop() if len(sizes) == 1 else None)
        )
    return Pool(tuple(accelerators))


def read_pool(text: str, name: str = "cluster") -> Pool:
    """The accelerators that a text spells, or those of the pool file or cluster file that it names.

    Raises InputError if ``text`` is neither; ``name`` is what it is of.
    """
    path = Path(text)
    if not text or ("=" in text and not path.exists()):
        return parse_pool(text)
    if not path.exists():
        raise InputError(
            f"{name.lstrip('-')} {text!r}: there is no such file; accelerators are spelled "
            "v100=36,k80=9x4"
        )
    if f'"{documents.format_name(Cluster)}"' in documents.read_text(path):
        return pool_of_cluster(load_cluster(path))
    return documents.read(Pool, path)
