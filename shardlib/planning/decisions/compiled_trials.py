"""What did the real compiler say about the best plans?

`shardlib.plan(..., refine=K)` has the K best plans compiled and ranks them again by what the
compiler made of them. A `Refined` is the record: one `Trial` per plan that was compiled, and the
time and memory of the chosen one with the compiler's figures in place of predictions. The plan's
`estimate` stays the prediction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from shardlib.axes import MeshShape
from shardlib.collective import Collective
from shardlib.cost.estimate import LARGEST, Seconds
from shardlib.errors import PlanError
from shardlib.untrusted import Form, construct
from shardlib.untrusted.json_types import JsonMapping, JsonObject

#: How a mesh is written.
MESH = Form(plain=Mapping[str, int], build=MeshShape)

#: Verdict on the plan that was chosen; and on a plan that works and is slower.
CHOSEN, SLOWER = "chosen", "slower"


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One plan that the compiler was asked about.

    Attributes:
        mesh: its mesh.
        summary: its other decisions in a few words.
        predicted_seconds: step time by the cost model.
        predicted_bytes: bytes per device by the cost model.
        compiled_seconds: step time with the compiler's figures
            (`shardlib.cost.pricing.from_compiled`); 0 where nothing was compiled.
        compiled_bytes: peak bytes per device by the compiler; 0 where it does not say.
        verdict: "chosen", "slower", or why the plan was cut: "out-of-memory", "compile-error",
            "compiler-abort", "compile-timeout", "compiler-memory", "not-lowered".
        message: what the compiler said about a plan that was cut.
        compile_seconds: wall time of compiling.
    """

    mesh: MeshShape
    summary: str
    predicted_seconds: float
    predicted_bytes: int
    compiled_seconds: float = 0.0
    compiled_bytes: int = 0
    verdict: str
    message: str = ""
    compile_seconds: float = 0.0

    @property
    def survived(self) -> bool:
        """Whether the compiler made a program that fits."""
        return self.verdict in (CHOSEN, SLOWER)

    def to_json(self) -> JsonObject:
        """The trial as plain data."""
        return {**self.__dict__, "mesh": dict(self.mesh)}


@dataclass(frozen=True, kw_only=True)
class Refined:
    """The compiler's word on a plan, and on those that it was chosen from.

    Attributes:
        wanted: how many plans should survive the compiler.
        seconds: the chosen plan's step with the compiler's figures
            (`shardlib.cost.pricing.from_compiled`).
        device_bytes: the chosen plan's (part, bytes) per device: "arguments", "outputs", "aliased",
            "temporaries", "peak".
        collectives: those of the chosen program, with the seconds that the cost model gives them.
        kernels: where the seconds of compute come from: "compiler" (its cycles) or "model".
        trials: every plan that was compiled, in the order of its predicted time.
        passed_over: plans that were in line and not compiled, because plans like them were out of
            memory.
        bounded: whether the search ended at the largest number of compilations.
        versions: (package, version) of the compiler.
    """

    wanted: int
    seconds: Seconds
    device_bytes: tuple[tuple[str, int], ...]
    collectives: tuple[Collective, ...] = ()
    kernels: str
    trials: tuple[Trial, ...]
    passed_over: int = 0
    bounded: bool = False
    versions: tuple[tuple[str, str], ...] = ()

    @property
    def step_seconds(self) -> float:
        """Seconds of one step of the chosen plan."""
        return self.seconds.total

    @property
    def peak_bytes(self) -> int:
        """Bytes per device of the chosen plan."""
        return dict(self.device_bytes)["peak"]

    def to_json(self) -> JsonObject:
        """The record as plain data, with totals."""
        return {
            "wanted": self.wanted,
            "step_seconds": self.step_seconds,
            "seconds": {**asdict(self.seconds), "total": self.seconds.total},
            "device_bytes": dict(self.device_bytes),
            "collectives": [c.to_json() for c in self.collectives],
            "kernels": self.kernels,
            "trials": [trial.to_json() for trial in self.trials],
            "passed_over": self.passed_over,
            "bounded": self.bounded,
            "versions": dict(self.versions),
        }

    @classmethod
    def from_json(cls, data: JsonMapping) -> Refined:
        """Reads what `to_json` wrote; totals are recomputed."""
        return construct(
            cls,
            data,
            "the record of compiled plans",
            PlanError,
            forms={MeshShape: MESH},
            least=0.0,
            most=LARGEST,
        )
