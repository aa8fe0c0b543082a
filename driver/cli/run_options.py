# SPDX-License-Identifier: Apache-2.0
"""The options of `nearfield run`, from the command line to Settings."""

from __future__ import annotations

import os

from driver import config
from driver import options as table
from driver.cli import parameters
from driver.errors import ConfigError, SocketError
from driver.kubelet import sockets

options = parameters.add(*(option.name for option in table.OPTIONS))
"""Decorates a click command with every option of `run`; it then gets the values that `settings` takes."""


def settings(**values: str | None) -> config.Settings:
    """The settings of the command that runs, from the values that click gave it.

    Raises ConfigError with one line for every problem, also where a path that must be there is missing or where no socket
    fits below the kubelet's folder.
    """
    parameters.refuse_misspelt_variables(os.environ)
    built = table.build_settings(parameters.given(values))
    problems = list(table.missing_paths(built))
    try:
        sockets.socket_paths(
            driver_name=built.driver_name,
            registry_dir=built.registry_dir,
            plugin_dir=built.plugin_dir,
            pod_uid=built.pod_uid,
        )
    except SocketError as err:
        problems.append(f"--kubelet-dir {built.kubelet_dir}: {err}")
    if problems:
        raise ConfigError("\n".join(problems))
    return built
