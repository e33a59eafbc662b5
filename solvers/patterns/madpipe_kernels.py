"""Compiled kernels of the exact program: labels, lower bounds (``Need``), and stage placement.

They are in one file because numba recompiles a cached kernel only if the kernel's own file changes.
"""

import numpy as np
from numba import njit

from stagewright.formulations.patterns.joint_patterns import AllocationTables
from stagewright.graphs.documents.arrays import Ints
from stagewright.solvers.patterns.madpipe_labels import MadPipeLabel, MadPipeLabels, Need, Pass

SPECIAL, OPEN, CLOSED = 0, 1, 2  # owner of the stage placed last; see pass_layer
OWNERS = 3
DELAY, LOAD, RESIDENT, GROUP, PEAK, PARENT, CHOICE = range(7)  # the fields of a label
FIELDS = 7
SHIFT = 46  # a delay is (group << SHIFT) + rest
REST = (1 << SHIFT) - 1
FAR = np.int64(1) << 60
PARTS = 4  # rows per period
MARGIN = 1e-9  # rounding must not refuse a label that just fits
_EFFORT = 4  # comparisons that take as long as examining one stage


@njit(cache=True)
def begin(form: AllocationTables, labels: MadPipeLabels) -> None:
    """Initialise the single label of the state with all layers left."""
    labels.filled[:] = 0
    labels.work[:] = 0
    start = _state(form, form.seconds.shape[-1] - 1, len(form.normal), SPECIAL)
    labels.filled[start] = 1
    labels.rows[start, 0, DELAY] = np.int64(1) << SHIFT
    labels.rows[start, 0, LOAD : PEAK + 1] = 0


@njit(cache=True)
def pass_layer(at: Pass, l: int) -> int:
    """Extend the states with ``l`` layers left; returns a label of 0 layers left, or -1.

    States are processed in decreasing order of layers left. The stage placed last is on the special
    group (``SPECIAL``) or on normal group p (the first p are left). In the latter case the special
    group may have the stage before it (``OPEN``), or may not, because their link has no time left
    in addition to the transfer to the special group after it (``CLOSED``).
    """
    labels = at.labels
    for p in range(len(at.form.normal) + 1):
        for o in range(OWNERS):
            state = _state(at.form, l, p, o)
            for column in range(labels.filled[state]):
                end = _extend(at, state, column)
                if end >= 0 or labels.work[0] > at.steps:
                    return end
    return -1


@njit(cache=True)
def _state(form: AllocationTables, l: int, p: int, o: int) -> int:
    return int((l * (len(form.normal) + 1) + p) * OWNERS + o)


@njit(cache=True)
def _add(delay: int, ticks: int, period: int) -> int:
    """V (+) y (MadPipe 4.2.2), see ``delayed``."""
    if (delay & REST) + ticks <= period:
        return delay + ticks
    return (((delay >> SHIFT) + 1) << SHIFT) + ticks


@njit(cache=True)
def _extend(at: Pass, state: int, column: int) -> int:
    """Place every possible stage before a label; returns a label of 0 layers left, or -1."""
    form, parent = at.form, state * at.labels.rows.shape[1] + column
    left, o = divmod(state, OWNERS)
    l, p = divmod(left, len(form.normal) + 1)
    owner = form.special if o == SPECIAL else form.normal[p]
    if l == form.seconds.shape[-1] - 1:
        owner = -1
    end = -1
    for j in range(p - 1, -1, -1):
        if end < 0 and (j == p - 1 or form.skips[j]):
            end = _place_normal(at, parent, l, j, owner)
    if end < 0 and form.special >= 0 and o != CLOSED:
        end = _place_special(at, parent, l, p, owner)
    return end


