"""Parts of a model's configuration: stretched rotary positions, latent attention, a mixture of
experts.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Layers, and any other size, are at most this.
LAYERS, SIZE = 100_000, 10**12


@dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the training length.

    Attributes:
        kind: "linear" (arXiv:2306.15595), "llama3" (Llama 3.1 model card) or "yarn"
            (arXiv:2309.00071).
        factor: how many times longer the context becomes.
        original_seq: context length before stretching, tokens; unused by "linear".
        low_frequency: "llama3" `low_freq_factor`; "yarn" `beta_slow`.
        high_frequency: "llama3" `high_freq_factor`; "yarn" `beta_fast`.
        scores_factor: "yarn" `mscale_all_dim`, which sharpens the attention scores; 0 leaves them.
    """

    kind: str
    factor: float
    original_seq: int = 8192
    low_frequency: float = 1.0
    high_frequency: float = 4.0
    scores_factor: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention of DeepSeek V2 and V3 (arXiv:2405.04434, section 2.1).

    Attributes:
        q_lora: width of the compressed queries; 0 when queries are not compressed.
        kv_lora: width of the compressed keys and values.
        rope_dim: part of a head that carries the position.
        nope_dim: part of a head that does not.
        v_dim: width of a value head.
    """

    q_lora: int
    kv_lora: int
    rope_dim: int
    nope_dim: int
    v_dim: int

    def parameter_count(self, embed: int, heads: int) -> int:
        """Number of trained parameters of one layer's attention."""
        head = self.nope_dim + self.rope_dim
        queries = self.q_lora * (embed + 1 + heads * head) if self.q_lora else embed * heads * head
        keys = embed * (self.kv_lora + self.rope_dim) + self.kv_lora * (
            1 + heads * (self.nope_dim + self.v_dim)
        )
        return queries + keys + heads * self.v_dim * embed


@dataclass(frozen=True, kw_only=True)
class Experts:
    """A mixture of experts in place of the feed-forward layer.

    Attributes:
        count: routed experts of a layer.
        per_token: experts that each token visits.
        mlp: hidden width of one expert.
        shared: experts that every token visits, each of width `mlp`.
        shared_gate: whether a sigmoid gate scales the shared experts (Qwen 2 MoE).
        first_dense: leading layers that keep a dense feed-forward.
        every: of so many layers after these, the last has experts, and the others a dense
            feed-forward.
        router: "softmax" or "sigmoid" scores.
        normalise: whether the chosen weights are divided by their sum.
        scaling: factor on the weights of the routed experts.
        groups: groups that experts are divided into; 1 without groups.
        groups_per_token: groups whose experts a token may visit.
        group_score: how many of a group's best experts are summed to rank the groups.
        balance: coefficient of the load-balancing loss (Switch Transformer, arXiv:2101.03961,
            equation 4).
        z_loss: coefficient of the router z-loss (ST-MoE, arXiv:2202.08906, equation 5).
        capacity: factor over the mean load that an expert takes at most, the rest is dropped; 0
            drops nothing.
        sequence_capacity: the same as tokens of a sequence on average over the batch; 0 where
            `capacity` says it.
        bias: whether a bias is added to the scores for choosing alone (DeepSeek-V3,
            arXiv:2412.19437, section 2.1.2).
        bias_rate: how far a step of training moves the bias of an expert towards the mean load
            (arXiv:2408.15664); 0 leaves it.
    """

    count: int
    per_token: int
    mlp: int
    shared: int = 0
    shared_gate: bool = False
    first_dense: int = 0
    every: int = 1
    router: str = "softmax"
    normalise: bool = True
    scaling: float = 1.0
    groups: int = 1
    groups_per_token: int = 1
    group_score: int = 1
    balance: float = 0.001
    z_loss: float = 0.0
    capacity: float = 0.0
    sequence_capacity: int = 0
    bias: bool = False
    bias_rate: float = 0.0

    def load_limit(self, seq: int) -> float | None:
        """Factor over the mean load that an expert takes at most of sequences of `seq` tokens; None
        where nothing is dropped.
        """
        return (
            min(self.sequence_capacity / seq, 1.0) * self.count / self.per_token
            or self.capacity
            or None
        )

    def parameter_count(self, embed: int, gated: bool, *, active: bool = False) -> int:
        """Parameters of one layer's router and experts; with `active`, those that one token
        uses.
        """
        matrices = 3 if gated else 2
        routed = self.per_token if active else self.count
        return (
            embed * self.count
            + matrices * embed * self.mlp * (routed + self.shared)
            + embed * self.shared_gate
        )
