"""Colours: what belongs together in programs whose structure is known by hand."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp

from shardlib.layout import MeshShape
from shardlib.propagation.colours import Choice, colour
from shardlib.propagation.contractions import layout_constraints
from tests.planner import worlds


def test_names_flow_from_parameters_to_unnamed_arrays() -> None:
    colouring = colour(worlds.mlp())
    assert colouring.parameters == {
        "up": ("embed", "mlp"),
        "bias": ("mlp",),
        "down": ("mlp", "embed"),
    }
    assert colouring.batch == {"x": ("batch", "embed")}
    assert {name: c.divisor for name, c in colouring.colours.items()} == {
        "embed": 32,
        "mlp": 64,
        "batch": 16,
    }


def test_a_model_without_names_has_the_same_colours() -> None:
    named, unnamed = colour(worlds.mlp()), colour(worlds.mlp(named=False))
    translate = {"up:0": "embed", "up:1": "mlp", "batch": "batch"}
    assert {
        path: tuple(translate[str(name)] for name in axes)
        for path, axes in unnamed.parameters.items()
    } == named.parameters


def test_gradients_have_the_colours_of_their_parameters() -> None:
    problem = worlds.layers()
    colouring = colour(problem)
    for policy, step in problem.steps.items():
        names = colouring.steps[policy]
        for index, gradient in zip(step.graph.inputs_of("parameter"), step.gradients, strict=True):
            assert names[gradient] == names[index]


def test_the_sequence_is_what_the_loss_reads_of_longer_arrays() -> None:
    def loss(params: dict[str, jax.Array], batch: dict[str, jax.Array]) -> jax.Array:
        rows = params["table"][batch["tokens"][:, :-1]]
        return jnp.mean((rows @ params["out"])[..., 0] * batch["tokens"][:, 1:])

    colouring = colour(
        worlds.problem(
            loss,
            {"table": worlds.shape(32, 8), "out": worlds.shape(8, 4)},
            {"tokens": jax.ShapeDtypeStruct((16, 257), jnp.int32)},
            {"table": ("vocab", "embed"), "out": ("embed", None)},
            {"tokens": ("batch", "seq")},
            remat={},
        )
    )
    assert list(colouring.batch.values()) == [("batch", None)]
    assert colouring.sequence_colour == "seq"
    assert (colouring.colours["seq"].sizes, colouring.colours["seq"].divisor) == ((256,), 256)
    assert ("batch", "seq", "embed") in colouring.forward


def test_attention_scores_have_the_sequence_twice_and_are_cut_once() -> None:
    problem = worlds.layers()
    colouring = colour(problem)
    twice = {colouring.forward[value] for value, _ in colouring.conflicts(colouring.forward)}
    assert ("batch", "heads", "seq", "seq") in twice
    choice = Choice(tensor=(), batch="batch", sequence="seq")
    assert choice.spec(("batch", "heads", "seq", "seq")) == ("batch", None, "tensor", None)


def test_the_layer_dim_of_a_stack_has_no_colour() -> None:
    colouring = colour(worlds.layers())
    assert colouring.parameters["gate"] == (None, "embed", "mlp")
    assert colouring.colours["embed"].carried and not colouring.colours["mlp"].carried


def test_names_that_the_program_ties_are_reported_and_share_a_colour() -> None:
    def loss(p: dict[str, jax.Array], b: dict[str, jax.Array]) -> jax.Array:
        return jnp.sum((b["x"] @ p["w"]) * p["scale"])

    problem = worlds.problem(
        loss,
        {"w": worlds.shape(8, 16), "scale": worlds.shape(16)},
        {"x": worlds.shape(4, 8)},
        {"w": ("embed", "mlp"), "scale": ("hidden",)},
        {"x": ("batch", None)},
        remat={},
    )
    colouring = colour(problem)
    assert colouring.canonical("hidden") == "mlp"
    assert [f.message for f in colouring.findings] == [
        "the program ties the logical axes mlp, hidden together; they are sharded alike, under"
        " the name 'mlp'"
    ]


def test_merged_heads_share_the_colour_of_the_major_factor() -> None:
    def loss(p: dict[str, jax.Array], b: dict[str, jax.Array]) -> jax.Array:
        heads = jnp.einsum("be,ehd->bhd", b["x"], p["q"])
        return jnp.sum(heads.reshape(heads.shape[0], -1) @ p["o"])

    problem = worlds.problem(
        loss,
        {"q": worlds.shape(8, 4, 6), "o": worlds.shape(24, 8)},
        {"x": worlds.shape(4, 8)},
        {"q": ("embed", "heads", "head_dim")},
        {"x": ("batch", None)},
        remat={},
    )
    colouring = colour(problem)
    assert (
        colouring.parameters["o"] == ("heads", "embed") or colouring.parameters["o"][0] == "heads"
    )
    assert colouring.colours["heads"].divisor == 4


def test_placements_stand_on_matmuls_and_carries() -> None:
    problem = worlds.layers()
    colouring = colour(problem)
    rules = Choice(tensor=("vocab", "mlp", "heads"), batch="batch", sequence="seq").rules()
    found = layout_constraints(
        problem.forward,
        colouring.forward,
        rules,
        MeshShape(data=2, tensor=4),
        colouring.batch_colour,
    )
    texts = {str(layout) for layout in found.values()}
    assert {"[data, tensor, -]", "[data, -, tensor]", "[data, -, tensor, -]"} <= texts
    assert any("/carry/" in path for path, _ in found)


def step_colours(widths: list[int]) -> dict[str, str | None]:
    """Colour of the width before and after every layer of a perceptron, whose step is planned as
    it is written: [rows, widths[0]] -> [rows, widths[1]] ...
    """
    kernels = {f"w{at}": worlds.shape(a, b) for at, (a, b) in enumerate(itertools.pairwise(widths))}

    def loss(p: dict[str, jax.Array], b: dict[str, jax.Array]) -> jax.Array:
        x = b["x"]
        for name in kernels:
            x = jnp.tanh(x @ p[name])
        return (x**2).mean()

    batch = {"x": worlds.shape(8, widths[0])}
    problem = worlds.problem(loss, kernels, batch, {}, {"x": ("batch", None)}, remat={})
    return {f"{path}:{dim}": name for path, axes in colour(problem).parameters.items()
            for dim, name in enumerate(axes)}  # fmt: skip


def test_layers_that_are_written_out_have_one_colour() -> None:
    found = step_colours([24, 96, 32, 96, 32, 96, 32, 10])
    assert {found[f"w{at}:1"] for at in (0, 2, 4)} == {
        "w0:1",
        "w2:1",
    }  # the first has another shape
    assert found["w2:1"] == found["w3:0"] == found["w4:1"] == found["w5:0"]
    assert found["w1:1"] == found["w3:1"] == found["w2:0"] == found["w4:0"]
    assert found["w1:1"] != found["w2:1"]


def test_widths_that_meet_in_a_weight_have_two_colours_in_turn() -> None:
    found = step_colours([24, 64, 64, 64, 64, 64, 10])
    ends = [found[f"w{at}:1"] for at in range(5)]
    assert ends[1] == ends[3] and ends[1] != ends[2]
    assert all(found[f"w{at}:0"] != found[f"w{at}:1"] for at in range(6))


def test_names_that_a_user_gave_stay_apart() -> None:
    kernels = {name: worlds.shape(32, 32) for name in ("a", "b", "c", "d")}

    def loss(p: dict[str, jax.Array], b: dict[str, jax.Array]) -> jax.Array:
        return (jnp.tanh(jnp.tanh(b["x"] @ p["a"]) @ p["b"] @ p["c"]) @ p["d"]).mean()

    axes = {"a": (None, "first"), "c": (None, "second")}
    batch = {"x": worlds.shape(8, 32)}
    problem = worlds.problem(loss, kernels, batch, axes, {"x": ("batch", None)}, remat={})
    assert {"first", "second"} < {*colour(problem).colours}


def test_names_that_contradict_those_of_most_parameters_are_left_out() -> None:
    def loss(p: dict[str, jax.Array], b: dict[str, jax.Array]) -> jax.Array:
        q, k, v = (jnp.einsum("bse,ehd->bshd", b["x"], p[name]) for name in ("q", "k", "v"))
        scores = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", q, k))
        return (b["x"] + jnp.einsum("bhst,bthd,hde->bse", scores, v, p["out"])).sum()

    projected = worlds.shape(6, 2, 4)
    problem = worlds.problem(
        loss,
        {"k": projected, "out": worlds.shape(2, 4, 6), "q": projected, "v": projected},
        {"x": worlds.shape(8, 3, 6)},
        dict.fromkeys(("k", "out", "q", "v"), ("embed", "kv", None)),
        {"x": ("batch", None, None)},
        remat={},
    )
    found = colour(problem)
    assert all(found.parameters[name][:2] == ("embed", "kv") for name in ("q", "k", "v"))
    heads, width, embed = found.parameters["out"]
    assert (heads, embed) == ("kv", "embed") and width not in ("kv", "embed")
    [finding] = [one for one in found.findings if one.code == "names-contradict"]
    assert finding.where == "out"
