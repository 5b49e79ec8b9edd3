"""Lines of the user's program that operations come from, and what the values there are called.

JAX gives every operation its name ("jit(step)/transpose(jvp(...))/dot_general") and the frames of
Python that called it; compilers keep both, in tables of their own.

>>> operation_name("jit(step)/transpose(jvp(layer))/while/body/closed_call/dot_general")
Operation(primitive='dot_general', backward=True, recomputed=False)
>>> path("jit(call)/call_exported/jit(f)/add")
'jit(f)/add'
"""

from __future__ import annotations

import ast
import linecache
import re
import sysconfig
import traceback
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple

from shardlib.untrusted.data import JsonMapping

#: Packages whose lines are not the user's.
LIBRARIES = (
    *("jax", "jaxlib", "flax", "optax", "numpy", "chex", "equinox", "haiku", "einops", "haliax"),
    *("jaxtyping", "orbax", "ml_dtypes", "penzai", "qwix", "shardlib"),
)
_STANDARD = sysconfig.get_paths()["stdlib"]
#: Roots of this package, of which the models are programs like a user's.
_OWN = str(Path(__file__).parents[1])
#: Files that call the user's function: what called them is not in the program.
_CALLERS = tuple(str(Path(__file__).with_name(name)) for name in ("program.py", "child.py"))


class Operation(NamedTuple):
    """What the name of an operation says.

    Attributes:
        primitive: of JAX, "dot_general".
        backward: whether it belongs to a backward pass.
        recomputed: whether rematerialisation runs it again.
    """

    primitive: str
    backward: bool
    recomputed: bool


def operation_name(name: str) -> Operation:
    """Reads the name of an operation; of one that several were fused into, the first."""
    name = name.partition(";")[0]
    return Operation(
        primitive=name.rpartition("/")[2].rstrip(":"),
        backward="transpose(" in name,
        recomputed="rematted_computation" in name,
    )


def path(name: str) -> str:
    """The name of an operation without what a compilation in a process of its own adds to it."""
    return re.sub(r"^(jit\(\w+\)/)?call_exported(/|$)", "", name)


@dataclass(frozen=True, order=True)
class Frame:
    """A place in a file of Python.

    Attributes:
        line, column: where the expression starts; columns count from 0.
        last_line, last_column: where it ends; 0 where that is not known.
    """

    file: str
    line: int
    column: int = 0
    last_line: int = 0
    last_column: int = 0
    function: str = ""

    @property
    def place(self) -> str:
        """ "model.py:41", as messages have it."""
        return f"{_short(self.file)}:{self.line}"

    @property
    def key(self) -> tuple[str, int, int]:
        """Equal for the same expression."""
        return self.file, self.line, self.column


def _short(file: str) -> str:
    """A path from the current folder, where the file is in it; "cell" for that of a notebook."""
    try:
        return "cell" if "/ipykernel_" in file else str(Path(file).relative_to(Path.cwd()))
    except ValueError:
        return file


@lru_cache(maxsize=4096)
def is_users(file: str) -> bool:
    """Whether a file is the user's: not of Python, JAX, or what builds on it."""
    if file.startswith(_OWN):
        return file.startswith(f"{_OWN}/models")
    if file.startswith("<frozen") or not file:
        return False
    parts = Path(file).parts
    if "site-packages" in parts or "dist-packages" in parts:
        folder = next(p for p in ("site-packages", "dist-packages") if p in parts)
        following = parts[parts.index(folder) + 1 :]
        return bool(following) and following[0] not in LIBRARIES
    return not file.startswith(_STANDARD)


def user_frame(frames: Iterable[Frame]) -> Frame | None:
    """The innermost frame of the user's."""
    return next((frame for frame in frames if is_users(frame.file)), None)


def _of_program(frames: Iterable[Frame]) -> tuple[Frame, ...]:
    """Frames without those that called the user's function, the innermost first."""
    return tuple(takewhile(lambda frame: frame.file not in _CALLERS, frames))


@dataclass(frozen=True, kw_only=True)
class Source:
    """Where an operation of a program comes from.

    Attributes:
        name: of the operation, as JAX has it.
        frames: the innermost first.
    """

    name: str
    frames: tuple[Frame, ...]

    @property
    def user(self) -> Frame | None:
        """The user's line."""
        return user_frame(self.frames)

    @property
    def operation(self) -> Operation:
        """What the name says."""
        return operation_name(self.name)

    @property
    def key(self) -> tuple[str, tuple[str, int, int]] | None:
        """(primitive, expression); equal for the same operation of the user's program."""
        frame = self.user or (self.frames[0] if self.frames else None)
        return None if frame is None else (self.operation.primitive, frame.key)


NOWHERE = Source(name="", frames=())


def read_source(location: JsonMapping | None) -> Source:
    """The source of an operation that `shardings.read_location` described."""
    if not location:
        return NOWHERE
    frames = tuple(
        Frame(file, line, column, last, end, function)
        for file, line, column, last, end, function in location["frames"]
    )
    return Source(name=path(str(location["op"])), frames=_of_program(frames))


# --------------------------------------------------------------------------------------------------
# Frames of compiled programs.

_SECTION = re.compile(r"^(FileNames|FunctionNames|FileLocations|StackFrames)\s*$")
_QUOTED = re.compile(r'^(\d+) "((?:[^"\\]|\\.)*)"')
_FIELDS = re.compile(r"(\w+)=(\d+)")
_LINE = re.compile(r'source_file="((?:[^"\\]|\\.)*)"(?:\s+source_line=(\d+))?')


