"""A compiler that made no program, as a finding: out of memory, out of time, or aborted.

>>> out_of_memory_text("XLA:TPU ... Used 20.1G of 15.75G hbm. Exceeded hbm capacity by 4.4G")
'the program needs 20.1GiB a device and there are 15.75GiB.'
"""

from __future__ import annotations

import dataclasses
import re

from shardlib.planning.plan import Plan
from shardlib.planning.units.quantity import bytes_text
from shardlib.report import Finding
from shardlib.verification.isolation import Failure


def failed(failure: Failure, plan: Plan) -> Finding:
    """Why there is no compiled step."""
    if failure.kind == "out-of-memory":
        parts = sorted(
            dataclasses.asdict(plan.estimate.device_bytes).items(), key=lambda part: -part[1]
        )
        predicted = ", ".join(f"{name} {bytes_text(size)}" for name, size in parts[:3])
        return Finding(
            code="out-of-memory",
            severity="error",
            message=(
                f"{out_of_memory_text(failure.message)} The plan's largest parts are {predicted}."
            ),
            hint=(
                "shard more: a higher zero stage, remat=full, more microbatches, or a smaller batch"
            ),
        )
    hint = {
        "compile-timeout": "allow more seconds, or verify a shallower model",
        "compiler-memory": "allow more memory, or verify on a larger machine",
        "compiler-abort": "this is a fault of the compiler; another mesh or rule may avoid it",
    }.get(failure.kind, "")
    return Finding(code=failure.kind, severity="error", message=failure.message, hint=hint)


#: The two forms in which the TPU compiler says how much is needed and how much there is.
_NEEDED = (
    re.compile(r"Used (?P<need>[\d.]+[KMGT]?) of (?P<have>[\d.]+[KMGT]?) hbm"),
    re.compile(
        r"required for (?P<what>[^()]*?) \((?P<need>[\d.]+[KMGT]?)\) exceeds available HBM"
        r" \((?P<have>[\d.]+[KMGT]?)\)"
    ),
)


def out_of_memory_text(message: str) -> str:
    """What a compiler says about memory that does not suffice, in one line: the sums, then the
    largest buffers where it names them.
    """
    sums = next((match for form in _NEEDED if (match := form.search(message))), None)
    what = f" for {sums['what']}" if sums and sums.re.groups == 3 else ""
    headline = (
        f"the program needs {sums['need']}iB a device{what} and there are {sums['have']}iB"
        if sums
        else message.strip().splitlines()[0][:300].rstrip(".")
    )
    sizes = re.findall(r"\d+\. Size: ([\d.]+\w)", message)
    names = re.findall(r"Operator: op_name=\"([^\"]*)\"", message)
    shapes = re.findall(r"Shape: (\S+)", message)
    largest = [
        " ".join(filter(None, (f"{size}iB", *shapes[i : i + 1], *names[i : i + 1])))
        for i, size in enumerate(sizes[:5])
    ]
    return headline + (f"; largest buffers: {'; '.join(largest)}" if largest else "") + "."
