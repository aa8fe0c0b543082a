# SPDX-License-Identifier: Apache-2.0
"""The log.

- a line in text and in JSON, with the bound context, with a traceback
- context: nested, restored, not inherited by a thread, handed over on request
- text from outside cannot begin a line of its own
- levels; libraries that write bodies are kept quiet; warnings and dead threads are logged; a closed stream costs nothing
- a lasting condition is said when it changes
"""

from __future__ import annotations

import contextvars
import io
import json
import logging
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from driver import condition, config, context, options
from driver.observe import logs

logger = logging.getLogger("driver.test")


@pytest.fixture(autouse=True)
def undo() -> Iterator[None]:
    """The set-up is the process's; give back what pytest had."""
    root = logging.getLogger()
    handlers, level, hook = root.handlers[:], root.level, threading.excepthook
    yield
    logging.captureWarnings(capture=False)
    root.handlers[:], threading.excepthook = handlers, hook
    root.setLevel(level)


def set_up(form: config.LogFormat, level: config.LogLevel = config.LogLevel.INFO) -> io.StringIO:
    stream = io.StringIO()
    logs.set_up(form, level, stream=stream)
    return stream


def test_a_text_line() -> None:
    stream = set_up(config.LogFormat.TEXT)
    with context.bound(method="NodePrepareResources", request_id="7"), context.bound(claim='a/b "x"'):
        logger.info("Prepared %d devices", 2)
    assert re.fullmatch(
        r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z INFO driver\.test: Prepared 2 devices"
        r' method="NodePrepareResources" request_id="7" claim="a/b \\"x\\""\n',
        stream.getvalue(),
    )


def test_a_json_line() -> None:
    stream = set_up(config.LogFormat.JSON)
    with context.bound(claim="a/b", level="no field of ours"):
        logger.warning("It %s", "is\nso")
    line = json.loads(stream.getvalue())
    assert stream.getvalue().count("\n") == 1
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line.pop("time"))
    assert line == {"level": "warning", "logger": "driver.test", "message": "It is\nso", "claim": "a/b"}


def test_a_traceback_is_part_of_its_line() -> None:
    def fail() -> None:
        try:
            [].pop()
        except IndexError:
            logger.exception("Failed")

    stream = set_up(config.LogFormat.TEXT)
    fail()
    lines = stream.getvalue().splitlines()
    assert lines[0].endswith("ERROR driver.test: Failed")
    assert all(line.startswith("  ") for line in lines[1:])
    assert lines[-1] == "  IndexError: pop from empty list"
    stream = set_up(config.LogFormat.JSON)
    fail()
    assert json.loads(stream.getvalue())["error"].endswith("IndexError: pop from empty list")


def test_text_from_outside_begins_no_line() -> None:
    stream = set_up(config.LogFormat.TEXT)
    with context.bound(claim="x\ny"):
        logger.info("Name: %s", "a\n2026-01-01T00:00:00.000Z ERROR forged\x1b[2J")
    (line,) = stream.getvalue().splitlines()
    assert line.endswith(r'Name: a\n2026-01-01T00:00:00.000Z ERROR forged\x1b[2J claim="x\ny"')


def test_context_is_nested_and_restored() -> None:
    with context.bound(a="1", b="1"):
        with context.bound(b="2"):
            assert dict(context.fields()) == {"a": "1", "b": "2"}
        assert dict(context.fields()) == {"a": "1", "b": "1"}
    assert dict(context.fields()) == {}


def test_a_thread_begins_without_context_unless_it_is_handed_over() -> None:
    seen: list[dict[str, str]] = []

    def look() -> None:
        seen.append(dict(context.fields()))

    with context.bound(claim="a"):
        copy = contextvars.copy_context()
        for target in (look, lambda: copy.run(look)):
            thread = threading.Thread(target=target)
            thread.start()
            thread.join()
    assert seen == [{}, {"claim": "a"}]


def test_levels_and_quiet_libraries() -> None:
    stream = set_up(config.LogFormat.TEXT, config.LogLevel.DEBUG)
    logger.debug("shown")
    logging.getLogger("kubernetes.client.rest").debug("response body: secret")
    logging.getLogger("urllib3.connectionpool").info("GET /")
    assert [line.split(": ", 1)[1] for line in stream.getvalue().splitlines()] == ["shown"]
    stream = set_up(config.LogFormat.TEXT, config.LogLevel.WARNING)
    logger.info("hidden")
    assert stream.getvalue() == ""


def test_warnings_and_dead_threads_are_logged() -> None:
    stream = set_up(config.LogFormat.TEXT)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=True)
        warnings.warn("old", UserWarning, stacklevel=1)

    def die() -> None:
        raise RuntimeError("broken")

    thread = threading.Thread(target=die, name="worker")
    thread.start()
    thread.join()
    assert "WARNING py.warnings: " in stream.getvalue()
    assert "CRITICAL driver.observe.logs: Thread worker died\n" in stream.getvalue()
    assert "RuntimeError: broken" in stream.getvalue()


def test_a_closed_stream_costs_the_agent_nothing() -> None:
    stream = set_up(config.LogFormat.TEXT)
    stream.close()
    logger.info("nobody reads this")
    logger.info("nor this bad one %d", "x")


def test_the_first_lines_say_version_settings_and_node(tmp_path: Path) -> None:
    stream = set_up(config.LogFormat.TEXT)
    settings = options.build_settings(
        {"node_name": options.Given(text="n1"), "kubeconfig": options.Given(text=str(tmp_path))}
    )
    logs.log_start(settings)
    first, second = stream.getvalue().splitlines()
    assert "nearfield 0.1.0 starts on node n1 (Python 3" in first
    assert f" node_name=n1 kubeconfig={tmp_path} kubelet_dir=/var/lib/kubelet " in second
    assert " http=:9417 inspect=127.0.0.1:9418 " in second
    assert " mock=" not in second


def test_a_lasting_condition_is_said_when_it_changes() -> None:
    stream = set_up(config.LogFormat.TEXT)
    server = condition.Condition(logger, recovered="The server answers again")
    server.passed()
    for text in ("away", "away", "away", "slow", "slow"):
        server.failed(text)
    texts = [server.text]
    server.passed()
    server.passed()
    texts.append(server.text)
    assert texts == ["slow", None]
    server.failed("slow")
    assert [line.split(" ", 1)[1].replace("driver.test: ", "") for line in stream.getvalue().splitlines()] == [
        "WARNING away",
        "WARNING slow",
        "INFO The server answers again (after 5 failures)",
        "WARNING slow",
    ]
