"""Options of a command that belong together, as one value.

A command may take dataclasses whose fields are options; `spread` makes of each field an option of
the command, in the order of the fields, so that the help and the words are those of one long list.

    @dataclass(frozen=True, kw_only=True)
    class Sizes:
        batch: Annotated[int | None, typer.Option("--batch", "-b")] = None
        seq: Annotated[int | None, typer.Option("--seq", "-s")] = None

    @app.command("plan")
    @spread
    def plan_command(model: Model, sizes: Sizes) -> None: ...

`shardlib plan demo --batch 8` calls it with `Sizes(batch=8)`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from typing import TYPE_CHECKING, Any, get_type_hints

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

from typer.models import OptionInfo


def spread(command: Callable[..., None], **groups: type) -> Callable[..., None]:
    """A command as Typer reads it, with the fields of its groups in place of each group."""
    hints = {**get_type_hints(command, include_extras=True), **groups}
    parameters: list[inspect.Parameter] = []
    groups_by_name: dict[str, type[Any]] = {}
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if is_dataclass(kind):
            groups_by_name[parameter.name] = kind  # pyright: ignore[reportArgumentType]
            parameters += _options(kind)  # pyright: ignore[reportArgumentType]
        else:
            parameters.append(
                parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind)
            )

    @functools.wraps(command)
    def run(**options: Any) -> None:
        values = {
            name: kind(**{field.name: options.pop(field.name) for field in fields(kind)})
            for name, kind in groups_by_name.items()
        }
        command(**options, **values)

    del run.__wrapped__
    run.__signature__ = inspect.Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


def _options(kind: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(kind)
    ]


def given(group: DataclassInstance) -> dict[str, object]:
    """The options of a group that a command line gave, as it spells them, with their values."""
    hints = get_type_hints(type(group), include_extras=True)
    values = {field.name: getattr(group, field.name) for field in fields(group)}
    return {
        _spelled(hints[name]): value
        for name, value in values.items()
        if value is not None and value is not False and value != []
    }


def _spelled(hint: Any) -> str:
    """The first name of an option, from its annotation."""
    option = next(
        annotation for annotation in hint.__metadata__ if isinstance(annotation, OptionInfo)
    )
    words = [option.default, *(option.param_decls or ())]
    return next(word for word in words if isinstance(word, str) and word.startswith("--"))
