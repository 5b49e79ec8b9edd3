"""Checkpoints of training states in a folder: written while training goes on, whole or not at all,
restored under any plan.

    checkpoints = Checkpoints("runs/one", keep=Keep(newest=3, best="loss", every_seconds=3600))
    checkpoints.save(step, state, plan=program.plan, extra={"position": 1200})  # goes on at once
    ...
    # Of this plan or another one, on this mesh or another one:
    restored = checkpoints.restore(program)

Orbax writes and reads the arrays. What is added here: a copy of the state that the next step cannot
overwrite (`snapshot.py`), sums that find a flipped bit on any mesh (`sums.py`), and what to do when
something is wrong: nothing is overwritten, and the last good checkpoint is used.
"""

from __future__ import annotations

import operator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace

from etils import epath

from shardlib.checkpointing import about as description
from shardlib.checkpointing.about import About, DamagedError
from shardlib.checkpointing.folder import Folder
from shardlib.checkpointing.islands.form import AnyProgram, State, form_of
from shardlib.checkpointing.keep import Keep
from shardlib.checkpointing.owner import Owner
from shardlib.checkpointing.restoring import (
    Restored,
    missing,
    none_good,
    read_checkpoint,
    set_aside,
)
from shardlib.checkpointing.snapshot import Camera, Snapshot
from shardlib.checkpointing.tree import (
    check_target,
    named_leaves,
    raw_abstract,
    raw_arrays,
    spec_of,
)
from shardlib.checkpointing.writing import delete_superfluous, write_checkpoint
from shardlib.errors import CheckpointError
from shardlib.frontend.steps.step_program import StepProgram
from shardlib.lowering.host_memory.disk.arrays import DiskArray
from shardlib.lowering.program.program import Program
from shardlib.planning.plan import Plan
from shardlib.processes import together as processes
from shardlib.untrusted.json_types import JsonMapping


