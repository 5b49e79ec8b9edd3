"""Names and numbers are read from all three front ends exactly as the user wrote them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec

import shardlib._jax_compat as compat
from shardlib.annotation.model import linen, planning_mesh, read, tree
from shardlib.annotation.names import spelled
from shardlib.annotation.trees import path_text
from shardlib.errors import AnnotationError

kernel_init = nnx.initializers.lecun_normal()


def flat(params):
    return {path_text(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)}


def same(a, b, relative=0.0):
    a, b = flat(a), flat(b)
    assert a.keys() == b.keys()
    for path in a:
        assert a[path].dtype == b[path].dtype, path
        np.testing.assert_allclose(
            np.asarray(a[path]), np.asarray(b[path]), rtol=relative, atol=0, err_msg=path
        )


class Net(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(
            4, 8, kernel_init=nnx.with_partitioning(kernel_init, ("embed", "mlp")), rngs=rngs
        )
        self.down = nnx.Linear(
            8, 4, kernel_metadata={"out_sharding": PartitionSpec("mlp", "embed")}, rngs=rngs
        )
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.count = nnx.Variable(jnp.zeros((), jnp.int32))
        self.blocks = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(11)])

    def __call__(self, x):
        self.count[...] += 1
        return self.norm(self.down(self.drop(self.up(x))))


def test_nnx_names_and_split():
    model = read(Net)
    assert model.name == "Net"
    assert model.axes == {"up.kernel": ("embed", "mlp"), "down.kernel": ("mlp", "embed")}
    assert flat(model.params).keys() >= {"up.kernel", "up.bias", "blocks.10.kernel", "norm.scale"}
    assert flat(model.state).keys() == {
        "count",
        "drop.rngs.count",
        "drop.rngs.key",
        "norm.mean",
        "norm.var",
    }
    assert all(
        isinstance(leaf, jax.ShapeDtypeStruct)
        for leaf in jax.tree.leaves((model.params, model.state))
    )
    assert not model.findings


@pytest.mark.parametrize("jitted", [False, True])
def test_nnx_init_is_the_users_constructor(jitted):
    model = read(Net)
    with compat.unsharded_variables():
        module = Net(nnx.Rngs(7))
    params, _ = (jax.jit(model.init) if jitted else model.init)(7)
    same(params, nnx.to_pure_dict(nnx.state(module, nnx.Param)))


def test_nnx_bind_runs_the_module_and_returns_new_state():
    model = read(Net)
    params, state = model.init(0)
    loss = model.bind(lambda module, x: ((module(x) ** 2).mean(), {"largest": module(x).max()}))
    value, (metrics, after) = jax.jit(loss)(params, state, jnp.ones((2, 4)))
    assert value.shape == () and set(metrics) == {"largest"}
    assert int(after["count"]) == 2
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert isinstance(model.rebuild(params, state), Net)


def test_nnx_mistakes_are_one_clear_error_each():
    with pytest.raises(
        AnnotationError,
        match=r"needs config, rngs.*\nTry: lambda rngs: Other\(config=..., rngs=rngs\)",
    ):

        class Other(nnx.Module):
            def __init__(self, config, rngs):
                pass

        read(Other)
    with pytest.raises(AnnotationError, match="returned int, expected"):
        read(lambda rngs: 3)
    with pytest.raises(AnnotationError, match="init is a int"):
        read(3)


def stacked(rngs, **metadata):
    @nnx.split_rngs(splits=4)
    @nnx.vmap(in_axes=0, out_axes=0, **metadata)
    def build(rngs):
        return nnx.Linear(8, 16, kernel_metadata={"out_sharding": ("embed", "mlp")}, rngs=rngs)

    return build(rngs)


# trap T6: Flax shifts the names by one dim
def test_nnx_stack_without_a_name_gets_layers_and_a_finding():
    model = read(lambda rngs: stacked(rngs))
    assert model.axes == {"kernel": ("layers", "embed", "mlp")}
    assert model.params["kernel"].shape == (4, 8, 16)
    [finding] = model.findings
    assert finding.code == "stacking-dim-unnamed" and finding.where == "kernel"


def test_nnx_stack_with_a_name_keeps_it():
    model = read(lambda rngs: stacked(rngs, transform_metadata={nnx.PARTITION_NAME: "depth"}))
    assert model.axes == {"kernel": ("depth", "embed", "mlp")} and not model.findings


def attention(rngs):
    return nnx.MultiHeadAttention(
        num_heads=2,
        in_features=8,
        kernel_init=nnx.with_partitioning(kernel_init, ("embed", "kv")),
        decode=False,
        rngs=rngs,
    )


def vmapped(make, *, axis=0, **metadata):
    return lambda rngs: nnx.split_rngs(splits=3)(
        nnx.vmap(make, in_axes=0, out_axes=axis, **metadata)
    )(rngs)


@pytest.mark.parametrize(
    "build, query, shape, codes",
    [
        (attention, ("embed", "kv", None), (8, 2, 4), []),
        (vmapped(attention), ("layers", "embed", "kv", None), (3, 8, 2, 4), ["unnamed"]),
        (vmapped(attention, axis=1), ("embed", "layers", "kv", None), (8, 3, 2, 4), ["unnamed"]),
        (
            vmapped(attention, transform_metadata={nnx.PARTITION_NAME: "depth"}),
            ("depth", "embed", "kv", None),
            (3, 8, 2, 4),
            [],
        ),
        (
            vmapped(attention, axis=1, transform_metadata={nnx.PARTITION_NAME: None}),
            ("embed", None, "kv", None),
            (8, 3, 2, 4),
            [],
        ),
        (
            vmapped(vmapped(attention)),
            ("layers", None, "embed", "kv", None),
            (3, 3, 8, 2, 4),
            ["unnamed"],
        ),
    ],
    ids=["alone", "stack", "stack at 1", "named stack", "stack without name", "stack of stacks"],
)
def test_fewer_names_than_dims_are_those_of_the_leading_dims(build, query, shape, codes):
    model = read(build)
    assert model.params["query"]["kernel"].shape == shape
    assert model.axes["query.kernel"] == query
    assert [one.code.removeprefix("stacking-dim-") for one in model.findings] == codes


def test_a_stack_of_zeros_and_one_by_a_loop():
    def zeros(rngs):
        return nnx.Linear(
            4, 8, bias_init=nnx.with_partitioning(nnx.initializers.zeros, ("mlp",)), rngs=rngs
        )

    class Scanned(nnx.Module):
        def __init__(self, rngs):
            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=(nnx.Carry, 0))
            def build(carry, key):
                return carry, nnx.state(attention(nnx.Rngs(key)))["query"]["kernel"]

            self.kernel = build(0, jax.random.split(rngs.params(), 5))[1]

    assert read(vmapped(zeros)).axes == {"bias": ("layers", "mlp")}
    assert read(Scanned).axes == {"kernel": ("layers", "embed", "kv", None)}


SPELLINGS = {
    "tuple": ("embed", "mlp"),
    "spec": PartitionSpec("embed", "mlp"),
    "one name": ("embed",),
    "none": (None, "mlp"),
    "merged": (("embed", "fsdp"), "mlp"),
    "mesh axes": ("data", "tensor"),
}


@pytest.mark.parametrize("names", SPELLINGS.values(), ids=SPELLINGS)
@pytest.mark.parametrize("key", ["out_sharding", "sharding", "sharding_names", "wrapped", "linen"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_every_spelling_of_flax(names, key):
    expected = (*spelled(names), None)[:2]
    rules = (("embed", "fsdp"),)

    def linear(rngs):
        if key == "wrapped":
            init = nnx.with_metadata(kernel_init, out_sharding=names, sharding_rules=rules)
            return nnx.Linear(4, 8, kernel_init=init, rngs=rngs)
        return nnx.Linear(4, 8, kernel_metadata={key: names}, rngs=rngs)

    if key == "linen":
        for box in (nn.with_partitioning, nn.with_logical_partitioning):
            dense = nn.Dense(8, kernel_init=box(kernel_init, names))
            assert read(linen(dense, jnp.ones((2, 4)))).axes == {"kernel": expected}
            model = read(tree(lambda key, dense=dense: dense.init(key, jnp.ones((2, 4)))["params"]))
            assert model.axes == {"kernel.value": expected}
    else:
        assert read(linear).axes == {"kernel": expected}


def test_names_are_read_and_never_applied():
    """Flax itself fails here: it applies three names to a flattened kernel of two dims."""
    mesh = jax.sharding.AbstractMesh((1,), ("data",))
    kernel = nn.with_partitioning(kernel_init, ("data", None, "model"), mesh=mesh)
    module = nn.DenseGeneral((2, 4), kernel_init=kernel)
    model = read(linen(module, jnp.ones((2, 8))))
    assert model.axes == {"kernel": ("data", None, "model")}
    loss = model.bind(lambda params, x: jnp.mean(module.apply({"params": params}, x) ** 2))
    with planning_mesh(), nn.logical_axis_rules((("data", "nowhere"),)):
        jaxpr = jax.make_jaxpr(loss)(model.params, {}, jnp.ones((2, 8)))
        assert jax.eval_shape(model.init, 0)[0]["kernel"].shape == (8, 2, 4)
    assert "sharding_constraint" not in str(jaxpr)
    with pytest.raises(Exception, match="data"):
        module.init(jax.random.key(0), jnp.ones((2, 8)))  # outside, Flax is as it was
    eager = {"out_sharding": ("embed", "mlp"), "eager_sharding": True}
    assert read(lambda rngs: nnx.Linear(4, 8, kernel_metadata=eager, rngs=rngs)).axes == {
        "kernel": ("embed", "mlp")
    }


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        kernel = nn.with_logical_partitioning(nn.initializers.lecun_normal(), ("embed", "mlp"))
        return x + nn.Dense(4, kernel_init=kernel)(x), None


class Stack(nn.Module):
    @nn.compact
    def __call__(self, x):
        blocks = nn.scan(
            Block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        x, _ = blocks(name="blocks")(x, None)
        return nn.BatchNorm(use_running_average=False)(x)


def test_linen_names_numbers_and_state():
    sample = jax.ShapeDtypeStruct((2, 4), jnp.float32)
    model = read(linen(Stack(), sample))
    assert model.axes == {"blocks.Dense_0.kernel": ("layers", "embed", "mlp")}
    assert read(linen(Stack(), sample)).axes == model.axes  # reading does not use the boxes up
    params, state = jax.jit(model.init)(5)
    variables = nn.meta.unbox(Stack().init(jax.random.key(5), jnp.zeros((2, 4))))
    same(
        params, variables["params"], relative=1e-6
    )  # equal, but for the loop at the code generator's level 0, which tests use
    same(state["batch_stats"], variables["batch_stats"])


def test_linen_state_reaches_the_loss_and_comes_back():
    model = read(linen(Stack(), jnp.zeros((2, 4))))

    def loss(variables, x):
        y, updates = Stack().apply(variables, x, mutable=["batch_stats"])
        return (y**2).mean(), {}, updates

    params, state = model.init(0)
    _, (_, after) = jax.jit(model.bind(loss))(params, state, jnp.arange(8.0).reshape(2, 4))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    assert not np.array_equal(
        after["batch_stats"]["BatchNorm_0"]["mean"], state["batch_stats"]["BatchNorm_0"]["mean"]
    )


def test_tree_names_numbers_and_mistakes():
    def init(key):
        return {"w": jax.random.normal(key, (4, 8)), "parts": (jnp.zeros(8), jnp.ones(3))}

    model = read(tree(init, {"w": ("embed", "mlp"), "parts": (("mlp",), None)}))
    assert model.axes == {"w": ("embed", "mlp"), "parts.0": ("mlp",)}
    same(model.init(3)[0], init(jax.random.key(3)))
    assert read(tree(init)).axes == {}
    assert read(tree(init, {"w": ("embed",), "parts": (("mlp",),)})).axes == {
        "w": ("embed", None),
        "parts.0": ("mlp",),
    }
    with pytest.raises(AnnotationError, match="axes name arrays that the params do not have"):
        read(tree(init, {"w": ("embed", "mlp"), "parts": (None, None, ("mlp",))}))
    with pytest.raises(
        AnnotationError, match=r"parts.0: 2 names \('mlp', None\) for an array of 1 dims \(8,\)"
    ):
        read(tree(init, {"parts": (("mlp", None), None)}))
    with pytest.raises(AnnotationError, match="w has dtype int32"):
        read(tree(lambda key: {"w": jnp.zeros(3, jnp.int32)}))


def test_names_of_a_tree_by_path():
    def init(key):
        return {
            "embed": {"table": jax.random.normal(key, (4, 8))},
            "parts": [jnp.zeros(8), jnp.ones(3)],
        }

    assert read(tree(init, {"embed.table": ("vocab", "embed"), "parts.0": ("embed",)})).axes == {
        "embed.table": ("vocab", "embed"),
        "parts.0": ("embed",),
    }
    assert read(tree(init, {"parts.1": ("three",)})).axes == {"parts.1": ("three",)}
    assert read(
        tree(init, {"embed": {"table": ("vocab", "embed")}, "parts": [None, None]})
    ).axes == {"embed.table": ("vocab", "embed")}
    with pytest.raises(AnnotationError) as error:
        read(tree(init, {"embed.tabel": ("vocab", "embed"), "parts.0": None}))
    assert (
        str(error.value)
        == "axes name arrays that the params do not have: 'embed.tabel'; did you mean"
        " 'embed.table'?\n"
        "Try: one tuple of names, or None, in the place of each array; or names by dotted path:"
        " arrays are embed.table, parts.0, parts.1"
    )


def test_spellings():
    assert spelled(PartitionSpec("a", None, ("b", "c"))) == ("a", None, "b+c")
    with pytest.raises(TypeError, match="3 is not a logical axis"):
        spelled(("a", 3))


@jax.tree_util.register_pytree_node_class
class Perceptron:
    """A module that is a pytree, with leaves that are not arrays, as those of Equinox have."""

    def __init__(self, key, activation=jax.nn.gelu):
        self.parts = (jax.random.normal(key, (4, 8)), activation, True, jnp.arange(3))

    def tree_flatten(self):
        return self.parts, None

    @classmethod
    def tree_unflatten(cls, _, parts):
        made = object.__new__(cls)
        made.parts = tuple(parts)
        return made

    def __call__(self, x):
        weight, activation, _, _ = self.parts
        return activation(x @ weight)


def test_modules_with_functions_among_their_leaves():
    model = read(tree(Perceptron, {"0": ("embed", "mlp")}))
    assert model.axes == {"0": ("embed", "mlp")}
    assert [leaf.shape for leaf in jax.tree.leaves(model.params)] == [(4, 8)] and list(
        model.state
    ) == ["3"]
    assert [(one.code, one.where) for one in model.findings] == [("not-trained", "2")]
    params, state = model.init(0)
    true, x = Perceptron(jax.random.key(0)), jnp.ones((2, 4))
    np.testing.assert_array_equal(model.rebuild(params, state)(x), true(x))
    pure = model.bind(lambda module, batch: jnp.mean(module(batch) ** 2))
    gradient = jax.grad(lambda params: pure(params, state, x)[0])(params)
    expected = jax.grad(lambda weight: jnp.mean(jax.nn.gelu(x @ weight) ** 2))(true.parts[0])
    np.testing.assert_allclose(jax.tree.leaves(gradient)[0], expected, rtol=1e-6)
    with pytest.raises(
        AnnotationError, match=r"built already(.|\n)*shardlib.tree\(lambda key: Perceptron"
    ):
        read(true)


def test_a_function_of_a_key_is_told_of_tree():
    def weights(key):
        first, second = jax.random.split(key)
        return {"up": jax.random.normal(first, (4, 8)), "down": jax.random.normal(second, (8, 4))}

    with pytest.raises(AnnotationError) as caught:
        read(weights)
    assert str(caught.value).endswith(
        "\nTry: shardlib.tree(weights), as it takes a key and makes a tree of arrays"
    )

    def broken(key):
        raise RuntimeError("no weights")

    with pytest.raises(AnnotationError, match=r"RuntimeError: no weights$"):
        read(broken)


class Rewound(nnx.Module):
    """A stack under `nnx.scan` and a layer under `nnx.remat`, which hand parameters on unchanged."""

    def __init__(self, rngs: nnx.Rngs):
        self.stack = nnx.vmap(lambda rngs: nnx.Linear(8, 8, rngs=rngs))(rngs.split(3))
        self.layer = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = nnx.remat(lambda layer, x: jnp.tanh(layer(x)))(self.layer, x)
        walk = nnx.scan(lambda layer, x: layer(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return walk(self.stack, x)


class Doubled(Rewound):
    def __call__(self, x: jax.Array) -> jax.Array:
        x = super().__call__(x)
        self.layer.kernel.set_value(2 * self.layer.kernel.get_value())
        return x


def test_parameters_that_a_loss_assigns_are_refused():
    def traced(kind: type[Rewound]) -> tuple[int, ...]:
        model = read(kind)
        loss = model.bind(lambda module, batch: jnp.sum(module(batch)))
        return jax.eval_shape(loss, model.params, model.state, jnp.ones((2, 8)))[0].shape

    assert traced(Rewound) == ()
    with pytest.raises(AnnotationError) as refused:
        traced(Doubled)
    assert str(refused.value) == (
        "the loss assigns to trained parameters, and what it assigns would be lost:"
        " layer.kernel: another value after the loss than before\nTry: keep what the forward pass"
        " computes in a variable of another type (nnx.BatchStat); or bring the whole step:"
        " shardlib.compile_step"
    )
