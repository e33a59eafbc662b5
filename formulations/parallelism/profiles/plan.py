"""Plans of stages whose replicas are tensor groups on unequal servers."""

from stagewright.graphs.documents import documents
from stagewright.graphs.documents.units import require_count


@documents.record
class Replica:
    """``tensor`` devices of server ``server`` of pool ``pool`` (both counted from 0)."""

    pool: int
    server: int
    tensor: int


@documents.record
class ProfiledStage:
    """The next ``layers`` layers, on as many replicas as there are pipelines."""

    layers: int
    replicas: tuple[Replica, ...]


@documents.record
class ProfiledPlan:
    """Pipeline j is the j-th replica of every stage and runs ``microbatches[j]`` microbatches."""

    microbatch_size: int
    stages: tuple[ProfiledStage, ...]
    microbatches: tuple[int, ...]

    def __post_init__(self) -> None:
        require_count(self.microbatch_size, "microbatch_size", 1 << 20)

    @property
    def data(self) -> int:
        """The number of pipelines."""
        return len(self.microbatches)


def even_microbatches(total: int, pipelines: int) -> tuple[int, ...]:
    """``total`` microbatches in equal parts; the first pipelines have one more."""
    least, more = divmod(total, pipelines)
    return tuple(least + (j < more) for j in range(pipelines))
