# SPDX-License-Identifier: Apache-2.0
"""Options on the command line, each with its environment variable NEARFIELD_<OPTION>.

click finds out what was typed; what it means is for `driver.options` to say, in one place for both ways of giving it.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from typing import Any, TypeVar

import click
from click.core import ParameterSource

from driver import options
from driver.errors import ConfigError

PREFIX = "NEARFIELD_"

Command = TypeVar("Command", bound=Callable[..., Any])

_SERVICE_LINK = re.compile(
    r"(.*_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_[0-9]+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)"
)
"""What kubelet puts into every container for a Service called `nearfield...` (enableServiceLinks)."""


class Option(click.Option):
    """An option whose variable counts when it is set but empty: NEARFIELD_HTTP= turns the server off."""

    def resolve_envvar_value(self, _ctx: click.Context) -> str | None:
        """The text of the variable, None when it is not set."""
        return os.environ.get(self.envvar) if isinstance(self.envvar, str) else None


def add(*names: str) -> Callable[[Command], Command]:
    """Decorate a click command with options of `nearfield run`; it then gets the values that `given` takes."""
    chosen = [option for option in options.OPTIONS if option.name in names]

    def decorate(command: Command) -> Command:
        for option in reversed(chosen):
            command = _as_click(option)(command)
        return command

    return decorate


def given(values: Mapping[str, str | None]) -> dict[str, options.Given]:
    """What was given to the command that runs, on the command line or in the environment, by field name."""
    ctx = click.get_current_context()
    return {
        name: options.Given(text=text, from_environment=ctx.get_parameter_source(name) is ParameterSource.ENVIRONMENT)
        for name, text in values.items()
        if text is not None
    }


def refuse_misspelt_variables(environment: Iterable[str]) -> None:
    """Raise ConfigError for a variable that is nearly one of ours: it would be ignored, and its author believes it is not."""
    known = [option.variable.removeprefix(PREFIX) for option in options.OPTIONS]
    problems = [
        f"{name} in the environment is no option; did you mean {PREFIX}{close[0]}?"
        for name in sorted(environment)
        if name.startswith(PREFIX) and (word := name.removeprefix(PREFIX)) not in known
        if not _SERVICE_LINK.fullmatch(word) and (close := get_close_matches(word, known, n=1, cutoff=0.8))
    ]
    if problems:
        raise ConfigError("\n".join(problems))


def _as_click(option: options.Option) -> Callable[[Command], Command]:
    default = option.derived or option.default
    # A switch may be given without its value.
    switch: dict[str, Any] = {"is_flag": False, "flag_value": "true"} if option.parse is options.parse_switch else {}
    return click.option(
        option.flag,
        cls=Option,
        envvar=option.variable,
        show_envvar=True,
        metavar=option.metavar,
        help=option.help,
        show_default=default or False,
        **switch,
    )
