"""A state in a notebook: a card of what each device has of its arrays, also after a step has donated
them, and treescope's pictures, in a real browser where there is one.
"""

from __future__ import annotations

import io
import shutil
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from shardlib.lowering.runtime import TrainState, sharding_tree
from tests.report.test_text import read

#: Pixels of a colour that is a device's part of the array.
AREA = 500
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture
def state() -> TrainState:
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"))
    sharded = NamedSharding(mesh, PartitionSpec("fsdp", "tensor"))
    weight = jax.device_put(jnp.zeros((64, 32)), sharded)
    key = jax.random.key(0)
    return TrainState(
        step=jnp.int32(0), params={"weight": weight}, model_state={"key": key}, opt_state={}
    )


def test_without_treescope_or_after_a_step_the_card_is_there_alone(state, monkeypatch):
    tree = "as a tree"
    assert tree in state._repr_html_()
    with monkeypatch.context() as missing:
        missing.setitem(sys.modules, "treescope", None)
        assert sharding_tree({"params": state.params}) == ""
        assert tree not in state._repr_html_() and "64 x 32" in state._repr_html_()
    state.params["weight"].delete()
    assert tree not in state._repr_html_() and "64 x 32" in state._repr_html_()
    assert sharding_tree({"params": {}}) == ""


@pytest.mark.long
def test_it_shows_the_parts_of_an_array_when_it_is_opened(state, tmp_path: Path):
    playwright = pytest.importorskip("playwright.sync_api", reason="no Playwright")
    Image = pytest.importorskip("PIL.Image", reason="no Pillow")
    if CHROMIUM is None:
        pytest.skip("no browser on this machine")
    page_file = tmp_path / "card.html"
    page_file.write_text(f"<!DOCTYPE html><meta charset=utf-8>{state._repr_html_()}")
    with playwright.sync_playwright() as running:
        browser = running.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = browser.new_context(offline=True).new_page()
        said: list[str] = []
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(page_file.as_uri())
        page.locator("summary").click()
        colours = 0
        for _ in range(50):  # treescope draws what is in sight, a little later
            shot = Image.open(io.BytesIO(page.locator("details").screenshot())).convert("RGB")
            every = shot.getcolors(shot.width * shot.height) or []
            colours = sum(count > AREA and len(set(rgb)) > 1 for count, rgb in every)
            if colours >= 8:
                break
            page.wait_for_timeout(200)
        browser.close()
    assert said == []
    assert colours == 8  # a colour for each device


def test_it_says_the_bytes_that_a_device_has():
    mesh = jax.make_mesh((8,), ("fsdp",))
    sharded = NamedSharding(mesh, PartitionSpec("fsdp"))
    weight = jax.device_put(jnp.zeros((64, 32), jnp.float32), sharded)
    params = {"<weight>": weight, "bias": jnp.zeros((32,), jnp.float32)}
    state = TrainState(step=jnp.int32(0), params=params, model_state={}, opt_state={})
    held = max(
        sum(s.data.nbytes for a in params.values() for s in a.addressable_shards if s.device == d)
        for d in jax.devices()
    )
    text = read(state._repr_html_())
    assert held == 64 * 32 * 4 // 8 + 32 * 4 and "params: 2 arrays, 1.12 KiB per device" in text
    assert "64 x 32" in text and "('fsdp',)" in text and "params['<weight>']" in text
    weight.delete()
    assert text.startswith(read(state._repr_html_()))  # the tree is left out
