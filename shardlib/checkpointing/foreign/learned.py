"""Names of tensors for the parameters of any model, learned from shapes and paths.

Paths that differ by numbers alone are one template, `layers.#.mlp.up.kernel`; templates fit where
their shapes do and they come as often, or where one array holds what comes so often, stacked. Of
those that fit, the assignment with the most words in common is taken. What a second assignment fits
nearly as well is unsure, and is not used before somebody has said it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from scipy.optimize import linear_sum_assignment

from shardlib.annotation.trees.paths import Tree, path_text
from shardlib.checkpointing.foreign.forms import Shape, forms_of
from shardlib.checkpointing.foreign.words import likeness, words
from shardlib.errors import CheckpointError, raise_all

#: A word in common less, and an assignment counts as nearly as good.
NEAR = 0.02
#: Numbers between dots, of layers and the like.
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")
#: Words of arrays that no library transposes.
_TABLES = ("embed", "position")


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where a parameter is in the files.

    Attributes:
        names: of the tensors; several are stacked along the first dim.
        stacked: whether they are.
        form: of each, see `shardlib.checkpointing.foreign.forms`.
    """

    names: tuple[str, ...]
    stacked: bool
    form: str


@dataclass(frozen=True, kw_only=True)
class LearnedNames:
    """Names of tensors by the paths of parameters.

    Attributes:
        sources: where each parameter is, by dotted path.
        unsure: templates of parameters, with those of tensors that fit nearly as well.
        missing: parameters for which no tensor fits.
        left: tensors that no parameter takes.
    """

    sources: Mapping[str, Source]
    unsure: Mapping[str, tuple[str, ...]]
    missing: tuple[str, ...]
    left: tuple[str, ...]

    def __str__(self) -> str:
        lines: dict[str, None] = {}
        for path, source in self.sources.items():
            many = f", {len(source.names)} stacked" if source.stacked else ""
            template, name = _template(path), _template(source.names[0])
            lines[f"{template} <- {name} ({source.form}{many})"] = None
        lines |= {
            f"unsure: {one}, also {', '.join(others)}": None for one, others in self.unsure.items()
        }
        lines |= {f"missing: {one}": None for one in self.missing}
        lines |= {f"left: {one}": None for one in dict.fromkeys(map(_template, self.left))}
        return "\n".join(lines)

    def require(self) -> None:
        """Makes sure that every parameter has its tensor, and only one that fits."""
        failures = [f"{path}: no tensor fits" for path in self.missing] + [
            f"{one}: {', '.join(others)} fit as well" for one, others in self.unsure.items()
        ]
        if failures:
            raise_all(
                CheckpointError,
                "the names of tensors are not known",
                failures,
                hint=(
                    'learn_names(..., given={"layers.#.up.kernel": "layers.#.fc.weight"}), or'
                    " transposed=True for square matrices of torch.nn.Linear"
                ),
            )


def learn_names(
    params: Tree,
    tensors: Mapping[str, Shape],
    *,
    given: Mapping[str, str] | None = None,
    transposed: bool | None = None,
) -> LearnedNames:
    """Finds the tensors of the parameters of a model.

    Args:
        transposed: whether square matrices are; by default as all those are whose shapes say it.
    """
    leaves = jax.tree_util.tree_leaves_with_path(params)
    wanted = _grouped({path_text(path): tuple(leaf.shape) for path, leaf in leaves})
    there = _grouped({name: tuple(shape) for name, shape in tensors.items()})
    rows, columns = [*wanted], [*there]
    table = np.full((len(rows), len(columns)), -1.0)
    for at, one in enumerate(rows):
        for to, other in enumerate(columns):
            if _forms(wanted[one], there[other])[0]:
                known = (given or {}).get(one)
                exact = 2.0 if known == other else likeness(words(one), words(other))
                table[at, to] = -1.0 if known is not None and known != other else exact
    pairs = [
        (at, to)
        for at, to in zip(*linear_sum_assignment(table, maximize=True), strict=True)
        if table[at, to] >= 0
    ]
    forms = {rows[at]: _forms(wanted[rows[at]], there[columns[to]]) for at, to in pairs}
    tables = {rows[at] for at, to in pairs if _is_table(rows[at]) or _is_table(columns[to])}
    matrices = {
        rows[at] for at, to in pairs if {len(one) for one in there[columns[to]].values()} == {2}
    } - tables
    said = None if transposed is None else {"transposed" if transposed else "same"}
    usual = said or _usual(forms, matrices)
    sources = {
        path: source
        for at, to in pairs
        for path, source in _sources(
            wanted[rows[at]],
            there[columns[to]],
            _chosen(forms[rows[at]][0], {"same"} if rows[at] in tables else usual),
            stacked=forms[rows[at]][1],
        ).items()
    }
    square = {
        one: ("its transpose",)
        for one, (found, _) in forms.items()
        if len(found) > 1 and len(usual) != 1 and one not in tables
    }
    found = {rows[at] for at, _ in pairs}
    taken = {name for source in sources.values() for name in source.names}
    return LearnedNames(
        sources=sources,
        unsure={**square, **_unsure(table, pairs, rows, columns)},
        missing=tuple(path for one in rows if one not in found for path in wanted[one]),
        left=tuple(name for name in tensors if name not in taken),
    )


