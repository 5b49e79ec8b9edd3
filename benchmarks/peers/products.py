"""FLOPs of the matrix products of a compiled program.

Counts what runs, recomputation with it, and no elementwise work; so that programs of several
libraries can be held side by side. Read off programs for CPUs, where a product stays a `dot`.

>>> product_flops('''HloModule m, num_partitions=8
...
... ENTRY %main (p: f32[8,4], q: f32[4,2]) -> f32[8,2] {
...   %p = f32[8,4]{1,0} parameter(0)
...   %q = f32[4,2]{1,0} parameter(1)
...   ROOT %r = f32[8,2]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
... }
... ''')
1024
"""

from __future__ import annotations

import math
import re

from shardlib.verification.hlo import Computation, Instruction, Module, parse
from shardlib.verification.traffic import trip_count


def product_flops(text: str) -> int:
    """FLOPs of the matrix products of a program on all its devices; two for a multiply and an add.

    Bodies of loops count as often as they run, of a conditional's branches the largest.

    Raises:
        ValueError: products stand in a loop whose trip count is unknown.
    """
    module = parse(text)
    return _within(module.computations[module.entry], module, {}) * module.partitions


def _within(body: Computation, module: Module, known: dict[str, int]) -> int:
    def called(name: str) -> int:
        if name not in known:
            known[name] = _within(module.computations[name], module, known)
        return known[name]

    shapes = {one.name: one.shape for one in body.instructions}
    found = 0
    for one in body.instructions:
        if one.opcode == "dot":
            found += _dot(one, shapes[one.operands[0]])
        elif one.opcode == "while":
            inside = called(one.called["body"])
            if (trips := trip_count(one, body, module)) is None and inside:
                raise ValueError(f"the trip count of the loop {one.name} is unknown")
            found += inside * (trips or 0)
        elif one.opcode == "conditional":
            found += max(map(called, one.branches), default=0)
        else:
            found += sum(called(name) for name in one.called.values())
    return found


def _dot(dot: Instruction, left: str) -> int:
    contracted = dot.attribute("lhs_contracting_dims").strip("{}")
    sizes = _dims(left)
    return (
        2
        * math.prod(_dims(dot.shape))
        * math.prod(sizes[int(dim)] for dim in contracted.split(",") if dim)
    )


def _dims(shape: str) -> list[int]:
    found = re.search(r"\[([\d,]*)\]", shape)
    return [int(size) for size in found[1].split(",") if size] if found else []