@njit(cache=True)
def _place_normal(at: Pass, parent: int, l: int, j: int, owner: int) -> int:
    """Stages [k, l) on normal group j, for all k."""
    form, period, labels = at.form, at.period, at.labels
    group = form.normal[j]
    sort = form.sort[group]
    crossing = form.transfer[group, owner, l] if owner >= 0 else 0
    if crossing > period:
        return -1
    shared = crossing if owner >= 0 and owner == form.special else -1
    before = _label(labels, parent)
    delay = _add(before.delay, crossing, period)
    for c in range(form.seconds.shape[1]):
        for k in range(l - 1, -1, -1):
            labels.work[0] += _EFFORT
            if form.seconds[sort, c, l, k] > period:
                break
            through = _add(delay, form.seconds[sort, c, l, k], period)
            flight = through >> SHIFT
            allowed = _in_time(at, group, k, l, through)
            if not (allowed and _fits(form, group, c, k, l, flight)):
                continue
            at_peak = before.group if flight == before.delay >> SHIFT else before.resident
            label = MadPipeLabel(through, before.load, before.resident, at_peak, before.peak)
            if _hopeless(at, k, j, at.need.crossing[k], label):
                continue
            o = CLOSED if _link_full(at, shared, group, k) else OPEN
            target = _state(form, k, j, o)
            _keep(at, target, k, label, parent, c)
            if k == 0:
                end: int = target * labels.rows.shape[1]
                return end
    return -1


@njit(cache=True)
def _place_special(at: Pass, parent: int, l: int, p: int, owner: int) -> int:
    """Stages [k, l) on the special group, for all k, with p normal groups left."""
    form, period, labels = at.form, at.period, at.labels
    group = form.special
    sort = form.sort[group]
    crossing = form.transfer[group, owner, l] if owner >= 0 else 0
    if crossing > period:
        return -1
    before = _label(labels, parent)
    delay = _add(before.delay, crossing, period)
    for c in range(form.seconds.shape[1]):
        for k in range(l - 1, -1, -1):
            labels.work[0] += _EFFORT
            load = before.load + form.seconds[sort, c, l, k]
            if load > period:
                break
            through = _add(delay, form.seconds[sort, c, l, k], period)
            if not _in_time(at, group, k, l, through):
                continue
            saved, flight = form.saved[sort, c, l, k], through >> SHIFT
            more = form.static[sort, l, k] + (flight - 1) * saved
            # Later stages of its group are at their peak at the same time.
            later = before.group - before.resident if flight == before.delay >> SHIFT else 0
            resident = before.resident + more
            at_peak = resident + saved + max(later, form.working[sort, c, l, k])
            label = MadPipeLabel(through, load, resident, at_peak, max(before.peak + more, at_peak))
            if _hopeless(at, k, p, 0, label):
                continue
            target = _state(form, k, p, SPECIAL)
            _keep(at, target, k, label, parent, c)
            if k == 0:
                end: int = target * labels.rows.shape[1]
                return end
    return -1


@njit(cache=True)
def _label(labels: MadPipeLabels, number: int) -> MadPipeLabel:
    state, column = divmod(number, labels.rows.shape[1])
    row = labels.rows[state, column]
    return MadPipeLabel(row[DELAY], row[LOAD], row[RESIDENT], row[GROUP], row[PEAK])


