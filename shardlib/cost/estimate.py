"""The estimate of a step: a value whose parts add up to the whole.

`Seconds` and `DeviceBytes` hold the parts; their totals are derived, never stored, so they cannot
disagree.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from shardlib.collective import Collective
from shardlib.compact import compact
from shardlib.cost.roofline import Applied
from shardlib.errors import PlanError
from shardlib.untrusted.data import JsonMapping, construct

#: No number of a plan is larger: FLOPs of the largest steps are about 1e24.
LARGEST = 1e40


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of one training step on the slowest device; the parts sum to `total`.

    Attributes:
        compute: matmuls, convolutions and memory-bound ops, rematerialisation included.
        exposed: communication not hidden behind compute, all mesh axes together.
        bubble: idle time of pipeline stages.
        optimizer: reading and writing parameters, gradients and optimizer state.
        overhead: fixed cost of launching the program.
        exchange: a step's share of the meetings of islands.
    """

    compute: float = 0.0
    exposed: float = 0.0
    bubble: float = 0.0
    optimizer: float = 0.0
    overhead: float = 0.0
    exchange: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True)
class DeviceBytes:
    """Bytes on the fullest device; the parts sum to `peak`.

    Attributes:
        parameters: trained parameters as they are stored.
        gradients: gradients while the optimizer runs, and accumulators.
        optimizer: optimizer state as it is stored.
        activations: values saved from the forward pass for the backward pass.
        temporaries: the largest set of other values alive at once.
        communication: gathered parameters and buffers of collectives in flight.
        batch: the input batch, results with a value for each of its rows, and random streams,
            integers and the like of the model state.
        frozen: stored parameters that are not trained, and other floating-point state of the
            model.
        exchange: what islands keep for their meetings.
    """

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    temporaries: int = 0
    communication: int = 0
    batch: int = 0
    frozen: int = 0
    exchange: int = 0

    @property
    def peak(self) -> int:
        """Bytes of all parts together."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """Seconds of one microbatch on the slowest stage of a pipeline, all its chunks of layers
    together.

    Attributes:
        forward: forward pass, with what makes it ready for the backward pass.
        backward: backward pass, rematerialisation included, but for `weights`.
        weights: kernels that compute gradients of weights.
        lockstep: whether all stages move at once; otherwise a stage waits for its neighbours alone.
    """

    forward: float
    backward: float
    weights: float
    lockstep: bool = True

    @property
    def total(self) -> float:
        """Seconds of the microbatch."""
        return self.forward + self.backward + self.weights


@dataclass(frozen=True, kw_only=True)
class Offloaded:
    """The parts of a step that are in host memory or on disk instead of device memory, each kind as
    a whole or not at all.

    Attributes:
        device_bytes: that a device would need more without.
        seconds: that a step takes longer with it.
    """

    device_bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The predicted cost of one training step.

    Attributes:
        seconds: where the time goes.
        device_bytes: where the memory goes.
        collectives: every collective of a step, largest time first.
        tokens: tokens in the global batch (batch x seq; examples where the batch has no sequence).
        model_flops: FLOPs that the step needs with no rematerialisation, whole mesh.
        hardware_flops: FLOPs that the step executes, rematerialisation included, whole mesh.
        peak_flops_per_s: peak of all devices of the mesh in the compute dtype, while those that the
            mesh leaves out idle.
        corrections: factors that seconds and bytes were multiplied by
            (`shardlib.cost.roofline`).
        stage: what a stage of the pipeline does with one microbatch; None without stages.
        offloaded: what is not in device memory; None where all is.
    """

    seconds: Seconds
    device_bytes: DeviceBytes
    collectives: tuple[Collective, ...] = ()
    tokens: int = 0
    model_flops: float = 0.0
    hardware_flops: float = 0.0
    peak_flops_per_s: float = 1.0
    corrections: tuple[Applied, ...] = ()
    stage: StageSeconds | None = None
    offloaded: Offloaded | None = None

    __repr__ = compact

    @property
    def margin(self) -> float:
        """The factor by which memory must exceed the predicted peak
        (`corrections.margin`); from 1.
        """
        return next(
            (
                correction.factor
                for correction in self.corrections
                if correction.quantity == "margin"
            ),
            1.0,
        )

    @property
    def step_seconds(self) -> float:
        """Seconds of one step."""
        return self.seconds.total

    @property
    def tokens_per_second(self) -> float:
        """Tokens of the global batch a second, whole mesh."""
        return self.tokens / self.step_seconds if self.step_seconds else 0.0

    @property
    def mfu(self) -> float:
        """Model FLOPs utilisation: useful FLOP/s over peak (PaLM, arXiv:2204.02311, appendix B)."""
        return (
            self.model_flops / (self.step_seconds * self.peak_flops_per_s)
            if self.step_seconds
            else 0.0
        )

    @property
    def hfu(self) -> float:
        """Hardware FLOPs utilisation: executed FLOP/s over peak."""
        return (
            self.hardware_flops / (self.step_seconds * self.peak_flops_per_s)
            if self.step_seconds
            else 0.0
        )

    def to_json(self) -> dict[str, object]:
        """The estimate as plain data, with totals."""
        return {
            "step_seconds": self.step_seconds,
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "hfu": self.hfu,
            "seconds": {**asdict(self.seconds), "total": self.seconds.total},
            "device_bytes": {**asdict(self.device_bytes), "peak": self.device_bytes.peak},
            "collectives": [collective.to_json() for collective in self.collectives],
            "tokens": self.tokens,
            "model_flops": self.model_flops,
            "hardware_flops": self.hardware_flops,
            "peak_flops_per_s": self.peak_flops_per_s,
            "corrections": [correction.to_json() for correction in self.corrections],
            "stage": asdict(self.stage) if self.stage else None,
            "offloaded": asdict(self.offloaded) if self.offloaded else None,
        }

    @classmethod
    def from_json(cls, data: JsonMapping) -> Estimate:
        """Reads what `to_json` wrote; totals are recomputed.

        Args:
            data: keys as `to_json` gives them; totals may be missing.

        Returns:
            An equal estimate.

        Raises:
            PlanError: fields are missing or have values of another type; all of them are listed.
        """
        return construct(cls, data, "the estimate", PlanError, least=0.0, most=LARGEST)
