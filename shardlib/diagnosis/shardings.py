"""Shardings of every value of a program, and where two of them meet.

Shardy, the partitioner of XLA, propagates the shardings of a program and says, operation by
operation, which value has to be there in another sharding and which partial sums have to be
reduced: it does so here in Python, before the compiler of any platform. What it says has the
source lines of the program. It may abort, so it runs in a process of its own:
`python -m shardlib.diagnosis.shardings FOLDER`. The compilers may combine, move or drop what
follows from it; `shardlib.diagnosis.rows` joins it with what they made.

>>> read_location('"jit(f)/mul"(callsite("g"("/m.py":5:8 to :24) at "f"("/m.py":9:4 to :9)))')
{'op': 'jit(f)/mul', 'frames': [['/m.py', 5, 8, 5, 24, 'g'], ['/m.py', 9, 4, 9, 9, 'f']]}
>>> read_sharding('#sdy.sharding<@mesh, [{"data", "model":(1)2}, {?}]>')
[['data', 'model:(1)2'], []]
"""

from __future__ import annotations

import functools
import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shardlib.untrusted.data import JsonObject

#: The passes of Shardy: propagation, then the reshards and reductions that follow from it.
PASSES = (
    "builtin.module(sdy-propagation-pipeline)",
    "builtin.module(func.func(sdy-insert-explicit-reshards{enable-full-version=true}))",
)
#: Values of fewer elements are not listed on their own.
SMALLEST = 1 << 12

_TENSOR = re.compile(r"tensor<((?:\d+x)*)([a-z]\w*(?:<\w+>)?)>")
_NAMES = re.compile(r'"((?:[^"\\]|\\.)*)"(?::(\d+):(\d+)(?: to (\d*):(\d+))?)?')
_DIMS = re.compile(r"\{([^{}]*)\}")
_PER_VALUE = re.compile(r"<@\w+, \[[^\[\]]*\][^<>]*>")


def main(folder: Path) -> None:
    """Reads the shardings of the modules in a folder: `module-0.mlir` -> `shardings-0.json`."""
    for file in sorted(folder.glob("module-*.mlir")):
        result = read_shardings(file.read_text(encoding="utf-8"))
        target = file.with_name(file.name.replace("module", "shardings")).with_suffix(".json")
        target.write_text(json.dumps(result), encoding="utf-8")
    (folder / "compiled.hlo").touch()
    (folder / "result.json").write_text(
        json.dumps({"compile_seconds": 0.0, "memory": {}, "device_kind": "", "versions": {}}),
        encoding="utf-8",
    )


def read_shardings(text: str) -> JsonObject:
    """Propagates the shardings of a module of StableHLO and reads them.

    Returns:
        "meetings": one entry per reshard or reduction (`_Reader.meeting`); "values": the larger
        values with their shardings; "layouts": where the program lays out values; "problem": what
        Shardy could not do, "" where it did.
    """
    try:
        import jax
        from jaxlib.mlir import passmanager

        empty: Any = jax.jit(lambda: 0).lower().compiler_ir("stablehlo")
        context = empty.context  # which knows the dialects of JAX's programs
        with context:
            module = _without_dead_values(type(empty), text)
            written = [
                operation
                for operation, _ in _walk(module.operation, 1)
                if operation.name == "sdy.sharding_constraint"
            ]
            layouts = [_location(operation) for operation in written]
            demands = {place: entry for layout in written for place, entry in _asked(layout)}
            for passes in PASSES:
                passmanager.PassManager.parse(passes).run(module.operation)
    except Exception as error:
        message = f"Shardy did not propagate the shardings: {str(error).splitlines()[0][:300]}"
        return {"meetings": [], "values": [], "layouts": [], "problem": message}
    meetings, values = list[JsonObject](), list[JsonObject]()
    with context:
        reader = _Reader(module.operation, demands)
        for operation, count in reader.operations():
            name = operation.name
            if name in _MOVES:
                meetings.append({**reader.meeting(operation), "count": count})
                continue
            meetings += ({**meeting, "count": count} for meeting in reader.computed(operation))
            if name.startswith(("stablehlo.", "mhlo.")) and len(operation.results) == 1:
                result = operation.results[0]
                shape, dtype = _tensor(result)
                large = math.prod(shape) >= SMALLEST and name != "stablehlo.constant"
                if large and not reader.is_manual(operation):
                    values.append(
                        {
                            "op": name,
                            "location": reader.location(operation),
                            "shape": shape,
                            "dtype": dtype,
                            "spec": reader.spec(result),
                        }
                    )
    return {"meetings": meetings, "values": values, "layouts": layouts, "problem": ""}


