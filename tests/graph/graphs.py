"""Small graphs written by hand."""

from __future__ import annotations

from shardlib.graph import FactorRule, Graph, Op, Region, Value, elementwise

SAME = elementwise([(4,)], (4,))
STACK = FactorRule(sizes=(3, 4), operands=(((0,), (1,)),), results=(((1,),),), whole=frozenset({0}))


def array(*shape: int, **more: str) -> Value:
    return Value(shape=shape, dtype="float32", **more)


def one_op(**changes: object) -> Graph:
    """exp of a batch of 4."""
    op = Op(kind="exp", operands=(0,), results=(1,), rule=SAME, category="elementwise", path="0")
    return Graph(
        **{
            "values": (array(4, role="batch"), array(4)),
            "ops": (op,),
            "inputs": (0,),
            "outputs": (1,),
            **changes,
        }
    )  # type: ignore[arg-type]


def op(
    kind: str,
    operands: tuple[int, ...],
    result: int,
    path: str,
    *,
    rule: FactorRule = SAME,
    region: int = 1,
    flops: float = 0.0,
) -> Op:
    boundary = kind in ("carry", "enter", "exit")
    return Op(
        kind=kind,
        operands=operands,
        results=(result,),
        rule=rule,
        category="boundary" if boundary else "elementwise",
        path=path,
        region=region,
        flops=flops,
    )


def loop(outputs: tuple[int, ...] = (9,)) -> Graph:
    """Three times: a carry of 4 is multiplied with a slice of a stack, beside a second carry that
    is doubled.

    The values 0 to 2 come in; 9 and 10 are the carries after the loop, of which the second needs
    nothing of the first.
    """
    two = elementwise([(4,), (4,)], (4,))
    values = (
        array(3, 4, path="weights", role="parameter"),
        array(4, path="x", role="batch"),
        array(4, path="y", role="batch"),
        *(array(4) for _ in range(8)),
    )
    ops = (
        op("carry", (1,), 3, "0/carry/0"),
        op("carry", (2,), 4, "0/carry/1"),
        op("enter", (0,), 5, "0/enter/0", rule=STACK),
        op("mul", (3, 5), 6, "0/body/0", rule=two, flops=4),
        op("add", (4, 4), 7, "0/body/1", rule=two, flops=4),
        op("exp", (6,), 8, "0/body/2", flops=4),
        op("carry", (3, 6), 9, "0/final/0", rule=two),
        op("carry", (4, 7), 10, "0/final/1", rule=two),
    )
    return Graph(
        values=values,
        ops=ops,
        regions=(Region(parent=-1, kind="root"), Region(parent=0, kind="scan", trips=3)),
        inputs=(0, 1, 2),
        outputs=outputs,
    )
