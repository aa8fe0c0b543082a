# SPDX-License-Identifier: Apache-2.0
"""The log: one line an event on standard error, text or JSON, each with what its thread was working on.

Level info is for changes of state; bodies of requests and answers are written at no level.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import sys
import threading
import time
from dataclasses import fields
from typing import Any, TextIO

from driver import config, context
from driver.version import VERSION

logger = logging.getLogger(__name__)

NOISY = ("kubernetes", "urllib3", "grpc")
"""Libraries that write bodies or every request at level debug."""


def set_up(form: config.LogFormat, level: config.LogLevel, *, stream: TextIO | None = None) -> None:
    """Send every log line of this process to a stream (standard error) in one form, and nothing elsewhere."""
    handler = Handler(stream if stream is not None else sys.stderr)
    handler.setFormatter(JsonFormatter() if form is config.LogFormat.JSON else TextFormatter())
    root = logging.getLogger()
    for old in root.handlers[:]:
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(level.value.upper())
    for name in NOISY:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.captureWarnings(capture=True)
    threading.excepthook = _log_dead_thread


def log_start(settings: config.Settings) -> None:
    """The first lines: version, settings, node."""
    logger.info(
        "nearfield %s starts on node %s (Python %s, process %d)",
        VERSION,
        settings.node_name,
        platform.python_version(),
        os.getpid(),
    )
    told = {field.name: getattr(settings, field.name) for field in fields(settings)}
    logger.info("Settings: %s", " ".join(f"{name}={value}" for name, value in told.items() if value is not None))


_quoted = json.JSONEncoder(ensure_ascii=False).encode
"""json.dumps with an option makes an encoder for every call."""


class Handler(logging.StreamHandler[TextIO]):
    """Writes lines; where nobody reads them any more, the agent goes on."""

    def handleError(self, _record: logging.LogRecord) -> None:  # noqa: N802 - the name is logging's
        """Drop the line: there is no better place to complain."""


class TextFormatter(logging.Formatter):
    """`2026-11-29T17:04:11.123Z INFO driver.app: message key="value"`, one line, a traceback indented below."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        bound = "".join(f" {key}={_quoted(value)}" for key, value in context.fields().items())
        # Text from hardware or from the cluster could otherwise begin a line of its own.
        message = _one_line(record.getMessage() + bound)
        line = f"{_utc(record.created)} {record.levelname} {record.name}: {message}"
        if record.exc_info:
            line += "\n  " + self.formatException(record.exc_info).replace("\n", "\n  ")
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time, level, logger, message, the bound fields, error with the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        line: dict[str, Any] = {
            "time": _utc(record.created),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {key: value for key, value in context.fields().items() if key not in line}
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=True)


def _utc(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(seconds)) + f".{int(seconds % 1 * 1000):03d}Z"


def _one_line(text: str) -> str:
    if text.isprintable():  # nearly always, and every Prepare writes a line
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def _log_dead_thread(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is SystemExit:
        return
    name = args.thread.name if args.thread is not None else "?"
    logger.critical(
        "Thread %s died", name, exc_info=(args.exc_type, args.exc_value, args.exc_traceback) if args.exc_value else None
    )
