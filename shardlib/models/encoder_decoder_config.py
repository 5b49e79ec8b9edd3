"""An encoder-decoder transformer as one value.

`EncoderDecoderConfig` describes T5 (arXiv:1910.10683) and Switch (arXiv:2101.03961);
`encoder_decoder.py` builds it. Layers have no biases and RMS norms before them, and attention has
no positions but a bias of every head for the distance of key and query. It holds no JAX.

>>> config = EncoderDecoderConfig(
...     name="toy", vocab_size=64, encoder_layers=2, decoder_layers=2, embed=8, heads=2, head_dim=4,
...     mlp=16, buckets=4,
... )
>>> config.layers, config.parameter_count()
(4, 3184)
"""

from __future__ import annotations

from dataclasses import dataclass

from shardlib.errors import ModelError, raise_all
from shardlib.models.config import TransformerConfig
from shardlib.models.config_parts import Experts


@dataclass(frozen=True, kw_only=True)
class EncoderDecoderConfig:
    """An encoder-decoder transformer.

    Attributes:
        name: for people.
        vocab_size: tokens of the vocabulary.
        encoder_layers: blocks of the encoder.
        decoder_layers: blocks of the decoder, which also attend to the encoder's result.
        embed: width of the residual stream.
        heads: heads of every attention.
        head_dim: width of a head.
        mlp: hidden width of the dense feed-forward.
        max_seq: longest sequence, tokens.
        activation: "silu", "gelu", "gelu_tanh" or "relu".
        gated: whether feed-forward layers are gated (GeGLU).
        tied: whether the head is the transposed embedding, times embed ** -0.5 (arXiv:1910.10683).
        norm_epsilon: added under the square root.
        buckets: of distances, each with a bias for every head; encoder and decoder have their own.
        max_distance: all longer distances have one bias.
        experts: mixture of experts in some layers; None for a dense model.
        encoder_every: the second of every n layers of the encoder has experts, all of them for 1,
            none for 0.
        decoder_every: the same of the decoder.
        param_dtype: dtype that the optimizer keeps.
        compute_dtype: dtype of the matrix products; norms, softmax, router and loss are float32.

    Raises:
        ModelError: fields that contradict each other, all of them listed.
    """

    name: str
    vocab_size: int
    encoder_layers: int
    decoder_layers: int
    embed: int
    heads: int
    head_dim: int
    mlp: int
    max_seq: int = 512
    activation: str = "relu"
    gated: bool = False
    tied: bool = True
    norm_epsilon: float = 1e-6
    buckets: int = 32
    max_distance: int = 128
    experts: Experts | None = None
    encoder_every: int = 2
    decoder_every: int = 2
    param_dtype: str = "float32"
    compute_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        failures = [
            f"{name} is {getattr(self, name)!r}; it must be a positive integer"
            for name in ("encoder_layers", "decoder_layers", "max_distance")
            if not _positive(getattr(self, name))
        ]
        failures += [
            f"buckets is {self.buckets!r}; it is a multiple of 4"
            for _ in [0]
            if not _positive(self.buckets) or self.buckets % 4
        ]
        if not failures and self.max_distance <= self.buckets // 2:
            failures.append(
                f"max_distance {self.max_distance} must be more than half of the {self.buckets}"
                " buckets"
            )
        for name in ("encoder", "decoder"):
            layers, interval = getattr(self, f"{name}_layers"), getattr(self, f"{name}_every")
            if self.experts and not failures and (interval < 0 or (interval and layers % interval)):
                failures.append(
                    f"{name}_every {interval} puts experts in one of so many layers, and the"
                    f" {layers} layers of the {name} are no multiple of it"
                )
        if self.experts and (self.experts.first_dense or self.experts.every != 1):
            failures.append(
                f"experts.first_dense is {self.experts.first_dense} and experts.every"
                f" {self.experts.every}; which layers have experts is said by encoder_every and"
                " decoder_every"
            )
        if failures:
            raise_all(ModelError, f"the model {self.name!r} is not usable", failures)
        _ = self.block

    @property
    def layers(self) -> int:
        """Blocks of encoder and decoder."""
        return self.encoder_layers + self.decoder_layers

    @property
    def block(self) -> TransformerConfig:
        """What norms, feed-forward layers and experts of a block look at."""
        return TransformerConfig(
            name=self.name,
            vocab_size=self.vocab_size,
            layers=self.layers,
            embed=self.embed,
            heads=self.heads,
            kv_heads=self.heads,
            head_dim=self.head_dim,
            mlp=self.mlp,
            max_seq=self.max_seq,
            norm_epsilon=self.norm_epsilon,
            activation=self.activation,
            gated=self.gated,
            tied=self.tied,
            learned_positions=True,
            experts=self.experts,
            param_dtype=self.param_dtype,
            compute_dtype=self.compute_dtype,
        )

    def pattern(self, interval: int) -> tuple[bool, ...]:
        """Which of the layers that are repeated have experts."""
        if self.experts is None or interval == 0:
            return (False,)
        return (True,) if interval == 1 else tuple(layer == 1 for layer in range(interval))

    def check_seq(self, seq: int) -> None:
        """Raises a `ModelError` unless sequences of `seq` tokens fit."""
        if not 1 <= seq <= self.max_seq:
            raise ModelError(
                f"the model {self.name!r} takes sequences of 1 to {self.max_seq} tokens, not {seq}"
            )

    def parameter_count(self) -> int:
        """Number of trained parameters."""
        return self._count(active=False)

    def active_parameter_count(self) -> int:
        """Number of trained parameters that one token uses, if it went through encoder and
        decoder.
        """
        return self._count(active=True)

    def _count(self, *, active: bool) -> int:
        ends = (
            self.vocab_size * self.embed * (1 if self.tied else 2)
            + 2 * self.embed
            + 2 * self.buckets * self.heads
        )
        return (
            ends
            + self._stack(self.encoder_layers, self.encoder_every, 1, active)
            + self._stack(self.decoder_layers, self.decoder_every, 2, active)
        )

    def _stack(self, layers: int, interval: int, attentions: int, active: bool) -> int:
        pattern = self.pattern(interval)
        sparse = layers // len(pattern) * sum(pattern)
        dense = (3 if self.gated else 2) * self.embed * self.mlp
        routed = (
            self.experts.parameter_count(self.embed, self.gated, active=active)
            if self.experts
            else 0
        )
        attention = 4 * self.embed * self.heads * self.head_dim + self.embed
        return (
            layers * (attentions * attention + self.embed)
            + (layers - sparse) * dense
            + sparse * routed
        )


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