class FrameTable:
    """The frames of a compiled program, by the number that its instructions name.

    Args:
        text: the text of the program.
    """

    def __init__(self, text: str) -> None:
        sections: dict[str, dict[int, Any]] = {}
        section: dict[int, Any] | None = None
        for line in text.splitlines():
            if match := _SECTION.match(line):
                section = sections.setdefault(match[1], {})
            elif section is not None and (match := _QUOTED.match(line)):
                section[int(match[1])] = match[2]
            elif section is not None and (match := re.match(r"^(\d+) \{(.*)\}$", line)):
                section[int(match[1])] = {k: int(v) for k, v in _FIELDS.findall(match[2])}
            elif line.strip():
                section = None
                if sections and "StackFrames" in sections:
                    break
        self._files = sections.get("FileNames", {})
        self._functions = sections.get("FunctionNames", {})
        self._locations = sections.get("FileLocations", {})
        self._stack = sections.get("StackFrames", {})
        # some versions write the number of a parent plus 1: there what has no parent names itself
        own = any(entry.get("parent_frame_id") == n for n, entry in self._stack.items())
        self._offset = 1 if own else 0

    def frames(self, number: int) -> tuple[Frame, ...]:
        """The frames of a number, the innermost first."""
        frames, seen = list[Frame](), set[int]()
        while number in self._stack and number not in seen:
            seen.add(number)
            entry = self._stack[number]
            location = self._locations.get(entry.get("file_location_id", 0), {})
            line = location.get("line", 0)
            frames.append(
                Frame(
                    self._files.get(location.get("file_name_id", 0), ""),
                    line,
                    # the tables count columns from 1 in some versions and from 0 in others; the
                    # text has no end where it equals the start
                    location.get("column", 0),
                    location.get("end_line", line),
                    location.get("end_column", 0),
                    self._functions.get(location.get("function_name_id", 0), ""),
                )
            )
            number = entry.get("parent_frame_id", 0) - self._offset
        return tuple(frames)

    def source(self, attributes: str, name: str) -> Source:
        """The source of an instruction.

        Args:
            attributes: as text.
            name: its `op_name`.
        """
        match = re.search(r"\bstack_frame_id=(\d+)", attributes)
        frames = self.frames(int(match[1])) if match else ()
        if not frames and (line := _LINE.search(attributes)):
            frames = (Frame(line[1], int(line[2] or 0)),)
        return Source(name=path(name), frames=_of_program(frames))


# --------------------------------------------------------------------------------------------------
# Text of the user's program.


def text_of(frame: Frame) -> str:
    """The line of a frame; "" where the file is not there."""
    return linecache.getline(frame.file, frame.line).strip()


def error_text(error: Exception, names: Sequence[str] = ()) -> str:
    """The user's line that an error comes from, where there is one, and what it says:
    " (model.py:41: return x @ w): TypeError: ...".

    Args:
        names: of arrays, which a function of flat arrays has in `values`.
    """
    lines = reversed(traceback.extract_tb(error.__traceback__))
    frame = user_frame(Frame(line.filename, line.lineno or 0) for line in lines)
    place = f" ({frame.place}: {text_of(frame)})" if frame else ""
    text = re.sub(r"\bvalues\[(\d+)\]", lambda match: names[int(match[1])], str(error)[:1200])
    return f"{place}: {type(error).__name__}: {text}"


@lru_cache(maxsize=256)
def _statements(file: str) -> Sequence[ast.stmt]:
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return ()
    return [node for node in ast.walk(tree) if isinstance(node, ast.stmt)]


def value_name(frame: Frame | None) -> str:
    """What the program calls the value of an expression: the name that it is assigned to, or its
    text; "" where neither is known.
    """
    if frame is None:
        return ""
    around = [
        node
        for node in _statements(frame.file)
        if node.lineno <= frame.line <= (node.end_lineno or node.lineno)
        and not isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef)
    ]
    statement = min(
        around, key=lambda node: (node.end_lineno or node.lineno) - node.lineno, default=None
    )
    if statement is None:
        return _clipped(text_of(frame))
    value = getattr(statement, "value", None)
    if isinstance(statement, ast.Assign | ast.AnnAssign | ast.AugAssign) and value is not None:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        is_all = (value.lineno, value.col_offset) == (frame.line, frame.column)
        if is_all or not frame.last_column:
            parts = target.elts if isinstance(target, ast.Tuple) else [target]
            names = [ast.unparse(part) for part in parts]
            return _clipped(", ".join(name for name in names if name != "_") or "_")
    return _clipped(expression(frame))


def expression(frame: Frame) -> str:
    """The text of the expression of a frame, or of its line where its end is not known."""
    lines = [linecache.getline(frame.file, n) for n in range(frame.line, frame.last_line + 1)]
    if (
        not lines
        or not frame.last_column
        or (frame.last_line, frame.last_column)
        <= (
            frame.line,
            frame.column,
        )
    ):
        return text_of(frame)
    lines[-1] = lines[-1][: frame.last_column]
    lines[0] = lines[0][frame.column :]
    return " ".join(" ".join(lines).split())


def around(frame: Frame) -> tuple[str, str]:
    """What stands before and behind the expression of a frame in its statement's lines; nothing
    where its end is not known.
    """
    if expression(frame) == text_of(frame):
        return "", ""
    first = linecache.getline(frame.file, frame.line)
    last = linecache.getline(frame.file, frame.last_line)
    return first[: frame.column].lstrip(), last[frame.last_column :].rstrip()


def _clipped(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shown(source: Source, names: Mapping[str, str] | None = None) -> str:
    """ "model.py:41", with the pass that it belongs to."""
    frame = source.user or (source.frames[0] if source.frames else None)
    if frame is None:
        return ""
    operation = source.operation
    suffix = ", recomputed" if operation.recomputed else ", backward" if operation.backward else ""
    return frame.place + suffix