def _without_dead_values(kind: Any, text: str) -> Any:
    """A module without what no result takes, which compilers drop: the forward pass of a gradient
    that is all that is asked for.
    """
    from jaxlib.mlir import passmanager

    module = kind.parse(text)
    try:
        passmanager.PassManager.parse("builtin.module(remove-dead-values)").run(module.operation)
    except Exception:  # it does not know every operation
        return kind.parse(text)
    return module


#: Operations of Shardy that communicate.
_MOVES = ("sdy.reshard", "sdy.all_reduce", "sdy.reduce_scatter", "sdy.all_to_all")
#: Operations that show the one array that they are given in another form.
_VIEWS = (
    "stablehlo.convert",
    "stablehlo.copy",
    "stablehlo.dynamic_slice",
    "stablehlo.reshape",
    "stablehlo.slice",
    "stablehlo.transpose",
)


#: Operations of which each element is made of the elements of the operands at the same place.
_ELEMENTWISE = frozenset(
    (
        *("add", "subtract", "multiply", "divide", "power", "maximum", "minimum", "select"),
        *("convert", "negate", "exponential", "tanh", "logistic", "and", "or", "xor", "not"),
    )
)

#: Operations whose region takes their operands as they are.
_MANUAL = "sdy.manual_computation"
_REGIONS = (_MANUAL, "sdy.named_computation")


