"""What a run is to do, and what all of its processes must mean alike.

A run may have several programs, one after the other, for batches that grow:

    task.at(0)      # the program of the first step
    task.at(900)    # the one that has taken over before step 900
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax

from shardlib.annotation.trees.paths import path_text
from shardlib.data.batches.loader import Rows
from shardlib.errors import LayoutError, raise_all
from shardlib.lowering.program.program import Program
from shardlib.training.settings import Settings
from shardlib.training.stepping.batches import BatchOf
from shardlib.untrusted.json_types import JsonMapping


@dataclass(frozen=True, kw_only=True, eq=False)
class Task:
    """What a run is to do.

    Attributes:
        programs: (steps before it, program), each of any kind (`states.programs`), the first from
            step 0; states are laid out alike in all.
        data: a dataset, or a function of the step.
        steps: in all.
        seed: of the first state.
        settings: how the run is kept, watched and judged.
        identity: what is trained, in the user's words.
        advice: what to try when the loss is no longer finite.

    Raises:
        LayoutError: a program that takes over lays states out otherwise.
    """

    programs: tuple[tuple[int, Program], ...]
    data: Rows | BatchOf
    steps: int
    seed: int
    settings: Settings
    identity: JsonMapping
    advice: str

    def __post_init__(self) -> None:
        _check_alike(self.programs)

    @property
    def program(self) -> Program:
        """The first program."""
        return self.programs[0][1]

    def at(self, step: int) -> Program:
        """The program that does the step after so many."""
        return [program for before, program in self.programs if before <= max(step, 0)][-1]

    @property
    def words(self) -> JsonMapping:
        """What is trained, and under which plan, as plain data."""
        plan = self.program.plan
        return {
            **self.identity,
            "model": plan.model,
            "mesh": str(plan.mesh),
            "topology": plan.topology,
            "plan": plan.digest,
            "steps": self.steps,
            "seed": self.seed,
        }

    def meant(self, trace: JsonMapping | None) -> dict[str, str]:
        """What a process is about to do, as far as all processes must do the same.

        Args:
            trace: what is traced (`shardlib.training.run.identity.traced`); None where the run has
                no folder.
        """
        arrays = jax.tree_util.tree_leaves_with_path(
            tuple(program.rows for _, program in self.programs)
        )
        return {
            "plan": " ".join(program.plan.digest for _, program in self.programs),
            "steps": str(self.steps),
            "seed": str(self.seed),
            "data": str(getattr(self.data, "digest", "of a function")),
            **{name: str(value.get("digest", value)) for name, value in (trace or {}).items()},
            "batch": ", ".join(
                f"{path_text(path[1:]) or 'batch'} {leaf.dtype}{list(leaf.shape)}"
                for path, leaf in arrays
            ),
            "saving": self._saving(),
            "policy": str(self.settings.policy),
        }

    def _saving(self) -> str:
        """When checkpoints are saved, in words."""
        settings = self.settings
        if settings.run is None:
            return "nothing"
        late = f" or {settings.save_seconds:g} s" if settings.save_seconds is not None else ""
        return f"every {settings.save_every} steps{late}"


def _check_alike(programs: Sequence[tuple[int, Program]]) -> None:
    """Raises where programs that follow one another cannot hand over a state."""
    wanted = jax.tree_util.tree_leaves_with_path(programs[0][1].state)
    failures = (
        []
        if [before for before, _ in programs] == sorted({before for before, _ in programs})
        else ["their first steps do not rise"]
    )
    for before, program in programs[1:]:
        found = jax.tree.leaves(program.state)
        if len(found) != len(wanted):
            failures.append(f"the one after step {before} has another state")
            continue
        different = [
            path_text(path)
            for (path, one), other in zip(wanted, found, strict=True)
            if (one.shape, one.dtype) != (other.shape, other.dtype)
            or not one.sharding.is_equivalent_to(other.sharding, one.ndim)
        ]
        if different:
            more = f" and {len(different) - 4} more" if len(different) > 4 else ""
            failures.append(
                f"the one after step {before} lays out {', '.join(different[:4])}{more} otherwise"
            )
    if failures:
        raise_all(
            LayoutError,
            "programs cannot take over from one another",
            failures,
            hint="pin mesh, rules and zero of the later plans to those of the first",
        )
