"""MaxText's step, compiled for a TPU that is not here, in the order of its `train_compile`.

    python benchmarks/peers/maxtext_ahead.py --text FILE [--source MAXTEXT/src] [OPTION=VALUE ...]

It writes the text of the program to FILE and prints `READY {...}`: the settings that MaxText made of
the options, and what the compiler says of memory. It runs in an environment with MaxText and
libtpu; `--source` names the tree that is imported in place of the installed package.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from enum import Enum
from pathlib import Path
from typing import Any

from compiled import built, memory_of

#: Settings that describe the model and the job.
SETTINGS = Path(__file__).with_name("maxtext_settings.txt").read_text().split()


def ahead(arguments: list[str]) -> tuple[Any, Any, dict[str, Any]]:
    """MaxText's configuration, its program, and facts: seconds, parameters, mesh, memory."""
    import jax
    from flax import nnx
    from flax.linen import logical_axis_rules
    from maxtext.configs import pyconfig
    from maxtext.trainers.pre_train import (
        train,
        train_compile,
    )
    from maxtext.utils import sharding, train_utils

    config = pyconfig.initialize(arguments)
    mesh = train_compile.get_topology_mesh(config)
    shaped, _, places, _, graph = train_compile.get_shaped_inputs(mesh, config)
    params, places = sharding.maybe_update_params_sharding_with_opt(config, places)
    first = sharding.build_zero1_input_state_mesh_shardings(config, places, params)
    split = sharding.get_input_data_sharding(config, mesh)
    step = train_utils.jit_train_step(
        config, graph, shaped[0], first, split, train.train_step, params, mesh=mesh
    )
    with jax.set_mesh(mesh), logical_axis_rules(config.logical_axis_rules):
        program, times = built(lambda: step.lower(*shaped))
    model = nnx.filter_state(shaped[0].model, nnx.Param)
    facts = {
        **times,
        "mesh": {axis: size for axis, size in mesh.shape.items() if size > 1},
        "devices": mesh.size,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(model)),
        **memory_of(program),
    }
    return config, program, facts


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--source", type=Path)
    parser.add_argument("options", nargs="*")
    options = parser.parse_args()
    os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")
    if options.source is not None:
        sys.path.insert(0, str(options.source))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # MaxText writes to standard output, too
    import jax
    from maxtext.configs import pyconfig
    from maxtext.utils import accelerator_to_spec_map

    base = Path(pyconfig.__file__).parent / "base.yml"
    fixed = {
        "run_name": "ahead",
        "base_output_directory": tempfile.mkdtemp(),
        "dataset_type": "synthetic",
        "enable_checkpointing": False,
        "skip_jax_distributed_system": True,
        "jax_cache_dir": "",
    }
    words = [f"{name}={value}" for name, value in fixed.items()]
    config, program, facts = ahead(["train_compile", str(base), *words, *options.options])
    machine = accelerator_to_spec_map.get_system_characteristics(config.compile_topology)
    settings = {name: _plain(getattr(config, name, None)) for name in SETTINGS}
    facts["settings"] = settings | {
        "topology": machine.topology_name,
        "global_batch": config.global_batch_size_to_train_on,
        "mesh": facts["mesh"],
    }
    try:
        options.text.write_text(program.as_text())
    except jax.errors.JaxRuntimeError as error:  # the runtime cannot print some programs of tpu7x
        facts["text_error"] = str(error)[:200]
    print("READY " + json.dumps(facts), file=out, flush=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    return value if isinstance(value, bool | int | float | str | list | type(None)) else str(value)


if __name__ == "__main__":
    main()
