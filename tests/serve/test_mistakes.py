"""Words of the command line that cannot be carried out: one message, and exit code 2."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest

from shardlib.errors import MissingPackageError

pytestmark = pytest.mark.unit


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("serve nothing-of-that-name --port 0", "'nothing-of-that-name' is not a preset"),
        ("serve demo --port 0 --longest 9999", "--longest 9999 is more than the 256 tokens"),
        ("serve demo --port 0 --slots 0", "slots is 0"),
        ("serve demo --port 0 --token-file no/such", "the tokens in no/such cannot be read"),
        ("serve demo --port 0 --token-file {empty}", "holds no tokens"),
        ("serve demo --port 0 --token-file {short}", "fewer than 16 characters"),
        ("serve demo --port 0 --token-file {accents}", "ASCII"),
        ("serve demo --port 0 --drain 0s", "--drain '0s' is not a duration, above 0"),
        ("serve demo --port 0 --refresh 10", "--refresh '10' has no unit"),
        ("serve demo --port 0 --groups 2", "--groups 2 shares devices out"),
        ("serve demo --port 0 --topology cpu:8 --groups 3", "3 groups do not divide"),
        ("serve demo --port 0 --tpot 0.001ms", "1.00 µs is asked for, and"),
        ("serve demo --port 0 --plan no/such.json", "there is no plan file no/such.json"),
        ("serve demo --port 0 --plan a --ttft 1s", "--plan is a plan already"),
        ("serve demo --port 0 --ttft 1s --slots 3", "a plan says what --slots would"),
        ("serve demo --host no.such.host.invalid", "cannot be listened at"),
        ("serve demo --adapter a=b --port 0", "adapters are for folders of"),
        ("serve demo --adapter a --port 0", "--adapter a gives no new name"),
        ("serve demo x=demo --adapter a=b --port 0", "--adapter is for one"),
        ("bench-serve {workload}", "one of --url and --serve says who is asked"),
        (
            "bench-serve {workload} --url http://127.0.0.1:9/v1",
            "nobody answers at http://127.0.0.1:9/v1",
        ),
        ("bench-serve {workload} --url nonsense", "nobody answers at nonsense"),
        ("bench-serve {workload} --url http://a --ttft soon", "--ttft"),
        ("edge demo -d x.toml --at a=b:1", "--at are of --run N"),
        ("edge demo -d x.toml --run 2 --at a=b:1", "go together"),
        ("edge-stage --secret-file no/such", "the secret in no/such cannot be read"),
        ("edge-stage --listen here --secret-file {long}", "--listen is 'here'"),
        ("edge-stage --secret-file {short}", "at least 16 characters"),
        ("generate demo --prompt a --average", "demo is not a run, so that it has no average"),
        ("export demo", ""),
    ],
)
def test_mistakes_are_one_message(shell: Any, tmp_path: Path, words: str, said: str):
    files = {
        "empty": "",
        "short": "short",
        "accents": "é" * 20,
        "long": "x" * 20,
        "workload": '[{"length": 5, "most": 1, "at": 0.0}]',
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text, "utf-8")
    code, _, err = shell(*words.format(**{name: tmp_path / name for name in files}).split())
    assert (code, said in err) == (2, True), err


@pytest.mark.parametrize(
    ("module", "package"),
    [("shardlib.serve.http", "fastapi"), ("shardlib.serve.measuring", "httpx2")],
)
def test_extra_that_is_not_installed(
    module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingPackageError, match=rf"{package}\nTry: pip install 'shardlib\[serve"):
        importlib.import_module(module)
