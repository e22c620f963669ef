"""A conversion in a process of its own, to be killed: python convert_process.py SOURCE OUT METHOD RESUME [SHARD_SIZE]

Prints "progress N" after every report, so that the test knows where it is.
"""

import sys

from quant_core import QuantizeConfig
from quant_core.convert import convert
from quant_core.plan import plan

source, out, method, resume, *shard_size = sys.argv[1:]


def progress(done: int, total: int, name: str) -> None:
    print(f"progress {done}", flush=True)


made = plan(source, QuantizeConfig(method=method))
convert(
    made,
    out,
    resume=resume == "True",
    shard_size=int(shard_size[0]) if shard_size else None,
    progress=progress,
    threads=2,
)
