# SPDX-License-Identifier: Apache-2.0
"""What claims that cannot be satisfied cost the scheduler, on a node whose GPUs are divided: upstream's own allocator is timed.

It tries every set of devices before it says no (exhaustive search, no counting), while every other pod waits, and gives up after
10 s on a node. So the worst state for a claim for N devices is the one in which N - 1 of them can be had: that is the state which is
made here for each kind of claim and each N. Steps are the same in every run; seconds are of one processor.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from discovery.errors import DiscoveryError
from driver import values
from driver.publish import attributes, devices
from hack.judges import migclaims, nodes, upstream
from hack.tools.errors import ToolError

MACHINES = ("dgx-h100",)
COUNTS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 17, 25)

MOST_DEVICES, MOST_REQUESTS, MOST_APART = 7, 4, 4
"""The bounds of deploy/daemonset/components/mig-claim-bounds."""

MOST_STEPS = 10_000
"""No claim within the bounds may take more on the machines that are tried here, but for those of profiles that fit a GPU less often
than they have places.
"""

Claims = list[dict[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of claim for N devices. `write`: the claims of a pod. `held`: the devices that others have, so that one too few is left;
    None where the node is too small. `bounded`: whether a claim for N is within the bounds.
    """

    name: str
    write: Callable[[int], Claims]
    held: Callable[[Sequence[devices.Device], int], list[str] | None]
    bounded: Callable[[int], bool]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """What one attempt took. `fits`: the state was not the one that was meant, which is a fault of this judge."""

    machine: str
    kind: str
    count: int
    bounded: bool
    steps: int
    seconds: float
    over: bool
    fits: bool


def main(argv: Sequence[str]) -> int:
    """Times, and prints. 0: what is within the bounds costs little, 1: it does not, or nothing could be timed."""
    parser = argparse.ArgumentParser(
        prog="hack/oracle impossible",
        description="Time upstream's allocator with claims that do not fit a node whose GPUs are divided.",
        allow_abbrev=False,
    )
    parser.add_argument("machines", nargs="*", metavar="MACHINE", help=f"machines of the zoo ({', '.join(MACHINES)})")
    parser.add_argument(
        "--most",
        type=int,
        default=0,
        metavar="N",
        help="go beyond the bounds of components/mig-claim-bounds, up to so many devices",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=upstream.FILTER_TIMEOUT_S,
        metavar="SECONDS",
        help="give an attempt up after this (10)",
    )
    given = parser.parse_args(argv)
    try:
        program = upstream.build()
        costs: list[Cost] = []
        for machine in given.machines or MACHINES:
            with upstream.started(program) as allocator:
                costs += measure(machine, allocator, most=given.most, limit_s=given.limit)
            for line in table([cost for cost in costs if cost.machine == machine]):
                print(line, flush=True)
    except (ToolError, upstream.UpstreamError, DiscoveryError) as error:
        print(f"hack/oracle: {error}", file=sys.stderr)
        return 1
    failures = list(verdict(costs))
    for failure in failures:
        print(f"hack/oracle: {failure}", file=sys.stderr)
    return 1 if failures else 0


def measure(machine: str, allocator: upstream.Allocator, *, most: int, limit_s: float) -> list[Cost]:
    """Every kind of claim on one machine, for more and more devices until an attempt is given up, within the bounds and up to `most`."""
    node = nodes.read(machine, sharing=nodes.DIVIDED)
    allocator.load(node.slices(node.published()), migclaims.CLASSES)
    costs: list[Cost] = []
    for kind in kinds(node.devices):
        for count in COUNTS:
            wanted = count <= most or kind.bounded(count)
            held = kind.held(node.devices, count) if wanted else None
            if held is None:
                continue
            found = allocator.attempt(kind.write(count), held, limit_s=limit_s)
            costs.append(
                Cost(
                    machine=machine,
                    kind=kind.name,
                    count=count,
                    bounded=kind.bounded(count),
                    steps=found.steps,
                    seconds=found.seconds,
                    over=found.over,
                    fits=found.results is not None,
                )
            )
            if _given_up(costs[-1]):
                break
    return costs


