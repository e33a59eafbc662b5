"""Write ``prices/spot.json``: four weeks of generated (not observed) spot prices.

Each price changes every one to three days, as spot prices do, around a level below the on-demand
price.
"""

import random
from pathlib import Path

from stagewright.graphs.workloads.prices import HOUR, Instance, Market, PriceSeries, save_market

START = 1_790_000_000.0  # an instant in September 2026
DAYS = 28
INSTANCES = (  # provider, region, name, type, accelerators, dollars per hour
    ("aws", "us-east-1", "p2.xlarge", "k80", 1, 0.27),
    ("aws", "us-east-1", "p3.2xlarge", "v100", 1, 0.98),
    ("aws", "us-east-1", "p3.8xlarge", "v100", 4, 3.80),
    ("azure", "us-east", "NC6s v2", "p100", 1, 0.44),
    ("azure", "us-east", "NC6s v3", "v100", 1, 0.92),
)


def series(draw: random.Random, instance: Instance, level: float) -> PriceSeries:
    """Prices that change every one to three days and revert to ``level``."""
    seconds, dollars = [START], [level]
    while True:
        later = seconds[-1] + draw.uniform(24, 72) * HOUR
        if later >= START + DAYS * 24 * HOUR:
            break
        price = dollars[-1] * draw.uniform(0.75, 1.3) * (level / dollars[-1]) ** 0.4
        seconds.append(round(later))
        dollars.append(round(price, 4))
    return PriceSeries(instance, tuple(seconds), tuple(dollars), START + DAYS * 24 * HOUR)


def market() -> Market:
    """All instances; the same on every run."""
    draw = random.Random(0)
    return Market(
        tuple(
            series(draw, Instance(provider, region, name, gpu, gpus), level)
            for provider, region, name, gpu, gpus, level in INSTANCES
        )
    )


if __name__ == "__main__":
    folder = Path(__file__).with_name("prices")
    folder.mkdir(exist_ok=True)
    save_market(market(), folder / "spot.json")
