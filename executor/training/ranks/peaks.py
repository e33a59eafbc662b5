"""The most memory of any rank, which the ranks tell each other through the job's store."""

import math
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

GROWTH = 1.01  # a peak is told again when it is larger by this factor: seldom after the first steps
READ_SECONDS = 2.0  # least time between two readings of the others' peaks


@dataclass(slots=True)
class Peaks:
    """The rank's published peak of memory and the peaks read from other ranks, in bytes.

    No rank waits for another one: what is known may be some seconds old.
    """

    store: "Store"
    rank: int
    world_size: int
    told: int = 0
    others: int = 0
    read: float = -math.inf

    def tell(self, peak: int) -> None:
        """Tell the others of this rank's ``peak``, if it has grown."""
        if peak > GROWTH * self.told:
            self.store.set(str(self.rank), str(peak))
            self.told = peak

    def most(self, peak: int) -> int:
        """The largest peak of all ranks that is known; this rank's is ``peak``."""
        if time.monotonic() >= self.read + READ_SECONDS:
            keys = [str(rank) for rank in range(self.world_size) if rank != self.rank]
            told = [int(self.store.get(key)) for key in keys if self.store.check([key])]
            self.others, self.read = max(told, default=0), time.monotonic()
        return max(peak, self.others)