@njit(cache=True)
def _in_time(at: Pass, group: int, k: int, l: int, delay: int) -> bool:
    """Whether two versions of the weights suffice, including the all-reduce (``versions``)."""
    form, period = at.form, at.period
    left = form.versions + 1 - (delay >> SHIFT)
    if left < 1:
        return False
    reduce = form.reduce[group, l, k]
    if reduce == 0:
        return True
    return bool(
        -(-reduce // (form.versions - 1)) <= period
        and -(-((delay & REST) + reduce) // left) <= period
    )


@njit(cache=True)
def _fits(form: AllocationTables, group: int, c: int, k: int, l: int, flight: int) -> bool:
    """Whether stage [k, l) alone on a group fits in memory with ``flight`` microbatches."""
    sort = form.sort[group]
    kept = flight * form.saved[sort, c, l, k] + form.working[sort, c, l, k]
    return bool(form.static[sort, l, k] + kept <= form.memory[group])


@njit(cache=True)
def _link_full(at: Pass, shared: int, group: int, k: int) -> bool:
    """Whether the link has no time for the special group before ``group`` as well, at layer k.

    ``shared`` are the ticks of the link used with the special group after ``group``; -1: none.
    """
    return bool(shared >= 0 and shared + at.form.transfer[at.form.special, group, k] > at.period)


@njit(cache=True)
def _hopeless(at: Pass, k: int, p: int, crossing: int, label: MadPipeLabel) -> bool:
    """Whether layers [0, k) require more of the special group than the label leaves.

    ``crossing`` is a lower bound on the transfer after them.
    """
    form, need, period = at.form, at.need, at.period
    row = _row(need, period, _add(label.delay, crossing, period))
    if label.load + need.load[row, p, k] > period:
        return True
    if form.special < 0:
        return False
    memory = form.memory[form.special]
    if label.peak + need.resident[row, p, k] > memory:
        return True
    used = label.load / period + label.resident / memory
    return bool(used + need.both[row, p, k] > 2 + MARGIN)


@njit(cache=True)
def _keep(at: Pass, state: int, k: int, label: MadPipeLabel, parent: int, choice: int) -> None:
    """Add a label to a state of k layers left unless it is dominated; remove dominated labels."""
    need, period, labels = at.need, at.period, at.labels
    load = 0 if label.load + need.most[k] <= period else label.load
    delay = label.delay
    if (delay & REST) + need.delay[k] <= period:
        delay = (delay >> SHIFT) << SHIFT
    label = MadPipeLabel(delay, load, label.resident, label.group, label.peak)
    if _covered(labels, state, label):
        return
    _remove_worse(labels, state, label)
    count, rows = labels.filled[state], labels.rows
    if count == rows.shape[1]:
        labels.work[1] += 1
        if at.merging:
            _merge(at, state, label)
        return
    for j in range(PARENT):
        rows[state, count, j] = label[j]
    rows[state, count, PARENT] = parent
    rows[state, count, CHOICE] = choice
    labels.filled[state] = count + 1


@njit(cache=True)
def _covered(labels: MadPipeLabels, state: int, label: MadPipeLabel) -> bool:
    """Whether some label of the state dominates ``label``; the newest labels are compared first.

    A peak of an earlier group is not compared: a further stage keeps one microbatch less there than
    in the group of ``label``, which is what it adds to the peak.
    """
    rows, count = labels.rows, labels.filled[state]
    for i in range(count - 1, -1, -1):
        if rows[state, i, DELAY] <= label.delay and rows[state, i, LOAD] <= label.load:
            less = rows[state, i, RESIDENT] <= label.resident and rows[state, i, PEAK] <= label.peak
            earlier = rows[state, i, DELAY] >> SHIFT < label.delay >> SHIFT
            if less and (earlier or rows[state, i, GROUP] <= label.group):
                labels.work[0] += count - i
                return True
    labels.work[0] += 2 * count + 1
    return False


@njit(cache=True)
def _remove_worse(labels: MadPipeLabels, state: int, label: MadPipeLabel) -> None:
    """Remove the state's labels that ``label`` dominates, see ``_covered``."""
    rows, count = labels.rows, labels.filled[state]
    i = 0
    while i < count:
        if (
            label.delay <= rows[state, i, DELAY]
            and label.load <= rows[state, i, LOAD]
            and label.resident <= rows[state, i, RESIDENT]
            and label.peak <= rows[state, i, PEAK]
            and (
                label.group <= rows[state, i, GROUP]
                or label.delay >> SHIFT < rows[state, i, DELAY] >> SHIFT
            )
        ):
            count -= 1
            for j in range(FIELDS):
                rows[state, i, j] = rows[state, count, j]
        else:
            i += 1
    labels.filled[state] = count


@njit(cache=True)
def _merge(at: Pass, state: int, label: MadPipeLabel) -> None:
    """Merge ``label`` into the closest one, in periods and memories, with the smaller values."""
    labels, period = at.labels, at.period
    rows, memory = labels.rows, at.form.memory[at.form.special]
    own = (label.delay >> SHIFT) * period + (label.delay & REST)
    least, nearest = np.inf, 0
    for i in range(labels.filled[state]):
        delay = rows[state, i, DELAY]
        delay = (delay >> SHIFT) * period + (delay & REST)
        seconds = abs(delay - own) + abs(rows[state, i, LOAD] - label.load)
        more = abs(rows[state, i, RESIDENT] - label.resident)
        more += abs(rows[state, i, PEAK] - label.peak)
        if seconds / period + more / memory < least:
            least, nearest = seconds / period + more / memory, i
    for j in range(PARENT):
        rows[state, nearest, j] = min(label[j], rows[state, nearest, j])


@njit(cache=True)
def needs_of(form: AllocationTables, period: int, rows: int) -> Need:
    """The tables of ``Need``, by the recurrence over the last stage of [0, l)."""
    layers, count = form.seconds.shape[-1] - 1, len(form.normal)
    shape = (rows, count + 1, layers + 1)
    load, resident = np.full(shape, FAR), np.full(shape, FAR)
    both = np.full(shape, np.inf)
    most = np.zeros(layers + 1, dtype=np.int64)
    need = Need(load, resident, both, most, most, _least_crossing(form))
    load[:, :, 0] = resident[:, :, 0] = 0
    both[:, :, 0] = 0.0
    for l in range(1, layers + 1):
        for p in range(count + 1):
            for v in range(rows):
                if p > 0:
                    _need_of_normal(form, period, need, v, p, l)
                if form.special >= 0:
                    _need_of_special(form, period, need, v, p, l)
    if form.special >= 0:
        for l in range(layers):
            most[l + 1] = most[l] + form.seconds[form.sort[form.special], :, l + 1, l].max()
    return need


@njit(cache=True)
def _least_crossing(form: AllocationTables) -> Ints:
    """C(l) at its least between two groups, shape (L + 1,)."""
    least = np.zeros(form.seconds.shape[-1], dtype=np.int64)
    for l in range(1, len(least) - 1):
        least[l] = REST
        for a in range(len(form.sort)):
            for b in range(len(form.sort)):
                if a < b or (a != b and (a == form.special or b == form.special)):
                    least[l] = min(least[l], form.transfer[a, b, l])
        if least[l] == REST:
            least[l] = 0
    return least


@njit(cache=True)
def _row(need: Need, period: int, delay: int) -> int:
    """The row of the tables for a delay, rounded down."""
    part = min((delay & REST) * PARTS // max(period, 1), PARTS - 1)
    return int(min(((delay >> SHIFT) - 1) * PARTS + part, need.load.shape[0] - 1))


@njit(cache=True)
def _delay(period: int, row: int) -> int:
    """The delay of a row of the tables."""
    return int(((row // PARTS + 1) << SHIFT) + -(-(row % PARTS) * period // PARTS))


@njit(cache=True)
def _need_of_normal(
    form: AllocationTables, period: int, need: Need, v: int, p: int, l: int
) -> None:
    """Update ``Need`` with normal group p - 1 unused, or with any stage [k, l) on it."""
    load, both = need.load[v, p - 1, l], need.both[v, p - 1, l]
    resident = need.resident[v, p - 1, l]
    group = form.normal[p - 1]
    sort = form.sort[group]
    before = _delay(period, v)
    for c in range(form.seconds.shape[1]):
        for k in range(l - 1, -1, -1):
            if form.seconds[sort, c, l, k] > period:
                break
            delay = _add(before, form.seconds[sort, c, l, k], period)
            if _fits(form, group, c, k, l, delay >> SHIFT):
                row = _row(need, period, _add(delay, need.crossing[k], period))
                load = min(load, need.load[row, p - 1, k])
                resident = min(resident, need.resident[row, p - 1, k])
                both = min(both, need.both[row, p - 1, k])
    need.load[v, p, l], need.resident[v, p, l], need.both[v, p, l] = load, resident, both


@njit(cache=True)
def _need_of_special(
    form: AllocationTables, period: int, need: Need, v: int, p: int, l: int
) -> None:
    """Update ``Need`` with any stage [k, l) on the special group."""
    load, resident, both = need.load[v, p, l], need.resident[v, p, l], need.both[v, p, l]
    sort, memory = form.sort[form.special], form.memory[form.special]
    before = _delay(period, v)
    for c in range(form.seconds.shape[1]):
        for k in range(l - 1, -1, -1):
            seconds = form.seconds[sort, c, l, k]
            if seconds > period:
                break
            delay = _add(before, seconds, period)
            row = _row(need, period, delay)
            bytes_ = form.static[sort, l, k] + ((delay >> SHIFT) - 1) * form.saved[sort, c, l, k]
            load = min(load, need.load[row, p, k] + seconds)
            resident = min(resident, need.resident[row, p, k] + bytes_)
            both = min(both, need.both[row, p, k] + seconds / period + bytes_ / memory)
    need.load[v, p, l], need.resident[v, p, l], need.both[v, p, l] = load, resident, both
