"""Which tier is a test of? By the folder it is in, by its file, or by a marker of its own.

- `unit`: plain Python and tracing; nothing is compiled and no process is started, which
  `conftest.py` holds them to.
- `compile`: programs are compiled and run on simulated CPU devices of this process. Small processes
  of `shardlib.untrusted.confined`, which have no JAX, may be started in any tier.
- `processes`: other processes are started: launchers, workers of data and checkpoints, runs that
  are killed, compilers of other machines.
"""

from __future__ import annotations

TIERS = ("unit", "compile", "processes")

#: By the longest path that a file's path begins with, below `tests` or, for examples in docstrings,
#: below `shardlib`.
TESTS = {
    "annotation": "compile",
    "benchmarks": "compile",
    "benchmarks/test_fuzz_files.py": "unit",
    "benchmarks/test_mutations.py": "unit",
    "benchmarks/test_peers.py": "unit",
    "benchmarks/test_published_plans.py": "unit",
    "benchmarks/test_published_runs.py": "unit",
    "benchmarks/test_published_unseen.py": "unit",
    "checkpointing": "compile",
    "checkpointing/test_owner.py": "processes",
    "checkpointing/test_processes.py": "processes",
    "cli": "unit",
    "cli/test_measure.py": "processes",
    "cli/test_train.py": "processes",
    "cost": "unit",
    "data": "processes",
    "data/test_dataset.py": "unit",
    "decisions": "unit",
    "decisions/test_new_decision.py": "processes",
    "diagnosis": "processes",
    "docs": "compile",
    "docs/test_contributing.py": "unit",
    "docs/test_notebooks.py": "processes",
    "docs/test_site.py": "unit",
    "docs/test_snippets.py": "unit",
    "frameworks": "unit",
    "frontend": "compile",
    "frontend/test_proofs.py": "processes",
    "functions": "compile",
    "graph": "unit",
    "islands": "compile",
    "islands/federated/test_simulation.py": "processes",
    "islands/test_bytes_that_cross.py": "unit",
    "islands/test_first_use.py": "unit",
    "islands/test_plans.py": "unit",
    "islands/test_transfers.py": "unit",
    "islands/servers": "processes",
    "islands/servers/test_gate.py": "unit",
    "islands/servers/test_island.py": "compile",
    "islands/servers/test_links.py": "unit",
    "islands/servers/test_rounds.py": "unit",
    "islands/servers/test_schedule.py": "unit",
    "islands/servers/test_strangers.py": "unit",
    "islands/servers/test_worker.py": "compile",
    "launch": "processes",
    "launch/test_booking_compare.py": "unit",
    "launch/test_booking_fit.py": "unit",
    "launch/test_kubernetes.py": "unit",
    "launch/test_launching_docs.py": "unit",
    "launch/test_place.py": "unit",
    "launch/test_tpu_vm.py": "unit",
    "lowering": "compile",
    "lowering/plain/test_emitted.py": "processes",
    "lowering/test_sharding_tree.py": "processes",
    "machines": "unit",
    "machines/test_attached.py": "compile",
    "machines/test_local_machine.py": "processes",
    "models": "compile",
    "planner": "unit",
    "propagation": "unit",
    "replay": "compile",
    "report": "unit",
    "report/test_browser.py": "processes",
    "report/test_diagnostics.py": "compile",
    "report/test_perfetto.py": "processes",
    "report/test_screenshots.py": "processes",
    "schedules": "unit",
    "serve": "compile",
    "serve/http/test_folder.py": "processes",
    "serve/http/test_fuzz.py": "processes",
    "serve/http/test_process.py": "processes",
    "serve/http/test_templates.py": "processes",
    "serve/http/test_tools.py": "processes",
    "serve/test_edge_hosts.py": "processes",
    "serve/test_edge_plan.py": "unit",
    "serve/test_plan_search.py": "unit",
    "serve/test_schedule.py": "unit",
    "serve/test_serving_plan.py": "unit",
    "serve/test_triton_server.py": "processes",
    "serve/test_verified.py": "processes",
    "tracing": "compile",
    "training": "compile",
    "training/test_train_ends.py": "processes",
    "untrusted": "unit",
    "verification": "processes",
    "verification/test_order_by_compiler.py": "unit",
    "zoo": "compile",
    "test_architecture.py": "unit",
    "test_bad_input.py": "compile",
    "test_compact.py": "unit",
    "test_compiler.py": "compile",
    "test_house.py": "unit",
    "test_matrix_updates.py": "unit",
    "test_tiers.py": "unit",
    "test_wings.py": "processes",
}
EXAMPLES: dict[str, str] = dict.fromkeys(
    (
        "cost",
        "decisions",
        "errors.py",
        "findings.py",
        "frameworks",
        "graph.py",
        "islands",
        "layout.py",
        "machines",
        "planner",
        "propagation",
        "report",
        "schedules.py",
        "untrusted",
        "wings.py",
    ),
    "unit",
)


def tier_of(path: str) -> str | None:
    """The tier of a file by its path from the root of the repository; None where no table names
    it.
    """
    top, _, below = path.partition("/")
    if top == "shardlib":
        return EXAMPLES.get(below.partition("/")[0], "compile")
    names = [name for name in TESTS if below == name or below.startswith(f"{name}/")]
    return TESTS[max(names, key=len)] if top == "tests" and names else None
