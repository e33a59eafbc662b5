"""The planners of operators by name: a description and a source of each."""

from typing import NamedTuple

FASTT, SPLITTING, SEARCHING, PIPELINE = "fastt", "os-dpos", "search", "dag"


class Described(NamedTuple):
    """The description of a planner, and its source."""

    summary: str
    source: str


_TOPCUOGLU = "Topcuoglu et al., TPDS 2002"
_BAECHI = "Jeon et al., Baechi, SoCC 2020"

PLANNERS: dict[str, Described] = {
    FASTT: Described("the better of os-dpos and search", "after Yi et al., FastT, 2020"),
    SPLITTING: Described("DPOS with operators of the critical path split", "FastT, algorithm 2"),
    SEARCHING: Described(
        "the best list schedule, annealing, CP-SAT up to 60 operators; whole operators only",
        "Stagewright",
    ),
    PIPELINE: Described(
        "contiguous stages of the operators, 1F1B over microbatches (capture --microbatches)",
        "Tarnawski et al., NeurIPS 2020",
    ),
    "dpos": Described("critical path on its devices, the rest by insertion", "FastT, algorithm 1"),
    "heft": Described("earliest end by insertion, longest path to the end first", _TOPCUOGLU),
    "cpop": Described("the critical path on one device", _TOPCUOGLU),
    "peft": Described(
        "looks ahead by a table of optimistic costs", "Arabnejad, Barbosa, TPDS 2014"
    ),
    "m-etf": Described("earliest start first, within the memory", _BAECHI),
    "m-sct": Described("m-etf with favourite children by a linear program", _BAECHI),
    "m-topo": Described("topological order cut into equal memory", _BAECHI),
    "data-parallel": Described("every replica of the model on a device of its own", "baseline"),
    "single": Described("the fastest device that holds everything", "baseline"),
}