def _grouped(shapes: Mapping[str, Shape]) -> dict[str, dict[str, Shape]]:
    """Shapes by path, by template; in the order of the numbers."""
    found: dict[str, dict[str, Shape]] = {}
    for path, shape in shapes.items():
        found.setdefault(_template(path), {})[path] = shape
    return {
        template: dict(sorted(one.items(), key=lambda item: _numbers(item[0])))
        for template, one in found.items()
    }


def _template(path: str) -> str:
    return _NUMBER.sub("#", path)


def _numbers(path: str) -> tuple[int, ...]:
    return tuple(map(int, _NUMBER.findall(path)))


def _forms(
    params: Mapping[str, Shape], tensors: Mapping[str, Shape]
) -> tuple[tuple[str, ...], bool]:
    """(forms in which tensors may hold parameters, whether they are stacked)."""
    shapes, theirs = set(params.values()), set(tensors.values())
    if len(shapes) != 1 or len(theirs) != 1:
        return (), False
    (shape,), (other,) = shapes, theirs
    if len(params) == len(tensors):
        return forms_of(shape, other), False
    if len(params) == 1 and shape and shape[0] == len(tensors):
        return forms_of(shape[1:], other), True
    return (), False


def _is_table(template: str) -> bool:
    return any(word in words(template) for word in _TABLES)


def _usual(forms: Mapping[str, tuple[tuple[str, ...], bool]], matrices: set[str]) -> set[str]:
    """How those matrices lie whose shapes say it; where that is one form, square ones can be
    trusted to lie so, too.
    """
    return {found[0] for one, (found, _) in forms.items() if one in matrices and len(found) == 1}


def _chosen(forms: tuple[str, ...], usual: set[str]) -> str:
    """The form of a template; of square matrices that nothing says anything about, any."""
    return forms[0] if len(forms) == 1 else next(iter(usual), forms[0])


def _sources(
    params: Mapping[str, Shape], tensors: Mapping[str, Shape], form: str, *, stacked: bool
) -> dict[str, Source]:
    if stacked:
        (path,) = params
        return {path: Source(names=tuple(tensors), stacked=True, form=form)}
    return {
        path: Source(names=(name,), stacked=False, form=form)
        for path, name in zip(params, tensors, strict=True)
    }


def _unsure(
    table: np.ndarray, pairs: list[tuple[Any, Any]], rows: list[str], columns: list[str]
) -> dict[str, tuple[str, ...]]:
    """Pairs that could be exchanged with hardly a word less in common."""
    found: dict[str, list[str]] = {}
    owner = {to: at for at, to in pairs}
    for at, to in pairs:
        for other in range(len(columns)):
            if other == to or table[at, other] < 0 or table[at, to] >= 2:
                continue
            loss = table[at, to] - table[at, other]
            if other in owner:
                back = table[owner[other], to]
                loss = np.inf if back < 0 else loss + table[owner[other], other] - back
            if loss <= NEAR:
                found.setdefault(rows[at], []).append(columns[other])
    return {one: tuple(others) for one, others in found.items()}