def kinds(offered: Sequence[devices.Device]) -> Iterator[Kind]:
    """All that is asked of a node: of the smallest, a middle and the largest profile in every way, and of some in some."""
    room = fitting(offered)
    plain = [profile for profile in room if "+" not in profile]
    small, large = plain[0], plain[-1]
    for profile in dict.fromkeys((small, plain[len(plain) // 2], large)):
        yield _together(
            f"N x {profile}, one request",
            profile,
            lambda count, what: [migclaims.exactly("parts", {**what, "count": count})],
        )
    for profile in dict.fromkeys((small, large)):
        yield _together(f"N requests for a {profile}", profile, _apart)
        yield _together(f"a pod with N claims for a {profile}", profile, _apart, pod=True)
    yield _of_one_gpu(
        f"N x {small} of one GPU", small, lambda count, what: [migclaims.exactly("parts", {**what, "count": count})]
    )
    yield _of_one_gpu(f"N requests for a {small} of one GPU", small, _apart)
    for profile in dict.fromkeys((small, *(profile for profile in room if 1 < room[profile] < room[small]))):
        yield _of_many_gpus(f"N x {profile} of N GPUs", profile)
    for profile in room:
        if "+" in profile:
            yield _scarce(f"N x {profile}", profile)
    yield _anything("N x any slice", small)
    yield _lists(f"N requests for a {plain[-2]} or else a {small}", plain[-2], small)
    yield _wholes("N whole GPUs")


def fitting(offered: Sequence[devices.Device]) -> dict[str, int]:
    """How many of each profile fit a GPU at once, the smallest profile first."""
    found: dict[str, int] = {}
    gpu = next(values.gpu_of(device.name) for device in offered if device.consumes is not None)
    for profile, parts in _parts(offered).items():
        own = [part for part in parts if values.gpu_of(part.name) == gpu]
        assert own[0].consumes is not None
        left = dict(own[0].consumes.totals)
        found[profile] = 0
        for part in own:
            assert part.consumes is not None
            if all(left[name] >= amount for name, amount in part.consumes.counters.items()):
                left |= {name: left[name] - amount for name, amount in part.consumes.counters.items()}
                found[profile] += 1
    return found


def _parts(offered: Sequence[devices.Device]) -> dict[str, list[devices.Device]]:
    found: dict[str, list[devices.Device]] = {}
    for device in offered:
        if (profile := device.attributes.get(attributes.PROFILE)) is not None:
            found.setdefault(str(profile), []).append(device)
    return found


def _gpus(offered: Sequence[devices.Device]) -> list[str]:
    return [device.name for device in offered if values.gpu_of(device.name) == device.name]


def _left(offered: Sequence[devices.Device], profile: str, free: int) -> list[str] | None:
    """What is held when so many parts of a profile can be had; None where the node has no more than that."""
    per_gpu = fitting(offered)[profile]
    held: list[str] = []
    for gpu in _gpus(offered):
        own = [part.name for part in _parts(offered)[profile] if values.gpu_of(part.name) == gpu]
        take = min(per_gpu, free)
        free -= take
        held += own[take:] if take and len(own) == per_gpu else [] if take else [gpu]
    return held if free == 0 else None


def _apart(count: int, what: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [migclaims.exactly(f"part-{index}", what) for index in range(count)]


def _together(
    name: str, profile: str, write: Callable[[int, Mapping[str, Any]], list[dict[str, Any]]], *, pod: bool = False
) -> Kind:
    what = migclaims.asked(migclaims.of_profile(profile))

    def claims(count: int) -> Claims:
        requests = write(count, what)
        if pod:
            return [migclaims.claim(f"claim-{index}", request) for index, request in enumerate(requests)]
        return [migclaims.claim("claim", *requests)]

    return Kind(
        name=name,
        write=claims,
        held=lambda offered, count: _left(offered, profile, count - 1),
        bounded=lambda count: not pod and count <= MOST_DEVICES and len(write(count, what)) <= MOST_REQUESTS,
    )


def _of_one_gpu(name: str, profile: str, write: Callable[[int, Mapping[str, Any]], list[dict[str, Any]]]) -> Kind:
    what = migclaims.asked(migclaims.of_profile(profile))

    def held(offered: Sequence[devices.Device], count: int) -> list[str] | None:
        free = count - 1
        if free > fitting(offered)[profile]:
            return None
        parts = _parts(offered)[profile]
        return [
            name
            for gpu in _gpus(offered)
            for name in [part.name for part in parts if values.gpu_of(part.name) == gpu][free:]
        ]

    return Kind(
        name=name,
        write=lambda count: [migclaims.claim("claim", *write(count, what), match=migclaims.PARENT)],
        held=held,
        bounded=lambda count: count <= MOST_DEVICES and len(write(count, what)) <= MOST_REQUESTS,
    )


def _of_many_gpus(name: str, profile: str) -> Kind:
    return Kind(
        name=name,
        write=lambda count: [
            migclaims.claim(
                "claim",
                migclaims.exactly("parts", migclaims.asked(migclaims.of_profile(profile), count=count)),
                distinct=migclaims.PARENT,
            )
        ],
        held=_but_some_gpus,
        bounded=lambda count: count <= MOST_APART,
    )


def _scarce(name: str, profile: str) -> Kind:
    """Of a profile that fits a GPU less often than it has places: every place is tried."""
    return Kind(
        name=name,
        write=lambda count: [
            migclaims.claim(
                "claim", migclaims.exactly("parts", migclaims.asked(migclaims.of_profile(profile), count=count))
            )
        ],
        held=_but_some_gpus,
        bounded=lambda count: count <= MOST_APART,
    )


def _but_some_gpus(offered: Sequence[devices.Device], count: int) -> list[str] | None:
    """All GPUs but count - 1 are held."""
    gpus = _gpus(offered)
    return gpus[count - 1 :] if count - 1 <= len(gpus) else None


def _anything(name: str, small: str) -> Kind:
    return Kind(
        name=name,
        write=lambda count: [migclaims.claim("claim", migclaims.exactly("parts", migclaims.asked(count=count)))],
        held=lambda offered, count: _left(offered, small, count - 1),
        bounded=lambda count: count <= MOST_DEVICES,
    )


def _lists(name: str, large: str, small: str) -> Kind:
    either = [migclaims.asked(migclaims.of_profile(profile)) for profile in (large, small)]
    return Kind(
        name=name,
        write=lambda count: [
            migclaims.claim("claim", *(migclaims.first_available(f"part-{index}", *either) for index in range(count)))
        ],
        held=lambda offered, count: _left(offered, small, count - 1),
        bounded=lambda count: count <= MOST_REQUESTS,
    )


def _wholes(name: str) -> Kind:
    return Kind(
        name=name,
        write=lambda count: [
            migclaims.claim("claim", migclaims.exactly("gpus", migclaims.asked(of=migclaims.GPU_CLASS, count=count)))
        ],
        held=_but_some_gpus,
        bounded=lambda count: count <= MOST_DEVICES,
    )


def verdict(costs: Sequence[Cost]) -> Iterator[str]:
    """What is wrong, a sentence each."""
    for cost in costs:
        what = f"{cost.machine}: {cost.kind}, N = {cost.count}"
        if cost.fits:
            yield f"{what}: fits, and was not to"
        elif cost.bounded and (cost.over or cost.steps > MOST_STEPS):
            yield f"{what}: within the bounds, and takes {cost.steps} steps"


def table(costs: Sequence[Cost]) -> Iterator[str]:
    """Markdown: a row a kind of claims, a column a number of devices; seconds, those within the bounds in bold."""
    counts = sorted({cost.count for cost in costs})
    yield f"| {costs[0].machine} | {' | '.join(f'N = {count}' for count in counts)} |"
    yield f"|---|{'---|' * len(counts)}"
    for kind in dict.fromkeys(cost.kind for cost in costs):
        cells = {cost.count: cost for cost in costs if cost.kind == kind}
        yield f"| {kind} | {' | '.join(_cell(cells.get(count)) for count in counts)} |"


def _given_up(cost: Cost) -> bool:
    """Whether the scheduler would have."""
    return cost.over or cost.seconds > upstream.FILTER_TIMEOUT_S


def _cell(cost: Cost | None) -> str:
    if cost is None:
        return ""
    said = "given up" if _given_up(cost) else f"{cost.seconds:.2f}"
    return f"**{said}**" if cost.bounded else said