class _Reader:
    """A module after propagation; knows who calls each of its functions, and how often.

    Args:
        module: an operation of MLIR.
        demands: location of an operation -> the layout that asks for its result, and in which
            sharding.
    """

    def __init__(self, module: Any, demands: dict[str, tuple[JsonObject, list[list[str]]]]) -> None:
        self.module, self.demands = module, demands
        self.functions: dict[str, Any] = {}
        self.calls: dict[str, list[tuple[str, Any, int]]] = {}
        self.counts: dict[str, int] = {}
        self.around: dict[Any, JsonObject] = {}
        for block in module.regions[0].blocks:
            for child in block.operations:
                operation = child.operation
                if operation.name == "func.func":
                    self.functions[str(operation.attributes["sym_name"]).strip('"')] = operation
        for name, function in self.functions.items():
            for operation, count in _walk(function, 1):
                if operation.name == "func.call":
                    self.calls.setdefault(_callee(operation), []).append((name, operation, count))

    def location(self, operation: Any) -> JsonObject:
        """The name and the frames of an operation; in a loop or a function the name follows that of
        the loop or of the call, which say whether it is of a backward pass, and its frames
        are before those.
        """
        location, around = _location(operation), self._around(operation)
        own = location["frames"]
        return {
            "op": "/".join(filter(None, (around["op"], location["op"]))),
            "frames": [*own, *(f for f in around["frames"] if f not in own)],
        }

    def _around(self, operation: Any) -> JsonObject:
        """The location of the loop or call that an operation is in; empty in the program itself."""
        parent = getattr(operation.parent, "operation", operation.parent)
        if parent is None or parent.name == "builtin.module":
            return {"op": "", "frames": []}
        if parent not in self.around:
            if parent.name != "func.func":
                self.around[parent] = self.location(parent)
            else:
                calls = self.calls.get(str(parent.attributes["sym_name"]).strip('"'), ())
                self.around[parent] = (
                    self.location(calls[0][1]) if calls else {"op": "", "frames": []}
                )
        return self.around[parent]

    def is_manual(self, operation: Any) -> bool:
        """Whether an operation stands in a manual region, where values are parts of arrays."""
        parent = getattr(operation.parent, "operation", operation.parent)
        if parent.name == "func.func":
            calls = self.calls.get(str(parent.attributes["sym_name"]).strip('"'), ())
            return bool(calls) and self.is_manual(calls[0][1])
        return parent.name == _MANUAL or (
            parent.name != "builtin.module" and self.is_manual(parent)
        )

    def count(self, function: str) -> int:
        """How often a function runs in one call of the program."""
        if function not in self.counts:
            self.counts[function] = 1  # functions do not call themselves
            callers = self.calls.get(function, ())
            if callers:
                self.counts[function] = sum(
                    self.count(caller) * count for caller, _, count in callers
                )
        return self.counts[function]

    def operations(self) -> Iterator[tuple[Any, int]]:
        """Every operation, with how often it runs, in the order in which the first of it runs."""
        seen = set[str]()

        def within(name: str) -> Iterator[tuple[Any, int]]:
            seen.add(name)
            for operation, count in _walk(self.functions[name], self.count(name)):
                yield operation, count
                if operation.name == "func.call" and _callee(operation) not in seen:
                    yield from within(_callee(operation))

        yield from (entry for name in self.functions if name not in seen for entry in within(name))

    def meeting(self, operation: Any) -> JsonObject:
        """A value that is made in one sharding and needed in another, or partial sums of it."""
        value, result = operation.operands[0], operation.results[0]
        shape, dtype = _tensor(value)
        listed = _attribute(operation, "reduction_axes")
        listed = listed or _attribute(operation, "reduce_scatter_axes")
        axes = re.findall(r'"([^"]+)"(?::\(\d+\)\d+)?', listed)
        made, needed = self.spec(value), self.spec(result)
        if not axes and (earlier := self._resharded(value, needed)):
            value, needed = earlier  # XLA goes from the first sharding to the last at once
            (shape, dtype), made = _tensor(value), self.spec(value)
        return {
            "op": operation.name.removeprefix("sdy."),
            "location": self.location(operation),
            "shape": shape,
            "dtype": dtype,
            "made": made,
            "needed": needed,
            "reduced": axes,
            "origin": self.described(value),
            "contraction": self.contraction(_origin(value), axes),
            "parts": sorted(self.parts(value)),
            "result": next(
                (_tensor(user.results[0])[0] for user in _users(result) if _by_part(user)),
                [],
            ),
            "users": [
                *self._layouts_after(_users(result), needed),
                *({"op": user.name, "location": self.location(user)} for user in _users(result)),
            ],
        }

    def _layouts_after(self, users: Iterator[Any], needed: list[list[str]]) -> Iterator[JsonObject]:
        """Layouts for which operations need a value in the sharding that they ask for."""
        for user in users:
            location, spec = self.demands.get(str(user.location), ({}, []))
            if spec and [*spec, *([] for _ in needed)][: len(needed)] == needed:
                yield {"op": "sdy.sharding_constraint", "location": location}

    def _resharded(self, value: Any, needed: list[list[str]]) -> tuple[Any, list[list[str]]] | None:
        """What a value shows, before a reshard of that, and its sharding with which the value has
        one that is needed; None where it is not made so.
        """
        dims: list[int | None] = list(range(len(needed)))
        while hasattr(value.owner, "name"):
            operation = getattr(value.owner, "operation", value.owner)
            if operation.name not in ("stablehlo.reshape", "stablehlo.transpose", "sdy.reshard"):
                return None
            shown = operation.operands[0]
            if operation.name == "sdy.reshard":
                spec: list[list[str]] = [[] for _ in _tensor(shown)[0]]
                for dim, axes in zip(dims, needed, strict=True):
                    if axes and dim is None:
                        return None
                    if dim is not None:
                        spec[dim] += axes
                return shown, spec
            moved = _shown_dims(operation, _tensor(value)[0], _tensor(shown)[0])
            dims = [None if dim is None else moved[dim] for dim in dims]
            value = shown
        return None

    def parts(self, value: Any) -> set[int]:
        """Numbers of the program's arguments of which a value is made element by element."""
        described = map(self.described, self._made_of(value))
        return {entry["argument"] for entry in described if entry.get("op") == "argument"}

    def _made_of(self, value: Any) -> Iterator[Any]:
        """Values of the same function, which no operation makes, of which a value is made element
        by element.
        """
        value, operation, shape = _unmoved(value), _origin(value), _tensor(value)[0]
        if operation is None:
            yield value
        elif operation.name == "func.call":
            returned = self._returned(operation)[list(operation.results).index(value)]
            for inner in self._made_of(returned):
                if getattr(inner.owner.owner, "operation", inner.owner.owner).name == "func.func":
                    yield from self._made_of(operation.operands[inner.arg_number])
        elif operation.name.rpartition(".")[2] in _ELEMENTWISE:
            for operand in operation.operands:
                if _tensor(operand)[0] == shape:
                    yield from self._made_of(operand)

    def _returned(self, call: Any) -> Any:
        """What the function that is called returns."""
        block = self.functions[_callee(call)].regions[0].blocks[0]
        return list(block.operations)[-1].operation.operands

    def computed(self, operation: Any) -> Iterator[JsonObject]:
        """Operands of an operation that are sharded along the dims that it works along: Shardy
        leaves it to XLA's partitioner to compute such an operation.
        """
        for value, dims in _worked(operation):
            made = self.spec(value)
            # no more is gathered than the result asks for
            if operation.name.endswith("composite") and _is_top_k(operation):
                kept = self.spec(operation.results[0])
                dims = {dim for dim in dims if not set(made[dim]) <= set(kept[dim])}
            if not any(made[dim] for dim in dims if dim < len(made)):
                continue
            shape, dtype = _tensor(value)
            along = {len(shape) - 1} if _is_top_k(operation) else dims
            location = self.location(operation)
            yield {
                "op": "computed",
                "location": location,
                "shape": shape,
                "dtype": dtype,
                "made": made,
                "needed": [[] if dim in dims else axes for dim, axes in enumerate(made)],
                "reduced": [],
                "origin": self.described(value),
                "contraction": None,
                "users": [{"op": operation.name, "location": location}],
                # what it makes of a part of the other dims is that part of what it makes of all
                "result": _tensor(operation.results[0])[0] if _by_part(operation) else [],
                "part": [[] if dim in along else axes for dim, axes in enumerate(made)],
            }

    def described(self, value: Any) -> JsonObject:
        """Where a value comes from: an operation, an argument of the program, or what a loop
        carries, past what shows it in another form; "dims" are the dims there that its dims are,
        None where one is of none.
        """
        shape, dtype = _tensor(value)
        dims: list[int | None] = list(range(len(shape)))
        entry: JsonObject = {"shape": shape, "dtype": dtype, "spec": self.spec(value), "dims": dims}
        first: JsonObject | None = None
        for _ in range(256):
            owner = value.owner
            if hasattr(owner, "name"):  # an operation
                operation = getattr(owner, "operation", owner)
                if _is_move(operation):
                    value = operation.operands[0]
                    continue
                described = {
                    **entry,
                    "dims": list(dims),
                    "op": operation.name,
                    "location": self.location(operation),
                }
                viewed = self._viewed(operation, value)
                if viewed is None:
                    return first or described
                shown = _shown_dims(operation, _tensor(value)[0], _tensor(viewed)[0])
                dims[:] = [None if dim is None else shown[dim] for dim in dims]
                first, value = first or described, viewed
                continue
            parent = getattr(owner.owner, "operation", owner.owner)  # a block's argument
            number = value.arg_number
            if parent.name == "func.func":
                name = str(parent.attributes["sym_name"]).strip('"')
                if name == "main" or name not in self.calls:
                    return {**entry, **_place(first), "op": "argument", "argument": number}
                value = self.calls[name][0][1].operands[number]
            elif parent.name in _REGIONS or (
                parent.name == "stablehlo.while" and _handed_on(parent, number)
            ):
                value = parent.operands[number]
            else:
                return first or {**entry, "op": "carry", "location": self.location(parent)}
        return first or {**entry, "op": ""}

    def _viewed(self, operation: Any, value: Any) -> Any:
        """Returns what an operation, or the function that it calls, shows in another form; None
        where it computes something.
        """
        if operation.name in _VIEWS:
            return operation.operands[0]
        if operation.name not in ("func.call", "stablehlo.optimization_barrier"):
            return None
        number = next(i for i, result in enumerate(operation.results) if result == value)
        if operation.name == "stablehlo.optimization_barrier":
            return operation.operands[number]
        inner = self._returned(operation)[number]
        while hasattr(inner.owner, "name"):
            view = getattr(inner.owner, "operation", inner.owner)
            if view.name not in _VIEWS and not _is_move(view):
                return None
            inner = view.operands[0] if len(view.operands) else None
            if inner is None:
                return None
        return operation.operands[inner.arg_number]

    def contraction(self, operation: Any, axes: list[str]) -> JsonObject | None:
        """Operands and contracted or reduced dims of the operation whose partial sums are added
        over mesh axes.
        """
        dims: list[list[int]] = []
        operands = list(operation.operands) if operation is not None else []
        if operation is not None and operation.name == "stablehlo.dot_general":
            text = str(operation.attributes["dot_dimension_numbers"])
            for side in ("lhs", "rhs"):
                match = re.search(rf"{side}_contracting_dimensions = \[([\d, ]*)\]", text)
                dims.append([int(n) for n in match[1].split(",") if n.strip()] if match else [])
        elif operation is not None and operation.name == "stablehlo.reduce":
            text = _attribute(operation, "dimensions")
            dims = [[int(n) for n in re.findall(r"-?\d+", text.partition(":")[2] or text)]]
        elif operation is not None and operation.name == "stablehlo.scatter":
            operands = operands[len(operands) - len(operands) // 3 :]  # the updates
            spec = self.spec(operands[0])
            dims = [[n for n, dim in enumerate(spec) if set(dim) & set(axes)]]
        elif operation is not None and operation.name == "stablehlo.gather":
            spec = self.spec(operands[0])
            dims = [[n for n, dim in enumerate(spec) if set(dim) & set(axes)]]
        else:
            return None
        return {
            "op": operation.name,
            "location": self.location(operation),
            "operands": [self.described(value) for value in operands][: len(dims)],
            "dims": dims,
            "chooses": _chooses(operation),
        }

    def spec(self, value: Any) -> list[list[str]]:
        """The sharding of a value: axes of each dim."""
        shape, _ = _tensor(value)
        spec = read_sharding(self._sharding(value))
        return [*spec, *([] for _ in range(len(shape) - len(spec)))][: len(shape)]

    def _sharding(self, value: Any) -> str:
        owner = value.owner
        if hasattr(owner, "name"):
            operation = getattr(owner, "operation", owner)
            text = _attribute(operation, "out_sharding") or _attribute(operation, "sharding")
            several = "out_shardings" if operation.name == _MANUAL else "sdy.sharding"
            listed = _PER_VALUE.findall(_attribute(operation, several))
            number = next((i for i, r in enumerate(operation.results) if r == value), 0)
            return text or (listed[number] if number < len(listed) else "")
        parent = getattr(owner.owner, "operation", owner.owner)
        if parent.name == "func.func":
            attributes = parent.attributes.get("arg_attrs", [])
            entry = attributes[value.arg_number] if len(attributes) else {}
            if "sdy.sharding" in entry:
                return str(entry["sdy.sharding"])
            name = str(parent.attributes["sym_name"]).strip('"')
            calls = self.calls.get(name, ())
            return self._sharding(calls[0][1].operands[value.arg_number]) if calls else ""
        if parent.name == _MANUAL:
            text = _PER_VALUE.findall(_attribute(parent, "in_shardings"))[value.arg_number]
            manual = re.findall(r'"[^"]+"', _attribute(parent, "manual_axes"))
            return functools.reduce(lambda left, axis: left.replace(axis, ""), manual, text)
        if value.arg_number < len(parent.results):
            return self._sharding(parent.results[value.arg_number])
        return ""


def _callee(call: Any) -> str:
    """The function that a call is of."""
    return str(call.attributes["callee"]).lstrip("@").strip('"')


def _numbers(operation: Any, name: str) -> list[int]:
    """Whole numbers of an attribute."""
    text = re.sub(r"array<i64:|: i64|: tensor.*", "", _attribute(operation, name))
    return [int(n) for n in re.findall(r"-?\d+", text)]


def _listed(operation: Any, attribute: str, name: str) -> set[int]:
    match = re.search(rf"{name} = \[([\d, ]*)\]", _attribute(operation, attribute))
    return {int(n) for n in match[1].split(",") if n.strip()} if match else set()


def _worked(operation: Any) -> Iterator[tuple[Any, set[int]]]:
    """Operands of an operation, with the dims that it works along: what it makes of one index
    there takes other indices, and no two of them can be had by different devices.
    """
    name, operands = operation.name.rpartition(".")[2], list(operation.operands)
    if name in ("sort", "concatenate"):
        dims = set(_numbers(operation, "dimension"))
        yield from ((value, dims) for value in operands)
    elif name in ("slice", "dynamic_slice", "pad", "dynamic_update_slice"):
        other = operands[1] if name == "dynamic_update_slice" else operation.results[0]
        yield operands[0], _unlike(_tensor(operands[0])[0], _tensor(other)[0])
    elif name == "reverse" or (
        _chooses(operation)  # which Shardy of JAX 0.10 reduces itself
        and not any(use.owner.name == "sdy.all_reduce" for use in operation.results[0].uses)
    ):
        yield operands[0], set(_numbers(operation, "dimensions"))
    elif name == "reduce_window":
        sizes = _numbers(operation, "window_dimensions")
        yield operands[0], {n for n, size in enumerate(sizes) if size != 1}
    elif name == "fft":
        rank = len(_tensor(operands[0])[0])
        yield operands[0], set(range(rank - len(_numbers(operation, "fft_length")), rank))
    elif _is_scan(operation):
        match = re.search(r"\bdimension = (\d+)", _attribute(operation, "composite_attributes"))
        yield operands[0], {int(match[1])} if match else set()
    elif _is_top_k(operation):
        last = len(_tensor(operands[0])[0]) - 1
        yield operands[0], {last}
        if name == "composite":  # for which Shardy has no rule, so nothing is sharded
            yield operands[0], set(range(last))
    elif name == "gather":
        shape = _tensor(operands[0])[0]
        batch = _listed(operation, "dimension_numbers", "operand_batching_dims")
        yield operands[0], _unlike(shape, _numbers(operation, "slice_sizes")) - batch
    elif name == "scatter":
        dims = _listed(operation, "scatter_dimension_numbers", "scatter_dims_to_operand_dims")
        yield operands[0], dims


def _chooses(operation: Any) -> bool:
    """Returns whether an operation reduces values with their indices, as an argmax does."""
    return operation.name == "stablehlo.reduce" and len(operation.results) > 1


def _is_top_k(operation: Any) -> bool:
    names = operation.name, *(_attribute(operation, n) for n in ("name", "call_target_name"))
    return any(re.search("top_?k", name, re.IGNORECASE) for name in names)


def _is_scan(operation: Any) -> bool:
    """A running sum, product or maximum, as GPUs have it."""
    return "chlo.scan" in _attribute(operation, "name")


def _by_part(operation: Any) -> bool:
    """Returns whether a device may make a part of the result of its part of the other dims."""
    name = "reduce_window" if _is_scan(operation) else operation.name.rpartition(".")[2]
    return name in ("sort", "fft", "reduce_window") or _is_top_k(operation)


def _unlike(shape: list[int], other: list[int]) -> set[int]:
    return {n for n, (a, b) in enumerate(zip(shape, other, strict=False)) if a != b}


def _shown_dims(operation: Any, shape: list[int], shown: list[int]) -> list[int | None]:
    """For each dim of a value, the dim that it is of what it shows; of a dim that was split, the
    major part.
    """
    if operation.name == "stablehlo.transpose":
        return list(_numbers(operation, "permutation"))
    if math.prod(shape) != math.prod(shown):  # slices, and layers of what loops go over
        return list(range(len(shown) - len(shape), len(shown)))
    dims: list[int | None] = [None] * len(shape)
    here = there = 0
    while here < len(shape) and there < len(shown):
        ends = here + 1, there + 1
        while (a := math.prod(shape[here : ends[0]])) != (b := math.prod(shown[there : ends[1]])):
            if a < b and ends[0] < len(shape):
                ends = ends[0] + 1, ends[1]
            elif b < a and ends[1] < len(shown):
                ends = ends[0], ends[1] + 1
            else:
                return dims
        majors = [n for n in range(here, ends[0]) if shape[n] > 1] or [here]
        dims[majors[0]] = next((n for n in range(there, ends[1]) if shown[n] > 1), there)
        here, there = ends
    return dims


def _place(entry: JsonObject | None) -> JsonObject:
    return {"location": entry["location"]} if entry else {}


def _walk(operation: Any, count: int) -> Iterator[tuple[Any, int]]:
    """The operations inside of one, with how often each runs."""
    times = count * (_trips(operation) if operation.name == "stablehlo.while" else 1)
    for region in operation.regions:
        for block in region.blocks:
            for child in block.operations:
                yield child.operation, times
                yield from _walk(child.operation, times)


def _trips(loop: Any) -> int:
    """Turns of a loop that counts from 0 to a constant, as `jax.lax.scan` does; 1 for others."""
    for operation in loop.regions[0].blocks[0].operations:
        if operation.operation.name == "stablehlo.compare":
            for value in operation.operation.operands:
                owner = getattr(value.owner, "operation", value.owner)
                if hasattr(owner, "attributes") and "value" in owner.attributes:
                    match = re.search(r"dense<(\d+)>", str(owner.attributes["value"]))
                    return int(match[1]) if match else 1
    return 1


def _is_move(operation: Any) -> bool:
    """Returns whether an operation hands on the one array that it is given in another sharding."""
    one = len(operation.operands) == len(operation.results) == 1
    return one and operation.name.startswith("sdy.") and operation.name not in _REGIONS


def _is_layout(operation: Any) -> bool:
    """Returns whether an operation is a layout that the program writes."""
    name = str(_location(operation)["op"])
    return name.rpartition("/")[2] in ("sharding_constraint", "reshard")


def _users(value: Any) -> Iterator[Any]:
    """Operations that take a value, past further reshards of it."""
    for use in value.uses:
        user = use.owner.operation if hasattr(use.owner, "operation") else use.owner
        if _is_move(user):
            if _is_layout(user):
                yield user
            yield from _users(user.results[0])
        else:
            yield user


def _unmoved(value: Any) -> Any:
    """A value before reshards and reductions."""
    while hasattr(value.owner, "name") and _is_move(value.owner):
        value = value.owner.operands[0]
    return value


def _origin(value: Any) -> Any:
    """The operation that makes a value, past reshards and reductions; None for an argument."""
    owner = _unmoved(value).owner
    return getattr(owner, "operation", owner) if hasattr(owner, "name") else None


def _handed_on(loop: Any, number: int) -> bool:
    """Returns whether a loop hands on one of its values as it is."""
    block = loop.regions[1].blocks[0]
    last = list(block.operations)[-1].operation
    return last.operands[number] == block.arguments[number]


def _asked(layout: Any) -> Iterator[tuple[str, tuple[JsonObject, list[list[str]]]]]:
    """Locations of the operations whose results a layout asks for, element by element, each with
    the layout and its sharding.
    """
    entry = _location(layout), read_sharding(_attribute(layout, "sharding"))
    waiting = [layout.operands[0]]
    while waiting:
        value = waiting.pop()
        if not hasattr(value.owner, "name") or _tensor(value)[0] != _tensor(layout.results[0])[0]:
            continue
        operation = getattr(value.owner, "operation", value.owner)
        if operation.name.rpartition(".")[2] in _ELEMENTWISE:
            yield str(operation.location), entry
            waiting += operation.operands


def _attribute(operation: Any, name: str) -> str:
    return str(operation.attributes[name]) if name in operation.attributes else ""


def _tensor(value: Any) -> tuple[list[int], str]:
    match = _TENSOR.match(str(value.type))
    if match is None:
        return [], ""
    return [int(n) for n in match[1].split("x") if n], match[2]


def read_sharding(text: str) -> list[list[str]]:
    """Axes of each dim, from Shardy's text; () where there is none."""
    match = re.search(r"<@\w+, \[(.*?)\](?:,|>|$)", text)
    if match is None:
        return []
    return [
        [axis + part for axis, part in re.findall(r'"([^"]+)"(:\(\d+\)\d+)?', dim)]
        for dim in _DIMS.findall(match[1])
    ]


def _location(operation: Any) -> JsonObject:
    text = str(operation.location)
    return read_location(text[4:-1] if text.startswith("loc(") else text)


def read_location(text: str) -> JsonObject:
    """The operation's name and its frames, the innermost first:
    [file, line, column, last line, last column, function].
    """
    name, function, frames = "", "", list[list[Any]]()
    for match in _NAMES.finditer(text):
        if match[2] is None:  # a name; the first before any frame is the operation's
            function = match[1] or ""
            if not frames and "callsite(" not in text[: match.start()]:
                name = name or function
            continue
        line, column = int(match[2]), int(match[3])
        last = int(match[4]) if match[4] else line
        frames.append([match[1], line, column, last, int(match[5] or column), function])
    return {"op": name, "frames": frames}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