class Checkpoints:
    """The checkpoints of one run.

    Every process of a run makes one and calls the same methods at the same steps. Methods may be
    called from one thread.

    Args:
        folder: where they are, seen by all processes; made where it is not there.
        keep: which of them stay.
        snapshot: where the copy that is being written is kept: "host" (pinned memory), "device", or
            "auto" for the host where it has memory of its own.
        read_only: for restoring alone: nothing is made, renamed or deleted in the folder.
        owner: the right to write to the folder, where somebody has got it already; by default it is
            claimed here, and given back by `close`.

    Raises:
        CheckpointError: the folder cannot be written, or is that of a run.
        OwnedError: another process writes to it.
    """

    def __init__(
        self,
        folder: str | epath.PathLike,
        keep: Keep | None = None,
        *,
        snapshot: str = "auto",
        read_only: bool = False,
        owner: Owner | None = None,
    ) -> None:
        self.keep = keep or Keep()
        self.read_only = read_only
        self._folder = Folder(
            path=epath.Path(folder).absolute() if "://" not in str(folder) else epath.Path(folder)
        )
        self._folder.refuse_run()
        self._camera = Camera(place=snapshot)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._under_way: Future[None] | None = None
        self._lent, self._owner = owner is not None, owner
        if not read_only:
            processes.first_decides("folder of checkpoints", self._open)

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def _open(self) -> None:
        """Makes this process the owner of the folder, and clears away what interrupted saves have
        left; in the first process.
        """
        self._owner = self._owner or self._folder.claimed()
        try:
            self._folder.prepare()
        except CheckpointError:
            if self._owner is not None and not self._lent:
                self._owner.release()
            raise

    def prepare(self, target: State | AnyProgram | StepProgram) -> None:
        """Compiles what `save` runs on the devices for a program, or for a state, concrete or
        abstract with shardings, so that the first save need not.
        """
        state = target.state if isinstance(target, AnyProgram | StepProgram) else target
        stored = target.stored if isinstance(target, Program) else frozenset[str]()
        self._camera.prepare(
            {
                path: raw_abstract(leaf)
                for path, leaf in named_leaves(form_of(state)).items()
                if path not in stored and not isinstance(leaf, DiskArray)
            }
        )

    def save(
        self,
        step: int,
        state: State,
        *,
        plan: Plan | None,
        extra: JsonMapping | None = None,
        metrics: JsonMapping | None = None,
        wait: bool = False,
    ) -> None:
        """Saves a state.

        Returns when copies of the arrays are queued; the state may be donated then. Writing goes on
        in a thread. Waits only for a save before this one that is still being written.
        """
        if self.read_only:
            raise CheckpointError(
                f"the checkpoints in {self._folder.path} are open for reading alone\nTry:"
                " Checkpoints(folder) without read_only"
            )
        self.wait()
        self._require()
        step = operator.index(step)
        if processes.is_first() and (taken := self._folder.taken(step)):
            raise CheckpointError(taken)
        plain = description.checked_extra(extra or {})
        named = named_leaves(form_of(state))
        snapshot = self._camera.take(raw_arrays(named))

        def write() -> None:
            specs = {
                path: spec_of(leaf) for path, leaf in named.items()
            }  # the next step deletes the arrays, not their shapes
            try:
                self._write(
                    step,
                    snapshot,
                    description.described(
                        step, snapshot.sums(), specs, plan, plain, dict(metrics or {})
                    ),
                )
            finally:
                snapshot.delete()

        self._under_way = self._writer.submit(write)
        if wait:
            self.wait()

    def steps(self) -> tuple[int, ...]:
        """Steps of the checkpoints that are whole, the oldest first."""
        return self._folder.steps()

    def wait(self) -> None:
        """Waits for the save that is under way."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.result()

    def close(self) -> None:
        """Waits for the save that is under way, ends the thread and gives the folder back."""
        try:
            self.wait()
        finally:
            self._writer.shutdown()
            if self._owner is not None and not self._lent:
                self._owner.release()

    def restore(
        self,
        target: State | AnyProgram | StepProgram,
        step: int | None = None,
        *,
        parameters_only: bool = False,
    ) -> Restored:
        """Restores a checkpoint straight to where its arrays are to live.

        Args:
            step: which; by default the newest one that is good. Damaged ones that are newer are
                renamed, once a good one is restored, and said.
        """
        self.wait()
        target = target.state if isinstance(target, StepProgram) else target
        check_target(target.state if isinstance(target, AnyProgram) else target)
        if parameters_only and not isinstance(target, AnyProgram):
            raise CheckpointError(
                "parameters_only=True makes a new state of the optimizer, and the target does not"
                " say which\nTry: restore(program, parameters_only=True)"
            )
        candidates = processes.steps_of_first(self.steps())
        if not candidates or (step is not None and step not in candidates):
            raise missing(self._folder, step, candidates)
        damaged: dict[int, str] = {}
        for candidate in reversed(candidates) if step is None else (step,):
            try:
                restored = read_checkpoint(
                    self._folder, candidate, target, self._camera, parameters_only=parameters_only
                )
            except DamagedError as error:
                damaged[candidate] = str(error)
            else:
                found = set_aside(self._folder, damaged, read_only=self.read_only)
                return replace(restored, findings=(*found, *restored.findings))
        raise none_good(self._folder, damaged, candidates)

    def _write(self, step: int, snapshot: Snapshot, about: About) -> None:
        """Writes a checkpoint and deletes those that nothing keeps; runs in the thread."""
        self._require()
        write_checkpoint(self._folder, step, snapshot, about)
        if processes.is_first():
            delete_superfluous(self._folder, self.keep, step)

    def _require(self) -> None:
        """Makes sure that the folder is this job's, and that it was not closed."""
        if self._owner is None:
            return
        if not self._owner.held:
            raise CheckpointError(
                f"the checkpoints in {self._folder.path} are closed\nTry: open them again"
            )
        self._owner.require()
