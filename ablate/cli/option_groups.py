"""Options in groups: a command takes a frozen dataclass in place of many options.

A field of the dataclass is an option of typer, so that its name, help, type and default stand once for all
commands that share it. The function gets the values as one object, which it can hand on:

    @dataclass(frozen=True)
    class Flags:
        '''Options on files.

        Args:
            state: State folder.
        '''

        state: Path | None = None

    def stop(sweep: str, flags: Flags) -> None: ...         # ablate stop X --state runs

Typer itself knows parameters alone. `App` shows it the fields of each group as keyword parameters, and takes
the help of each from `Args:` at the end of the docstring. `Annotated[T, typer.Option(...)]` is needed for
another name, a bound, or a help that is computed. A switch that is off by default has no `--no-` form.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, getdoc, signature
from typing import Annotated, Any, get_args, get_type_hints

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
    """Return a function of keywords that has the fields of each group in the group's place, with the help of
    each parameter, and without `Args:` in its docstring."""
    hints = get_type_hints(command, include_extras=True)
    groups: dict[str, Any] = {name: hint for name, hint in hints.items() if is_dataclass(hint)}
    about, helps = _documented(command)
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        parameters += _fields(groups[name]) if name in groups else [_shown(parameter, hints[name], helps)]

    @wraps(command)
    def run(**values: Any) -> Any:
        made = {
            name: group(**{field.name: values.pop(field.name) for field in fields(group)})
            for name, group in groups.items()
        }
        return command(**values, **made)

    run.__doc__ = about
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


def _fields(group: Any) -> list[Parameter]:
    """Return the fields of a group as parameters, in the panel of the help page that the group names."""
    hints = get_type_hints(group, include_extras=True)
    helps = {name: text for base in reversed(group.__mro__) for name, text in _documented(base)[1].items()}
    own = signature(group).parameters.values()
    return [_shown(field, hints[field.name], helps, getattr(group, "panel", None)) for field in own]


def _shown(parameter: Parameter, hint: Any, helps: dict[str, str], panel: str | None = None) -> Parameter:
    """Return a parameter as typer needs it: annotated with its help and, for a switch, its only name."""
    name, default = parameter.name, parameter.default
    if hint is not typer.Context:
        kind, *given = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
        made = typer.Argument if default is Parameter.empty else typer.Option
        info = copy(given[0]) if given else made()
        info.help = helps.get(name, info.help)
        info.rich_help_panel = info.rich_help_panel or panel
        if kind is bool and default is False and info.default is ...:  # typer keeps a name as the default
            info.param_decls = (f"--{name.replace('_', '-')}",)
        hint = Annotated[kind, info]
    return parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hint)


def _documented(function: Any) -> tuple[str, dict[str, str]]:
    """Return the docstring of a function or a class before `Args:`, and the text there of each name."""
    about, _, section = (getdoc(function) or "").partition("\nArgs:\n")
    lines: list[str] = []
    for line in section.splitlines():
        if line.startswith("     "):
            lines[-1] += f" {line.strip()}"
        else:
            lines.append(line.strip())
    return about.strip(), dict(line.split(": ", 1) for line in lines)
