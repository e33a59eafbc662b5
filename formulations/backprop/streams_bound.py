"""A bound on every plan of a single device between two losses, with one stream or two."""

from stagewright.formulations.pipelines.bounds.least_times import LeastTimes
from stagewright.formulations.plans.pipeline import PipelineProblem

TWO_STREAMS = "two streams of a single device"


def two_streams_bound(problem: PipelineProblem) -> float | None:
    """The larger of two lower bounds; None for several devices. Proof: docs/certificates.md.

    - The main stream's computations, and after its last gradient the first layer's last weight
      gradient, which nothing but other weight gradients can run beside.
    - All computations by the share of the device that they occupy; the device is alone with its
      first gradient and with the last layer's forwards, whatever their shares.
    """
    if len(problem.cluster) > 1:
        return None
    times, count = LeastTimes(problem, streams=2), problem.microbatches
    forward, gradient = times.forward[0, 0], times.gradient[0, 0]
    weights = times.backward[0, 0] - gradient
    steps = float(times.update[0].sum())
    main = count * float((forward + gradient).sum()) + float(weights[0])
    area = count * float(times.area[0, 0].sum())
    of_forward, of_input, of_weights = problem.layer_shares(problem.kinds[0], 1)[:, -1].tolist()
    of_gradient: float = of_input if times.splits[-1] else max(of_input, of_weights)
    room = float(gradient[-1]) * (1 - of_gradient) + count * float(forward[-1]) * (1 - of_forward)
    return float(max(main, area + room) + steps)
