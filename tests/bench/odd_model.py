"""A parallel model that cannot be captured: for planners that are never asked to simulate."""

from simdev.errors import Unsupported
from simdev.graphs.parallel_model import parallel_model


@parallel_model(
    "hollow",
    sizes={"": {}},
    defaults={"layers": 4, "length": 128, "microbatch": 1},
    axes=("pp", "dp_replicate"),
    flops=lambda parameters: 1.0,
    source="none: made for tests",
)
def hollow(*_, **__):
    raise Unsupported("hollow cannot be captured")
