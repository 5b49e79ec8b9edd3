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
    "booking": "unit",
    "checkpointing": "compile",
    "cli": "unit",
    "cost": "unit",
    "data": "processes",
    "decisions": "unit",
    "explanation": "compile",
    "federated": "compile",
    "federated/test_simulation.py": "processes",
    "functions": "compile",
    "graph": "unit",
    "hardware": "unit",
    "http": "compile",
    "http/test_folder.py": "processes",
    "http/test_fuzz.py": "processes",
    "http/test_process.py": "processes",
    "http/test_templates.py": "processes",
    "http/test_tools.py": "processes",
    "launching": "processes",
    "islands": "compile",
    "lowering": "compile",
    "lowering/plain/test_emitted.py": "processes",
    "lowering/test_sharding_tree.py": "processes",
    "models": "compile",
    "planning": "unit",
    "propagation": "unit",
    "remote": "processes",
    "remote/test_island.py": "compile",
    "remote/test_links.py": "unit",
    "remote/test_rounds.py": "unit",
    "replay": "compile",
    "schedules": "unit",
    "servers": "processes",
    "serving": "compile",
    "serving/test_edge_hosts.py": "processes",
    "serving/test_fairness.py": "unit",
    "serving/test_schedule.py": "unit",
    "serving/test_triton_server.py": "processes",
    "serving/test_verified.py": "processes",
    "servers/test_asynchronous.py": "unit",
    "servers/test_gate.py": "unit",
    "servers/test_loop.py": "unit",
    "servers/test_schedule.py": "unit",
    "servers/test_strangers.py": "unit",
    "servers/test_worker.py": "compile",
    "steps": "compile",
    "steps/test_proofs.py": "processes",
    "tracing": "compile",
    "training": "compile",
    "untrusted": "unit",
    "verification": "processes",
    "zoo": "compile",
    "test_accelerator.py": "compile",
    "test_hand_llama.py": "compile",
    "test_how_to.py": "compile",
    "checkpointing/test_owner.py": "processes",
    "checkpointing/test_processes.py": "processes",
    "cli/test_diff.py": "processes",
    "cli/test_train.py": "processes",
    "data/test_dataset.py": "unit",
    "data/test_packing.py": "unit",
    "decisions/test_new_decision.py": "processes",
    "explanation/test_curves.py": "unit",
    "planning/pictures/test_browser.py": "processes",
    "planning/pictures/test_perfetto.py": "processes",
    "planning/pictures/test_screenshots.py": "processes",
    "hardware/test_local_machine.py": "processes",
    "launching/test_kubernetes.py": "unit",
    "launching/test_launching_docs.py": "unit",
    "launching/test_place.py": "unit",
    "launching/test_tpu_vm.py": "unit",
    "training/test_supervisor.py": "processes",
    "training/test_train_ends.py": "processes",
    "training/test_watchdog.py": "processes",
    "verification/test_order_by_compiler.py": "unit",
    "test_architecture.py": "unit",
    "test_bad_input.py": "compile",
    "test_compact.py": "unit",
    "test_compiler.py": "compile",
    "test_contributing.py": "unit",
    "test_examples.py": "compile",
    "test_fuzz_files.py": "unit",
    "test_hand_sharded.py": "compile",
    "test_house.py": "unit",
    "test_notebooks.py": "processes",
    "test_own_layouts.py": "compile",
    "test_parity.py": "compile",
    "test_peers.py": "unit",
    "test_pages_run.py": "compile",
    "test_partial_training_docs.py": "compile",
    "test_published_plans.py": "unit",
    "test_published_runs.py": "unit",
    "test_published_unseen.py": "unit",
    "test_readme.py": "compile",
    "test_report.py": "compile",
    "test_site.py": "unit",
    "test_snippets.py": "unit",
    "test_tiers.py": "unit",
    "test_wings.py": "processes",
    "test_wrong_kinds.py": "compile",
}
EXAMPLES = dict.fromkeys(
    (
        "collective.py",
        "cost",
        "decisions",
        "errors.py",
        "findings.py",
        "graph.py",
        "islands",
        "layout.py",
        "machines",
        "planner",
        "propagation",
        "report",
        "rules.py",
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
