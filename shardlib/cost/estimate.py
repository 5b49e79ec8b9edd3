"""The estimate of a step: a value whose parts add up to the whole. Totals are derived, not stored,
so they cannot disagree with the parts.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields

from shardlib.collective import Collective
from shardlib.compact import compact
from shardlib.cost.roofline import Applied
from shardlib.errors import PlanError
from shardlib.untrusted.data import JsonMapping, construct

#: Upper limit of any number of a plan: FLOPs of the largest steps are about 1e24.
LARGEST = 1e40


@dataclass(frozen=True, kw_only=True)
class Seconds:
    """Seconds of one training step on the slowest device; the parts sum to `total`.

    Attributes:
        compute: matmuls, convolutions and memory-bound ops, including rematerialisation.
        exposed: communication not hidden behind compute, over all mesh axes.
        bubble: idle time of pipeline stages.
        optimizer: reading and writing parameters, gradients and optimizer state.
        overhead: fixed cost of launching the program.
        exchange: synchronisation of islands, amortised per step.
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
        parameters: trained parameters, as stored.
        gradients: gradients while the optimizer runs, and accumulators.
        optimizer: optimizer state, as stored.
        activations: values saved from the forward pass for the backward pass.
        temporaries: the largest set of other values alive at once.
        communication: gathered parameters and buffers of collectives in flight.
        batch: the input batch, results with a value per row, and model state that is not
            floating-point (random streams, integers).
        frozen: stored parameters that are not trained, and other floating-point state of the model.
        exchange: copies and buffers for the synchronisation of islands.
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
        """The sum of all parts."""
        return sum(getattr(self, field.name) for field in fields(self))


@dataclass(frozen=True, kw_only=True)
class StageSeconds:
    """Seconds of one microbatch on the slowest pipeline stage, summed over its chunks of layers.

    Attributes:
        forward: forward pass, including preparations for the backward pass.
        backward: backward pass with rematerialisation, without `weights`.
        weights: kernels that compute weight gradients.
        lockstep: True if all stages advance together; otherwise a stage waits only for its
            neighbours.
    """

    forward: float
    backward: float
    weights: float
    lockstep: bool = True

    @property
    def total(self) -> float:
        """Seconds of the microbatch, forward and backward."""
        return self.forward + self.backward + self.weights


@dataclass(frozen=True, kw_only=True)
class Offloaded:
    """The parts of a step that are offloaded to host memory or disk, each kind entirely or not at
    all.

    Attributes:
        device_bytes: additional bytes per device without offloading.
        seconds: additional seconds per step with offloading.
    """

    device_bytes: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The predicted cost of one training step.

    Attributes:
        seconds: the parts of the step time.
        device_bytes: the parts of the memory.
        collectives: every collective of a step, largest time first.
        tokens: tokens in the global batch (batch x seq; examples if the batch has no sequence).
        model_flops: FLOPs that the step needs without rematerialisation, whole mesh.
        hardware_flops: FLOPs that the step executes, including rematerialisation, whole mesh.
        peak_flops_per_s: peak of all devices of the mesh in the compute dtype, while devices
            outside of the mesh idle.
        corrections: factors applied to seconds and bytes (`shardlib.cost.roofline`).
        stage: seconds of a pipeline stage per microbatch; None without stages.
        offloaded: the offloaded parts; None if there are none.
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
        """The margin: memory that the program may need over the predicted peak, at least 1."""
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
        """Tokens of the global batch per second, whole mesh."""
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
            data: keys as in `to_json`; totals may be missing.

        Returns:
            An equal estimate.

        Raises:
            PlanError: fields are missing or have values of another type; all of them are listed.
        """
        return construct(cls, data, "the estimate", PlanError, least=0.0, most=LARGEST)
