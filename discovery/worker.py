# SPDX-License-Identifier: Apache-2.0
"""The process that looks at the hardware: `python -m discovery.worker SOURCE [DESCRIPTOR]`, started by child.ProbeChild. The
descriptor is that of an open file with the overlay.

It answers requests on its standard input, one after the other, on what was its standard output: first that it began, then
the answer. Anything that prints lands on standard error. It ends when its input ends, that is when its parent is gone: at once if idle, and a second later
even if it hangs in a call of NVML. It imports only what a look needs, because it is a process on every node.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from discovery import codec, errors, options, overlay, probe, serving, sysfs

_GRACE_S = 1.0
"""How long work under way may go on after the parent is gone, so that NVML is closed in order."""

VERBS: Mapping[str, Callable[[probe.Machine], Any]] = {
    "probe": lambda machine: codec.to_json(machine.probe()),
    "rescan": lambda machine: codec.encode(machine.rescan()),
    "sample": lambda machine: codec.encode(machine.sample()),
}


def main() -> NoReturn:
    """Serve until the parent is gone, or until only a new process can go on."""
    requests = serving.Requests(grace_s=_GRACE_S)
    source, settings = _arguments(*sys.argv[1:3])
    gc.freeze()  # what was imported stays, and need not be looked at again
    machine: probe.Machine | None = None
    try:
        while (request := requests.next()) is not None:
            requests.answer({"began": True})
            # Not before it is asked: a mock machine is rendered while this process starts.
            machine = machine or _machine(source, settings)
            requests.answer(_answer(machine, request))
            if machine.outlived:
                break
    except BrokenPipeError:
        pass  # the parent went away while we worked
    finally:
        if machine is not None:
            machine.close()
    requests.leave()


def _machine(source: options.Source, settings: options.ProbeOptions) -> probe.Machine:
    library = None
    if source.mock is not None:
        from discovery.mock import library as mock_library  # noqa: PLC0415 - real hardware does without

        library = mock_library.load_library(source.mock)
    return probe.Machine(
        files=sysfs.Sysfs(sys=source.sys, proc=source.proc),
        dev=source.dev,
        library=library,
        origin=source.origin,
        options=settings,
        clock=time.time,
        driver_root=source.driver_root,
        keep_session=True,
    )


def _answer(machine: probe.Machine, request: Any) -> dict[str, Any]:
    try:
        return {"answer": VERBS[request["verb"]](machine)}
    except errors.ProbeError as err:
        return {"error": str(err), "retryable": err.retryable}
    except Exception as err:  # noqa: BLE001 - the door of this process: the parent hears of it, the log has the trace
        traceback.print_exc()
        return {"error": f"{type(err).__name__}: {err}", "retryable": True}


def _arguments(text: str, descriptor: str | None = None) -> tuple[options.Source, options.ProbeOptions]:
    arguments = json.loads(text)
    settings = codec.decode(options.ProbeOptions, arguments["options"], place="options")
    if descriptor is not None:
        with os.fdopen(int(descriptor), "rb") as file:
            document = codec.decode(overlay.Overlay, json.load(file), place="overlay")
        settings = dataclasses.replace(settings, overlay=document)
    return codec.decode(options.Source, arguments["source"], place="source"), settings


if __name__ == "__main__":
    main()
