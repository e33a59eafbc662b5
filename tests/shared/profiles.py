"""How many examples a property test takes: a fifth in ``make test``, all in ``make test-all``."""

from typing import Any

from hypothesis import HealthCheck, Phase, settings

QUICK, NIGHTLY = "quick", "nightly"
QUICK_SHARE = 5
UNSHRUNK = (Phase.explicit, Phase.reuse, Phase.generate)  # where shrinking takes minutes

# A busy machine is no error, and no test writes to what its fixtures share.
tolerated = (HealthCheck.too_slow, HealthCheck.function_scoped_fixture)
settings.register_profile(
    QUICK, deadline=None, derandomize=True, database=None, suppress_health_check=tolerated
)
settings.register_profile(NIGHTLY, deadline=None, suppress_health_check=tolerated)


def examples(count: int, **options: Any) -> settings:
    """``count`` examples under the nightly profile, a fifth under any other, at least two."""
    if settings.get_current_profile_name() != NIGHTLY:
        count = max(2, count // QUICK_SHARE)
    return settings(max_examples=count, **options)
