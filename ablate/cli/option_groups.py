"""Options in groups: a command takes a frozen dataclass in place of many options.

A field of the dataclass is an option of typer, so that its name, help, type and default stand once for all
commands that share it. The function gets the values as one object, which it can hand on:

    @dataclass(frozen=True)
    class Flags:
        state: Annotated[Path | None, typer.Option(help="State folder.")] = None

    def stop(sweep: str, flags: Flags) -> None: ...         # ablate stop X --state runs

Typer itself knows parameters alone. `App` shows it the fields of each group as keyword parameters.
"""

from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints

import typer


class App(typer.Typer):
    """Command line whose commands may take groups of options."""

    def command(  # type: ignore[override]  # typer's arguments, handed on
        self, *args: Any, **shown: Any
    ) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        """Return a decorator that adds a function as a command, as typer's does, and returns it unchanged."""
        add = super().command(*args, **shown)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            add(with_fields(function))
            return function

        return decorate


def with_fields(command: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of keywords that has the fields of each group in the group's place."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    parameters = []
    for name, parameter in signature(command).parameters.items():
        if name in groups:
            parameters += _fields(groups[name])
        else:
            parameters.append(parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hints[name]))

    @wraps(command)
    def run(**values: Any) -> Any:
        made = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**values, **made)

    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


def _fields(group: Any) -> list[Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        Parameter(
            field.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if field.default is MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in fields(group)
    ]
