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

from collections.abc import Callable, Iterable, Iterator
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
    parameters: list[Parameter] = []
    for name, parameter in signature(command).parameters.items():
        parameters += _shown(groups[name]) if name in groups else _shown(command, [parameter])

    @wraps(command)
    def run(**values: Any) -> Any:
        for name, group in groups.items():
            values[name] = group(**{field.name: values.pop(field.name) for field in fields(group)})
        return command(**values)

    run.__doc__ = _documented(command)[0]
    run.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
    return run


def _shown(owner: Any, parameters: Iterable[Parameter] | None = None) -> Iterator[Parameter]:
    """Yield parameters of a command, or all fields of a group, as typer needs them: annotated with their help
    and, for a switch, its only name; in the panel of the help page that a group names."""
    hints = get_type_hints(owner, include_extras=True)
    owners = reversed(owner.__mro__) if parameters is None else [owner]
    helps = {name: text for each in owners for name, text in _documented(each)[1].items()}
    for parameter in parameters or signature(owner).parameters.values():
        name, default, hint = parameter.name, parameter.default, hints[parameter.name]
        if hint is not typer.Context:
            kind, *given = get_args(hint) if hasattr(hint, "__metadata__") else (hint,)
            made = typer.Argument if default is Parameter.empty else typer.Option
            info = copy(given[0]) if given else made()
            info.help = helps.get(name, info.help)
            info.rich_help_panel = info.rich_help_panel or getattr(owner, "panel", None)
            if kind is bool and default is False and info.default is ...:  # typer keeps a name as the default
                info.param_decls = (f"--{name.replace('_', '-')}",)
            hint = Annotated[kind, info]
        yield parameter.replace(kind=Parameter.KEYWORD_ONLY, annotation=hint)


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
