"""Faults put into the core on purpose, one at a time, and whether the tests notice them.

    python benchmarks/mutations.py [--only NAME] [--changed]

Each row of `MUTATIONS` changes one piece of text in one file of a temporary copy of the tree and
runs the tests that are responsible for it there, up to the first failure. A mutation that the tests
pass is a gap in them: the script ends with 1 and names it. Results are kept, so that `--only` and
`--changed` (rows whose text has changed, or that have no result) run a part again.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.environment import RESULTS, command_line, write


@dataclass(frozen=True)
class Mutation:
    """A fault: in `file` of the package `before`, which stands there once, becomes `after`."""

    name: str
    file: str
    before: str
    after: str
    breaks: str
    tests: str


MUTATIONS = (
    Mutation(
        "bound too high",
        "planner/bounds.py",
        "return {kind: minimum + fixed for kind, minimum in kinds.items()}",
        "return {kind: 1.2 * minimum + fixed for kind, minimum in kinds.items()}",
        "a lower bound that is not one excludes the best plan",
        "tests/planner/test_bounds.py tests/planner/test_search.py",
    ),
    Mutation(
        "bound of a mixture",
        "planner/bounds.py",
        "(slow[improved] - quick[improved]) * share",
        "(slow[improved] - quick[improved])",
        "mixtures of remat policies are as slow as the slower of the two",
        "tests/planner/test_bounds.py tests/planner/test_search.py tests/planner/test_classes.py",
    ),
    Mutation(
        "capacity off by one",
        "planner/incumbents.py",
        "fits = peak <= self._capacity",
        "fits = peak < self._capacity",
        "a plan that fills the memory to the byte is refused",
        "tests/planner/test_search.py::test_memory_may_be_filled_to_the_byte",
    ),
    Mutation(
        "capacity not checked",
        "planner/incumbents.py",
        "fits = peak <= self._capacity",
        "fits = peak <= 2 * self._capacity",
        "plans that need twice the memory are returned",
        "tests/planner/test_search.py",
    ),
    Mutation(
        "pin ignored",
        "planner/space.py",
        "zeros = [zero for zero in self.limits.able.zero if pins.zero in (None, zero)]",
        "zeros = list(self.limits.able.zero)",
        "a pinned ZeRO stage restricts nothing",
        "tests/decisions/test_obeyed.py tests/planner/test_search.py",
    ),
    Mutation(
        "all-reduce at half price",
        "cost/collectives.py",
        "return 2 * gather",
        "return 1 * gather",
        "an all-reduce costs no more than an all-gather",
        "tests/cost/test_collectives.py",
    ),
    Mutation(
        "ring in one direction",
        "cost/collectives.py",
        "tier.reached_bytes_per_s * (2 if ring else 1) / stride",
        "tier.reached_bytes_per_s / stride",
        "rings of a torus use half of their links",
        "tests/cost/test_collectives.py",
    ),
    Mutation(
        "bytes without a factor",
        "cost/terms.py",
        "degree = degree * shapes.context if amount.context else degree",
        "degree = degree * 1",
        "activations that are sharded along the context are priced as a whole",
        "tests/cost/test_memory.py tests/planner/test_axes.py",
    ),
    Mutation(
        "bubble dropped",
        "cost/pricing.py",
        "return busy + np.where(stages > 1, knobs.accumulation * each, 0.0)",
        "return busy",
        "pipelines wait for nothing",
        "tests/cost/test_schedules.py tests/planner/test_axes.py",
    ),
    Mutation(
        "matmul rule swapped",
        "tracing/rules.py",
        "        *(left[i] for i in lhs_free),\n        *(right[j] for j in rhs_free),\n    )\n    flops",
        "        *(right[j] for j in rhs_free),\n        *(left[i] for i in lhs_free),\n    )\n    flops",
        "free dims of a product are taken for each other's",
        "tests/tracing/test_rules.py",
    ),
    Mutation(
        "sum over a batch dim",
        "tracing/rules.py",
        "left[i] = right[j] = factors.parallel(lhs[i])\n    for i, j in zip(lhs_contract, rhs_contract, strict=True):\n        left[i] = right[j] = factors.sum(lhs[i])\n    lhs_free = [i for i in range(len(lhs)) if i not in left]\n    rhs_free = [j for j in range(len(rhs)) if j not in right]\n    left.update({i: factors.parallel(lhs[i]) for i in lhs_free})",
        "left[i] = right[j] = factors.sum(lhs[i])\n    for i, j in zip(lhs_contract, rhs_contract, strict=True):\n        left[i] = right[j] = factors.sum(lhs[i])\n    lhs_free = [i for i in range(len(lhs)) if i not in left]\n    rhs_free = [j for j in range(len(rhs)) if j not in right]\n    left.update({i: factors.parallel(lhs[i]) for i in lhs_free})",
        "a sharded batch dim of a product is taken for partial sums",
        "tests/tracing/test_rules.py",
    ),
    Mutation(
        "colours never meet",
        "propagation/ties.py",
        "meets[name] |= axis_names",
        "meets[name] |= {name}",
        "two dims of one weight are tied to one colour",
        "tests/propagation",
    ),
    Mutation(
        "missing sum",
        "lowering/weights.py",
        "            return jax.lax.psum(partial, parts)\n        return jax.lax.psum(partial.transpose",
        "            return partial\n        return jax.lax.psum(partial.transpose",
        "partial sums of gradients stay on their devices",
        "tests/lowering/test_gradients.py tests/lowering/test_step.py",
    ),
    Mutation(
        "scattered along the wrong dim",
        "lowering/weights.py",
        "result = jax.lax.psum_scatter(partial, tuple(parts), scatter_dimension=dim, tiled=True)",
        "result = jax.lax.psum_scatter(partial, tuple(parts[::-1]), scatter_dimension=dim, tiled=True)",
        "shards of gradients land on each other's devices",
        "tests/lowering/test_gradients.py tests/lowering/test_step.py",
    ),
    Mutation(
        "gradients not averaged",
        "lowering/accumulation.py",
        "lambda total, leaf: (total / microbatches.count).astype(leaf.dtype), sums, params",
        "lambda total, leaf: total.astype(leaf.dtype), sums, params",
        "gradients are sums over microbatches",
        "tests/lowering/test_step.py tests/lowering/test_gradients.py",
    ),
    Mutation(
        "deferred gradients not averaged",
        "lowering/accumulation.py",
        "(_cut(total, cut) / microbatches.count).astype(leaf.dtype)",
        "_cut(total, cut).astype(leaf.dtype)",
        "gradients that are reduced once are sums over microbatches",
        "tests/lowering/test_once.py tests/lowering/test_gradients.py",
    ),
    Mutation(
        "wrong positions of a context shard",
        "lowering/context/sequence_partition.py",
        "return (device, 2 * self.ways - 1 - device) if self.zigzag else (device,)",
        "return (device, 2 * self.ways - 2 - device) if self.zigzag else (device,)",
        "rotary embeddings and masks of a shard are those of other tokens",
        "tests/lowering/test_context.py tests/lowering/test_context_kernels.py",
    ),
    Mutation(
        "ring passes nothing on",
        "lowering/context/sequence_partition.py",
        "[(i, (i + far) % self.ways) for i in range(self.ways)]",
        "[(i, i) for i in range(self.ways)]",
        "queries see the keys of their own device again and again",
        "tests/lowering/test_context.py tests/lowering/test_context_kernels.py",
    ),
    Mutation(
        "one key for all microbatches",
        "lowering/random_keys.py",
        "jnp.arange(parts, dtype=jnp.uint32)",
        "jnp.zeros(parts, dtype=jnp.uint32)",
        "every microbatch draws the same dropout mask",
        "tests/lowering/test_random_keys.py::test_every_microbatch_has_a_key_of_its_own",
    ),
    Mutation(
        "hop the wrong way",
        "lowering/pipeline/stage.py",
        "[(i, (i + direction) % count) for i in range(count)]",
        "[(i, (i - direction) % count) for i in range(count)]",
        "activations go to the stage before",
        "tests/lowering/test_pipeline.py",
    ),
    Mutation(
        "norm of replicas",
        "lowering/step.py",
        "* (_ways(sharding) / mesh.size)",
        "* 1.0",
        "the norm for clipping counts replicas",
        "tests/lowering/test_guards.py tests/lowering/test_step.py",
    ),
    Mutation(
        "state not kept",
        "lowering/step.py",
        "opt_state=offloaded(chosen(opt_state, before), parts.opt_state, HOST),",
        "opt_state=offloaded(opt_state, parts.opt_state, HOST),",
        "a step that is skipped changes the optimizer's state",
        "tests/lowering/test_guards.py",
    ),
    Mutation(
        "checksum not compared",
        "checkpointing/store.py",
        '        same = isinstance(data, Mapping) and digest(data.get("content")) == data.get("digest")',
        "        same = isinstance(data, Mapping)",
        "a changed description of a checkpoint is believed",
        "tests/checkpointing/test_store.py -k damage_is_said",
    ),
    Mutation(
        "shard swapped",
        "checkpointing/huggingface.py",
        "start, stop = ranges.get(letter, (0, 1))",
        "start, stop = ranges.get(letter, (0, 1))\n            start, stop = (0, stop - start) if start else (start, stop)",
        "every device reads the first shard of a tensor",
        "tests/checkpointing/test_huggingface.py",
    ),
    Mutation(
        "dtype of the checkpoint",
        "checkpointing/tree.py",
        "if array.dtype == leaf.dtype:\n        return array",
        "if array.dtype != leaf.dtype:\n        return array",
        "arrays keep the dtype that they were stored in",
        "tests/checkpointing/test_store.py tests/checkpointing/test_plans.py",
    ),
    Mutation(
        "row twice",
        "data/batches.py",
        "return epochs * self.count + indices",
        "return epochs * self.count + np.maximum(indices, 1)",
        "one example of an epoch comes twice, and one never",
        "tests/data/test_dataset.py",
    ),
    Mutation(
        "same order in every epoch",
        "data/batches.py",
        'return tuple(_begin(f"{seed} {epoch} {number}") for number in range(_ROUNDS))',
        'return tuple(_begin(f"{seed} {number}") for number in range(_ROUNDS))',
        "long epochs repeat their order",
        "tests/data/test_dataset.py -k orders",
    ),
    Mutation(
        "targets not shifted",
        "data/batches.py",
        'row["inputs"][:], row["targets"][:] = tokens[:-1], tokens[1:]',
        'row["inputs"][:], row["targets"][:] = tokens[:-1], tokens[:-1]',
        "a model is trained to repeat its input",
        "tests/data/test_dataset.py",
    ),
    Mutation(
        "collectives counted once",
        "verification/traffic.py",
        "tuple(replace(item, count=item.count * times) for item in self.found)",
        "self.found",
        "a collective in a loop counts as one",
        "tests/verification/test_hlo.py",
    ),
    Mutation(
        "out of memory not reported",
        "verification/report.py",
        'if peak > usable and topology.chip.vendor != "cpu":',
        'if peak > 2 * usable and topology.chip.vendor != "cpu":',
        "a program that does not fit is verified",
        "tests/verification/test_verify.py -k suffice",
    ),
    Mutation(
        "growth not noticed",
        "verification/report.py",
        "if size > was or count > was_count:",
        "if size > was and count > was_count:",
        "more executions of as many bytes pass as no growth",
        "tests/verification/test_verify.py -k baseline",
    ),
    Mutation(
        "backward before forward",
        "schedules.py",
        "tuple(alternating(forward, backward, stages - s - 1) for s in range(stages))",
        "tuple(alternating(forward, backward, stages - s) for s in range(stages))",
        "stages of 1F1B keep one microbatch more than promised",
        "tests/schedules",
    ),
)


def copied(folder: Path) -> Path:
    """The tree in a folder, without its history."""
    tree = folder / "tree"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build")
    shutil.copytree(ROOT, tree, ignore=ignored)
    return tree


def tested(tree: Path, mutation: Mutation, seconds: float) -> dict[str, Any]:
    """What the responsible tests say of a mutation."""
    path = tree / "shardlib" / mutation.file
    text = path.read_text()
    if text.count(mutation.before) != 1:
        raise SystemExit(
            f"{mutation.name}: {mutation.before!r} stands {text.count(mutation.before)} times in"
            f" {mutation.file}; it has to stand there once"
        )
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    start = time.monotonic()
    try:
        path.write_text(text.replace(mutation.before, mutation.after))
        done = subprocess.run(
            [*command, "--draw", "mutations", *mutation.tests.split()],
            cwd=tree,
            env={**os.environ, "PYTHONPATH": str(tree)},
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        status, output = done.returncode, done.stdout
    except subprocess.TimeoutExpired:
        status, output = 0, ""
    finally:
        path.write_text(text)
    if status not in (0, 1):
        raise RuntimeError(f"{mutation.name}: pytest ended with {status}: {output[-2000:]}")
    failure = re.search(r"^(?:FAILED|ERROR) (.*?)(?: - |$)", output, re.MULTILINE)
    if status and (failure is None or "::" not in failure[1]):
        raise RuntimeError(f"{mutation.name}: the tests do not run: {output[-2000:]}")
    return {
        **asdict(mutation),
        "caught": status == 1,
        "by": failure[1] if failure else "",
        "seconds": round(time.monotonic() - start, 1),
    }


def main() -> int:
    """Tries mutations, keeps what came of them, and returns 1 where tests pass one."""
    parser = command_line(__doc__)
    parser.add_argument("--only", action="append", help="mutations to try; all when left out")
    parser.add_argument("--changed", action="store_true", help="those without a result")
    parser.add_argument("--seconds", type=float, default=550.0, help="for the tests of a mutation")
    parser.add_argument("--out", type=Path, default=RESULTS / "mutations.json")
    options = parser.parse_args()
    stored = json.loads(options.out.read_text())["mutations"] if options.out.exists() else []
    results = {row["name"]: row for row in stored}
    with tempfile.TemporaryDirectory() as folder:
        tree = copied(Path(folder))
        for mutation in MUTATIONS:
            before = results.get(mutation.name, {})
            if (options.only and mutation.name not in options.only) or (
                options.changed and asdict(mutation).items() <= before.items()
            ):
                continue
            row = results[mutation.name] = tested(tree, mutation, options.seconds)
            print(f"{'caught' if row['caught'] else 'PASSED'}  {mutation.name}  {row['by']}")
    rows = [results[mutation.name] for mutation in MUTATIONS if mutation.name in results]
    write(options.out, {"benchmark": "mutations", "mutations": rows}, quiet=True)
    return int(not all(row["caught"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
