"""Models whose parameters are pytrees that others wrote: Equinox, Haiku, Penzai, jraph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from benchmarks.brought.case import Case, integers, next_token, normals, of_stateful, of_tree

ROWS = 16


def vision_transformer() -> Case:
    """equimo: a vision transformer."""
    from equimo.models import VisionTransformer

    def build(key):
        return VisionTransformer(
            img_size=16, in_channels=3, dim=64, patch_size=4, num_heads=4, depths=[2],
            num_classes=16, key=key,
        )  # fmt: skip

    return _classifier("VisionTransformer", build, 16)


def convnext() -> Case:
    """equimo: ConvNeXt."""
    from equimo.models import ConvNeXt

    def build(key):
        return ConvNeXt(3, depths=[1, 1], dims=[32, 64], num_classes=16, key=key)

    return _classifier("ConvNeXt", build, 32)


def _classifier(name: str, build: Callable[[jax.Array], Any], size: int) -> Case:
    """A classifier of equimo, of square images."""

    def loss(model, batch):
        logits = jax.vmap(lambda x: model(x, jax.random.key(0), inference=True))(batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    batch = {"x": normals(0, ROWS, 3, size, size), "y": integers(1, 16, ROWS)}
    return of_tree("equimo", name, "Equinox", build, loss, batch)


def fourier_operator() -> Case:
    """pdequinox: a Fourier neural operator."""
    from pdequinox.arch import ClassicFNO

    def build(key):
        return ClassicFNO(1, 1, 1, hidden_channels=16, num_modes=8, num_blocks=2, key=key)

    def loss(model, batch):
        return jnp.mean((jax.vmap(model)(batch["u"]) - batch["next"]) ** 2)

    batch = {"u": normals(0, ROWS, 1, 32), "next": normals(1, ROWS, 1, 32)}
    return of_tree("pdequinox", "ClassicFNO", "Equinox", build, loss, batch)


def flow() -> Case:
    """flowjax: a masked autoregressive flow. Its layers keep functions that hold arrays, so that it
    is made once outside, and its parameters are trained apart.
    """
    import equinox as eqx
    import paramax
    from flowjax.distributions import StandardNormal
    from flowjax.flows import masked_autoregressive_flow

    def build(key):
        return masked_autoregressive_flow(
            key, base_dist=paramax.non_trainable(StandardNormal((8,))), flow_layers=2, nn_width=64
        )

    values, layers = eqx.partition(build(jax.random.key(0)), eqx.is_inexact_array)
    structure = jax.tree.structure(values)

    def loss(params, batch):
        model = eqx.combine(jax.tree.unflatten(structure, params), layers)
        return -paramax.unwrap(model).log_prob(batch["x"]).mean()

    return of_tree(
        "flowjax", "masked_autoregressive_flow", "Equinox",
        lambda key: jax.tree.leaves(eqx.filter(build(key), eqx.is_inexact_array)), loss,
        {"x": normals(0, ROWS, 8)},
    )  # fmt: skip


def haiku_lstm() -> Case:
    """dm-haiku: an LSTM language model."""
    import haiku as hk

    def forward(tokens):
        x = hk.Embed(128, 64)(tokens)
        core = hk.DeepRNN([hk.LSTM(64), hk.LSTM(64)])
        out, _ = hk.dynamic_unroll(core, x, core.initial_state(tokens.shape[0]), time_major=False)
        return hk.Linear(128)(out)

    model = hk.without_apply_rng(hk.transform(forward))
    batch = {"tokens": integers(0, 128, ROWS, 16)}

    def loss(params, batch):
        return next_token(model.apply(params, batch["tokens"]), batch["tokens"])

    return of_tree(
        "dm-haiku", "DeepRNN of LSTM", "Haiku",
        lambda key: model.init(key, batch["tokens"]), loss, batch,
    )  # fmt: skip


def haiku_resnet() -> Case:
    """dm-haiku: ResNet 18 with statistics of the batch."""
    import haiku as hk

    model = hk.without_apply_rng(
        hk.transform_with_state(lambda x: hk.nets.ResNet18(16, resnet_v2=True)(x, is_training=True))
    )
    batch = {"x": normals(0, ROWS, 16, 16, 3).astype(np.float64), "y": integers(1, 16, ROWS)}

    def loss(pair, batch):
        params, state = pair
        logits, state = model.apply(params, state, batch["x"])
        error = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return error.mean(), state

    return of_stateful(
        "dm-haiku", "ResNet18", "Haiku", lambda key: model.init(key, batch["x"]), loss, batch,
        double=True,
    )  # fmt: skip


def haiku_quantizer() -> Case:
    """dm-haiku: an autoencoder with a codebook (VQ-VAE), straight through."""
    import haiku as hk

    def forward(x):
        z = hk.nets.MLP([64, 32])(x)
        code = hk.nets.VectorQuantizer(32, 64, commitment_cost=0.25)(z, is_training=True)
        return hk.nets.MLP([64, x.shape[-1]])(code["quantize"]), code["loss"]

    model = hk.without_apply_rng(hk.transform(forward))
    batch = {"x": normals(0, ROWS, 24)}

    def loss(params, batch):
        again, commitment = model.apply(params, batch["x"])
        return jnp.mean((again - batch["x"]) ** 2) + commitment

    return of_tree(
        "dm-haiku", "VectorQuantizer", "Haiku", lambda key: model.init(key, batch["x"]), loss, batch
    )


def coupling_flow() -> Case:
    """distrax: a flow of coupling layers with splines, on nets of Haiku."""
    import distrax
    import haiku as hk

    def log_prob(x):
        layers = []
        for at in range(2):
            net = hk.Sequential([hk.nets.MLP([64, 64]), hk.Linear(8 * 13), hk.Reshape((8, 13))])
            layers.append(
                distrax.MaskedCoupling(
                    mask=jnp.arange(8) % 2 == at,
                    bijector=lambda params: distrax.RationalQuadraticSpline(params, -3.0, 3.0),
                    conditioner=net,
                )
            )
        base = distrax.MultivariateNormalDiag(jnp.zeros(8), jnp.ones(8))
        return distrax.Transformed(base, distrax.Inverse(distrax.Chain(layers))).log_prob(x)

    model = hk.without_apply_rng(hk.transform(log_prob))
    batch = {"x": normals(0, ROWS, 8)}

    def loss(params, batch):
        return -model.apply(params, batch["x"]).mean()

    return of_tree(
        "distrax", "MaskedCoupling", "Haiku", lambda key: model.init(key, batch["x"]), loss, batch
    )


def graph_network() -> Case:
    """jraph: a graph network over a batch of small graphs, as one graph."""
    import haiku as hk
    import jraph

    graphs, nodes, edges = 16, 8, 24

    def forward(batch):
        network = jraph.GraphNetwork(
            update_edge_fn=jraph.concatenated_args(lambda x: hk.nets.MLP([64, 32])(x)),
            update_node_fn=jraph.concatenated_args(lambda x: hk.nets.MLP([64, 32])(x)),
            update_global_fn=jraph.concatenated_args(lambda x: hk.nets.MLP([64, 1])(x)),
        )
        first = (jnp.arange(graphs) * nodes)[:, None]
        return network(
            jraph.GraphsTuple(
                nodes=batch["nodes"].reshape(graphs * nodes, -1),
                edges=batch["edges"].reshape(graphs * edges, -1),
                senders=(batch["senders"] + first).ravel(),
                receivers=(batch["receivers"] + first).ravel(),
                globals=jnp.zeros((graphs, 1)),
                n_node=np.full(graphs, nodes),
                n_edge=np.full(graphs, edges),
            )
        ).globals[:, 0]

    model = hk.without_apply_rng(hk.transform(forward))
    batch = {
        "nodes": normals(0, graphs, nodes, 8),
        "edges": normals(1, graphs, edges, 4),
        "senders": integers(2, nodes, graphs, edges),
        "receivers": integers(3, nodes, graphs, edges),
        "y": normals(4, graphs),
    }

    def loss(params, batch):
        return jnp.mean((model.apply(params, batch) - batch["y"]) ** 2)

    return of_tree(
        "jraph",
        "GraphNetwork",
        "Haiku",
        lambda key: model.init(key, jax.tree.map(jnp.asarray, batch)),
        loss,
        batch,
    )


def graph_attention() -> Case:
    """haiku-geometric: graph attention over one graph whose nodes are the rows."""
    import haiku as hk
    from haiku_geometric.nn import GATConv

    nodes, edges = 64, 256

    def forward(batch):
        graph = batch["senders"], batch["receivers"]
        x = jax.nn.elu(GATConv(16, heads=4, add_self_loops=False)(batch["x"], *graph))
        return GATConv(8, heads=1, add_self_loops=False)(x, *graph)

    model = hk.without_apply_rng(hk.transform(forward))
    batch = {
        "x": normals(0, nodes, 16),
        "y": integers(1, 8, nodes),
        "senders": integers(2, nodes, edges),
        "receivers": integers(3, nodes, edges),
    }

    def loss(params, batch):
        logits = model.apply(params, batch)
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    return of_tree(
        "haiku-geometric", "GATConv", "Haiku", lambda key: model.init(key, batch), loss, batch,
        batch_axes={
            "x": ("batch", None), "y": ("batch",), "senders": ("edges",), "receivers": ("edges",)
        },
    )  # fmt: skip


def q_learning() -> Case:
    """rlax: a distributional value network and its double Q-learning loss."""
    import haiku as hk
    import rlax

    model = hk.without_apply_rng(
        hk.transform(lambda x: hk.Reshape((4, 21))(hk.nets.MLP([64, 64, 4 * 21])(x)))
    )
    atoms = jnp.linspace(-2.0, 2.0, 21)
    batch = {
        "before": normals(0, ROWS, 12), "after": normals(1, ROWS, 12),
        "action": integers(2, 4, ROWS), "reward": normals(3, ROWS),
    }  # fmt: skip

    def loss(params, batch):
        before, after = (model.apply(params, batch[name]) for name in ("before", "after"))
        values = jnp.mean(jax.nn.softmax(after) * atoms, axis=-1)
        error = jax.vmap(
            lambda *row: rlax.categorical_double_q_learning(
                atoms, row[0], row[1], row[2], 0.9, atoms, row[3], row[4]
            )
        )
        return error(before, batch["action"], batch["reward"], after, values).mean()

    return of_tree(
        "rlax", "categorical_double_q_learning", "Haiku",
        lambda key: model.init(key, batch["before"]), loss, batch,
    )  # fmt: skip


def batch_norm() -> Case:
    """equinox: convolutions with statistics of the batch in an `eqx.nn.State`."""
    import equinox as eqx

    def network(key):
        first, second, last = jax.random.split(key, 3)
        return eqx.nn.Sequential(
            [
                eqx.nn.Conv2d(3, 32, 3, stride=2, key=first),
                eqx.nn.BatchNorm(32, axis_name="batch", mode="batch"),
                eqx.nn.Lambda(jax.nn.relu),
                eqx.nn.Conv2d(32, 64, 3, stride=2, key=second),
                eqx.nn.BatchNorm(64, axis_name="batch", mode="batch"),
                eqx.nn.Lambda(lambda x: jax.nn.relu(x).mean((1, 2))),
                eqx.nn.Linear(64, 16, key=last),
            ]
        )

    def loss(pair, batch):
        model, state = pair
        logits, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(
            batch["x"], state
        )
        error = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return error.mean(), state

    batch = {"x": normals(0, ROWS, 3, 16, 16), "y": integers(1, 16, ROWS)}
    return of_stateful(
        "equinox", "Conv2d and BatchNorm", "Equinox",
        lambda key: eqx.nn.make_with_state(network)(key), loss, batch,
    )  # fmt: skip


def protein_language_model() -> Case:
    """esm2quinox: the protein language model ESM 2."""
    from esm2quinox import ESM2

    def build(key):
        return ESM2(num_layers=2, embed_size=64, num_heads=4, token_dropout=False, key=key)

    def loss(model, batch):
        logits = jax.vmap(lambda tokens: model(tokens).logits)(batch["tokens"])
        error = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return error.mean()

    batch = {"tokens": 4 + integers(0, 20, ROWS, 24), "targets": 4 + integers(1, 20, ROWS, 24)}
    return of_tree("esm2quinox", "ESM2", "Equinox", build, loss, batch)


def megalodon() -> Case:
    """megalodon-jax: attention in chunks over complex moving averages."""
    from megalodon_jax import MegalodonConfig, MegalodonForCausalLM

    config = MegalodonConfig(
        vocab_size=128, model_dim=64, num_layers=2, num_heads=2, z_dim=32, value_dim=64,
        ffn_hidden_dim=128, cema_ndim=4, chunk_size=16, norm_num_groups=8,
    )  # fmt: skip

    def build(key):
        return MegalodonForCausalLM(config, key=key)

    def loss(model, batch):
        return next_token(model(batch["tokens"])[0], batch["tokens"])

    return of_tree(
        "megalodon-jax", "MegalodonForCausalLM", "Equinox", build, loss,
        {"tokens": integers(0, 128, ROWS, 32)},
    )  # fmt: skip


def penzai_llama() -> Case:
    """penzai: a model like Llama; its parameters apart from its layers, as Penzai has it."""
    from penzai import pz
    from penzai.models.transformer.variants import llamalike_common as common

    config = common.LlamalikeTransformerConfig(
        num_kv_heads=2, query_head_multiplier=2, embedding_dim=64, projection_dim=16,
        mlp_hidden_dim=128, num_decoder_blocks=2, vocab_size=128, mlp_variant="swiglu",
        tie_embedder_and_logits=False,
    )  # fmt: skip

    def parts(key):
        return pz.unbind_params(common.build_llamalike_transformer(config, key), freeze=True)

    layers, _ = parts(jax.random.key(0))

    def loss(params, batch):
        model = pz.bind_variables(layers, params)
        tokens = pz.nx.wrap(batch["tokens"]).tag("batch", "seq")
        logits = model(tokens, token_positions=pz.nx.arange("seq", batch["tokens"].shape[1]))
        return next_token(logits.unwrap("batch", "seq", "vocabulary"), batch["tokens"])

    return of_tree(
        "penzai", "TransformerLM", "Penzai", lambda key: parts(key)[1], loss,
        {"tokens": integers(0, 128, ROWS, 16)},
    )  # fmt: skip


MODELS = (
    vision_transformer,
    convnext,
    fourier_operator,
    flow,
    batch_norm,
    protein_language_model,
    megalodon,
    haiku_lstm,
    haiku_resnet,
    haiku_quantizer,
    coupling_flow,
    graph_network,
    graph_attention,
    q_learning,
    penzai_llama,
)
