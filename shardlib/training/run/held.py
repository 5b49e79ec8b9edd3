"""The folder of a run in the hands of one job: its owner, and what is trained in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shardlib.annotation.trees.paths import Tree
from shardlib.checkpointing.owner import Owner, claim
from shardlib.data.batches.loader import Rows
from shardlib.errors import ModelError
from shardlib.lowering.program.program import Program
from shardlib.processes.together import first_decides
from shardlib.training.run.differences import Difference, unknown_names
from shardlib.training.run.folder import Opened, RunFolder
from shardlib.training.run.identity import traced
from shardlib.untrusted.json_types import JsonMapping


@dataclass(frozen=True, kw_only=True)
class Held:
    """A folder that this job may write to. The first of its processes owns it for all of them.

    Attributes:
        owner: in the first process; None in the others.
        trace: what is traced.
        changes: what is another than before, on purpose.
        texts: what there is to say about it.
    """

    owner: Owner | None
    trace: JsonMapping
    changes: tuple[Difference, ...] = ()
    texts: tuple[str, ...] = ()

    @staticmethod
    def of(
        folder: RunFolder,
        programs: Sequence[tuple[int, Program]],
        data: Rows | Callable[[int], Tree],
        seed: int,
        identity: JsonMapping,
        allow: Sequence[str],
        stack: contextlib.ExitStack,
        say: Callable[[str], None],
    ) -> Held:
        """Takes a folder into hand until the end of `stack`; to be called by all processes of the
        job. That it has to wait is said to `say`.
        """
        for wrong in unknown_names(allow, identity):
            raise ModelError(wrong)
        trace = traced(programs, data, seed)

        def take() -> tuple[Owner, Opened]:
            folder.check(identity, trace, allow)
            try:
                owner = claim(folder.checkpoints, what=str(folder.path), say=say)
            except OSError as error:
                raise folder.unwritable(error) from error
            stack.callback(owner.release)
            found = folder.open(identity, trace, allow)
            folder.write_plan(programs[0][1].plan.to_json())
            return owner, found

        taken = first_decides("folder of the run", take)
        if taken is None:
            return Held(owner=None, trace=trace)
        owner, found = taken
        texts = [
            f"a change on purpose, written down in {folder.manifest}: {one.text}"
            for one in found.changes
        ]
        untraceable = trace["loss"]["untraceable"]
        texts += (
            [
                "derivatives of the loss that are written by hand do not count for what this run"
                f" is: they cannot be traced by themselves ({untraceable})"
            ]
            if untraceable
            else []
        )
        texts += (
            [
                "what this run computes was not written down before; from now on it is what this"
                " process traces"
            ]
            if found.untraced
            else []
        )
        texts += (
            [
                f"an earlier start of the run in {folder.path} ended before its first"
                " whole checkpoint: it begins anew. Saving more often (save_every, --save-every)"
                " loses less"
            ]
            if found.known and not folder.saved()
            else []
        )
        return Held(owner=owner, trace=trace, changes=found.changes, texts=tuple(texts))
