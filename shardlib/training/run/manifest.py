"""What `run.json` says of a run, read and compared with what is wanted now."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from shardlib.errors import RunError, raise_all
from shardlib.training.run.differences import UNKNOWN, Difference, differences, versions
from shardlib.untrusted import read_regular, shown
from shardlib.untrusted.json_types import JsonMapping, JsonObject

#: Of `run.json`.
FORMAT = 1


class OtherRunError(RunError):
    """A folder that holds another run; the differences are listed."""


def read_manifest(path: Path) -> JsonObject | None:
    """All of a `run.json`; None where there is none."""
    try:
        data = json.loads(read_regular(path).decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        why = "it is a folder" if isinstance(error, IsADirectoryError) else error.strerror or error
        raise _undescribed(path, f"it cannot be read: {why}") from error
    except UnicodeDecodeError as error:
        raise _undescribed(path, "its bytes are no text (UTF-8)") from error
    except RecursionError as error:
        raise _undescribed(path, "it is nested too deeply") from error
    except ValueError as error:
        raise _undescribed(path, "it is empty, cut off, or something else than JSON") from error
    wrong = _wrong(data)
    if wrong:
        raise _undescribed(path, wrong)
    if data["format"] != FORMAT:
        raise RunError(
            f"{path} is of format {shown(data['format'])}; this version reads"
            f" {FORMAT}\nTry: the version of shardlib that wrote it, or another folder. Nothing"
            " was changed"
        )
    return data


def _undescribed(path: Path, why: str) -> RunError:
    return RunError(
        f"{path} is no description of a run: {why}\nTry: a copy of that file, if there"
        " is one, or another folder; to keep the checkpoints beside it, which need no repair,"
        f" rename it and go on with --allow-changes {UNKNOWN}. Nothing was changed"
    )


def unknown_checkpoints(
    manifest: Path, saved: Sequence[int], allow: Sequence[str]
) -> tuple[Difference, ...]:
    """What there is to say of checkpoints that stand in a folder without `run.json`; nothing
    where there are none.
    """
    if not saved:
        return ()
    what = (
        f"{manifest.parent} has checkpoints, the newest of step {saved[-1]}, and no"
        f" {manifest.name}: nobody knows of what run they are"
    )
    if UNKNOWN not in allow:
        raise RunError(
            f"{what}\nTry: a copy of {manifest.name}, if there is one, or another folder;"
            f" where they are known to be of this very run, --allow-changes {UNKNOWN}, or "
            f'Settings(allow_changes=("{UNKNOWN}",)). Nothing was changed'
        )
    return (
        Difference(
            name=UNKNOWN,
            text=f"{what}; they were taken for those of the run that is written down now",
        ),
    )


def allowed_differences(
    path: Path,
    known: JsonMapping,
    wanted: JsonMapping,
    trace: JsonMapping | None,
    allow: Sequence[str],
) -> list[Difference]:
    """Differences between a run and what is wanted now that are allowed.

    Args:
        trace: what is traced; None where that is not known yet.
    """
    words = [
        Difference(name=word, text=text)
        for word in {**known["run"], **wanted}
        for text in _unlike(word, known["run"].get(word), wanted.get(word))
    ]
    told = {one.name for one in words}
    traced = (
        differences(known.get("traced", {}), trace or {}, known.get("versions", {}), versions())
        if trace
        else []
    )
    found = [*words, *(one for one in traced if one.name not in told)]
    if any(one.name not in allow for one in found):
        names = ",".join(dict.fromkeys(one.name for one in found))
        raise_all(
            OtherRunError,
            f"{path} holds another run",
            [one.text for one in found if one.name not in allow],
            hint=(
                "another folder, or what the run was begun with; to go on with these changes"
                f" on purpose, --allow-changes {names}, or Settings(allow_changes=...). Nothing"
                " was changed"
            ),
        )
    return found


def _wrong(data: Any) -> str:
    """What is wrong with the plain data of a description; nothing where it is one."""
    if not isinstance(data, dict):
        return "it is JSON, and no object"
    missing = [name for name in ("format", "run") if name not in data]
    if missing:
        return f"it does not say its {' and '.join(missing)}"
    broken = [
        name for name in ("run", "traced", "versions") if not isinstance(data.get(name, {}), dict)
    ]
    return (
        f"its {' and '.join(broken)} {'are' if len(broken) > 1 else 'is'} no object"
        if broken
        else ""
    )


def _unlike(word: str, known: Any, wanted: Any) -> list[str]:
    """How two values differ; of objects, which of their fields do."""
    if isinstance(known, dict) and isinstance(wanted, dict):
        return [
            text
            for key in {**known, **wanted}
            for text in _unlike(f"{word}.{key}", known.get(key), wanted.get(key))
        ]
    return (
        [f"{word} is {_text(wanted)}, the run has {_text(known)}"]
        if _text(known) != _text(wanted)
        else []
    )


def _text(value: Any) -> str:
    return "nothing" if value is None else json.dumps(value)
