# SPDX-License-Identifier: Apache-2.0
"""The process that changes the hardware: `python -m discovery.hands ARGUMENTS`, started by workers.Workers.

It does one request after the other: it says that it began; that it `waits`, if another process has its turn at the GPU; for
instances to be made, that it `found` their places free, and changes nothing before its parent says `go`; then the answer.

When its parent is gone it ends at once, unless a change is under way: that goes on for a while, since whoever comes next finds
an end sooner than a half. What takes longer ends with the process, and with that its turn at the GPU.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from discovery import codec, dividing, errors, limiting, limits, mig, nvml, options, serving, sysfs, turns, work
from discovery.address import PciAddress, parse

LIMITS: Any = Mapping[str, limits.MemoryLimit]
CGROUPS: Any = tuple[str, ...]


class _DroppedError(Exception):
    """The parent does not want it done after all."""


class _Hands:
    def __init__(self, requests: serving.Requests, source: options.Source, locks: Path, grace_s: float) -> None:
        self._requests = requests
        self._source = source
        self._locks = locks
        self._grace_s = grace_s
        self._tools: tuple[dividing.Divider, limiting.Limiter] | None = None
        self.done = False
        """Whether only another process can go on."""

    def serve(self, request: Any) -> dict[str, Any]:
        """Do a request. The answer is for the parent."""
        try:
            gpu = parse(request["gpu"])
            with turns.turn(self._locks, gpu, lambda: self._requests.answer({"waits": True})):
                if request["verb"] != "create":
                    self._requests.grace_s = self._grace_s
                return {"answer": codec.encode(self._do(request, gpu))}
        except errors.WorkError as err:
            return {"error": str(err), "kind": err.kind, "retryable": err.retryable, "clean": err.clean}
        except dividing.OutlivedError as err:
            self.done = True
            return {"outlived": str(err)}
        except _DroppedError:
            return {"dropped": True}
        except Exception as err:  # noqa: BLE001 - the door of this process: the parent hears of it, the log has the trace
            traceback.print_exc()
            return {"error": f"{type(err).__name__}: {err}", "kind": work.Kind.FAILED, "retryable": True}
        finally:
            self._requests.grace_s = 0.0

    def _do(self, request: Any, gpu: PciAddress) -> Any:
        if self._tools is None:
            self._tools = tools(self._source)
        divider, limiter = self._tools
        places = tuple(codec.decode(mig.Partition, each, place="partition") for each in request.get("partitions", ()))
        match request["verb"]:
            case "create":
                return divider.create(
                    gpu, places, begun=request["begun"], toggle=request["toggle"], commit=self._commit
                )
            case "destroy":
                divider.destroy(gpu, places)
            case "whole":
                divider.whole(gpu, toggle=request["toggle"])
            case "limit-memory":
                limiter.limit_memory(gpu, codec.decode(LIMITS, request["limits"], place="limits"))
            case "memory-use":
                return limiter.memory_use(gpu, codec.decode(CGROUPS, request["cgroups"], place="cgroups"))
            case "compute-mode":
                return limiter.set_compute_mode(gpu, limits.ComputeMode(request["mode"]))
            case verb:
                raise ValueError(f"no such request: {verb}")
        return ()

    def _commit(self) -> None:
        self._requests.answer({"found": True})
        if self._requests.next() != {"go": True}:
            raise _DroppedError
        self._requests.grace_s = self._grace_s


def tools(source: options.Source) -> tuple[dividing.Divider, limiting.Limiter]:
    """What works on a machine, over one session with NVML: one call after the other."""
    library = None
    if source.mock is not None:
        from discovery.mock import library as mock_library  # noqa: PLC0415 - real hardware does without

        library = mock_library.load_library(source.mock)
    session = nvml.Nvml(library, driver_root=source.driver_root)
    divider = dividing.Divider(files=sysfs.Sysfs(sys=source.sys, proc=source.proc), session=session)
    return divider, limiting.Limiter(root=source.cgroup_root, session=session)


def main() -> NoReturn:
    """Serve until the parent is gone, or until only a new process can go on."""
    requests = serving.Requests(grace_s=0.0)
    arguments = json.loads(sys.argv[1])
    source = codec.decode(options.Source, arguments["source"], place="source")
    hands = _Hands(requests, source, Path(arguments["locks"]), arguments["orphan_s"])
    gc.freeze()
    try:
        while not hands.done and (request := requests.next()) is not None:
            requests.answer({"began": True})
            requests.answer(hands.serve(request))
    except BrokenPipeError:
        pass  # the parent went away while we worked
    requests.leave()


if __name__ == "__main__":
    main()
