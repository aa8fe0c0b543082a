# SPDX-License-Identifier: Apache-2.0
"""The judge of the order of parts: what upstream's own allocator leaves placeable when random claims for parts come and go.

The same claims, for parts and for whole GPUs, are served from the same devices under three orders: as published; with the places of each profile in ascending order and
all else as published; and GPU by GPU by address, places ascending, as a driver that thinks nothing of it lists them. After each claim
it is counted how many more of each of the larger profiles, and how many whole GPUs, the node would take. Sequences are the
same in every run.

A claim for one device gets the first that fits. That is easily done here, and upstream's allocator is asked for every 50th
claim whether it would give the same.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from discovery.errors import DiscoveryError
from driver import values
from driver.publish import attributes, counters, devices
from hack.judges import impossible, mig, migclaims, nodes, upstream
from hack.tools.errors import ToolError

MACHINES = ("dgx-h100",)
CLAIMS = 1000
SEQUENCES = 2

OURS, ASCENDING, ADDRESS = "as published", "places ascending", "by address, places ascending"

LOAD = 0.6
"""Memory slices that the claims of a sequence would hold on average if all of them fitted, as a part of the node's."""

WHOLE = "whole GPU"
ASK_EVERY = 50
COUNT_EVERY = 10
GROUND = 2000
"""Claims that a verdict needs."""

NOISE = 0.02
"""What is not worse: the order of whole GPUs is made for their wiring, which counts for nothing here."""

TOLERATED = 0.12
"""Part of the other order's figure by which ours may be worse in one profile, if it is not in the mean of all: a place that is
kept for the one is taken from the other.
"""


@dataclass(frozen=True, slots=True)
class Arrival:
    """A claim for a part of a profile, and how many claims later it ends."""

    profile: str
    lifetime: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """How one order fared on one machine: what is placeable in the mean, by profile, and the part of claims refused."""

    machine: str
    order: str
    placeable: Mapping[str, float]
    refused: float


def main(argv: Sequence[str]) -> int:
    """Runs the contest and prints what came of it. 0: ours is worse in nothing, 1: it is, or there was no contest."""
    parser = argparse.ArgumentParser(
        prog="hack/oracle places",
        description="Count what random claims for parts of GPUs leave placeable under several orders, with upstream's allocator.",
        allow_abbrev=False,
    )
    parser.add_argument("machines", nargs="*", metavar="MACHINE", help=f"machines ({', '.join(MACHINES)})")
    parser.add_argument("--claims", type=int, default=CLAIMS, metavar="N", help=f"claims of a sequence ({CLAIMS})")
    parser.add_argument("--sequences", type=int, default=SEQUENCES, metavar="N", help=f"sequences ({SEQUENCES})")
    given = parser.parse_args(argv)
    if given.claims < 1 or given.sequences < 1:
        parser.error("at least one claim and one sequence are needed")
    failures: list[str] = []
    try:
        program = upstream.build()
        for machine in given.machines or MACHINES:
            with upstream.started(program) as allocator:
                results = compete(machine, allocator, claims=given.claims, sequences=given.sequences)
            for line in table(results):
                print(line, flush=True)
            failures += verdict(results) if given.claims * given.sequences >= GROUND else ()
    except (ToolError, upstream.UpstreamError, DiscoveryError) as error:
        print(f"hack/oracle: {error}", file=sys.stderr)
        return 1
    for failure in failures:
        print(f"hack/oracle: {failure}", file=sys.stderr)
    return 1 if failures else 0


def compete(machine: str, allocator: upstream.Allocator, *, claims: int, sequences: int) -> list[Result]:
    """All orders on one machine."""
    node = nodes.read(mig.place(machine), sharing=nodes.DIVIDED)
    results = []
    for order, permutation in orders(node).items():
        listed = replace(node, devices=tuple(node.devices[index] for index in permutation))
        allocator.load(listed.slices(listed.published()), migclaims.CLASSES)
        totals: dict[str, float] = {}
        refused = 0
        for number in range(sequences):
            arrivals = sequence(f"{machine} {number}", node.devices, claims=claims)
            refused += _play(allocator, listed.devices, arrivals, totals)
        results.append(
            Result(
                machine=machine,
                order=order,
                placeable={name: total / (claims * sequences) for name, total in totals.items()},
                refused=refused / (claims * sequences),
            )
        )
    return results


def orders(node: nodes.Node) -> dict[str, nodes.Order]:
    """The orders that are compared."""
    rank = {profile: index for index, profile in enumerate(impossible.fitting(node.devices))}

    def start(device: devices.Device) -> int:
        return int(device.name.rpartition("-")[2])

    def profile(device: devices.Device) -> int:
        return rank[str(device.attributes[attributes.PROFILE])]

    wholes = [index for index in node.published() if attributes.PROFILE not in node.devices[index].attributes]
    parts = [index for index in node.published() if index not in set(wholes)]
    seen = list(dict.fromkeys(values.gpu_of(node.devices[index].name) for index in parts))

    def ascending(index: int) -> tuple[int, int, int]:
        device = node.devices[index]
        return seen.index(values.gpu_of(device.name)), profile(device), start(device)

    def by_address(index: int) -> tuple[str, int, int]:
        device = node.devices[index]
        return values.gpu_of(device.name), profile(device), start(device)

    return {
        OURS: node.published(),
        ASCENDING: (*wholes, *sorted(parts, key=ascending)),
        ADDRESS: (*sorted(wholes, key=lambda index: node.devices[index].name), *sorted(parts, key=by_address)),
    }


def sequence(seed: str, offered: Sequence[devices.Device], *, claims: int) -> list[Arrival]:
    """A random sequence, the same for the same seed: plain profiles and whole GPUs, the smaller ones more often, so that each asks for
    about as many memory slices in all.
    """
    source = random.Random(seed)
    sizes = {kind(device): _slices(device) for device in offered if device.consumes is not None}
    gpus = len({values.gpu_of(device.name) for device in offered if device.consumes is not None})
    largest = max(sizes.values())
    wanted = [of for of in sorted(sizes) if _plain(of) and (of == WHOLE or sizes[of] < largest)]
    weights = [1 / sizes[of] for of in wanted]
    mean = LOAD * gpus * largest * sum(weights) / len(wanted)
    return [
        Arrival(profile=source.choices(wanted, weights)[0], lifetime=1 + int(source.expovariate(1 / mean)))
        for _ in range(claims)
    ]


def _plain(profile: str) -> bool:
    return "+" not in profile and "-" not in profile


class _Node:
    """A node whose devices are given away by first fit."""

    def __init__(self, offered: Sequence[devices.Device]) -> None:
        self._offered = [device for device in offered if device.consumes is not None]
        self._kinds: dict[str, list[devices.Device]] = {}
        self.left: dict[str, dict[str, int]] = {}
        self.held: dict[str, int] = {}
        """Devices, and when they are given back."""
        for device in self._offered:
            self._kinds.setdefault(kind(device), []).append(device)
            assert device.consumes is not None
            self.left[device.consumes.counter_set] = dict(device.consumes.totals)

    def give_back(self, now: int) -> None:
        """What ends now, or ended."""
        for device in self._offered:
            if self.held.get(device.name, now + 1) <= now:
                del self.held[device.name]
                self._change(device, +1)

    def fit(self, wanted: str, until: int) -> str | None:
        """The device that a claim gets."""
        for device in self._kinds[wanted]:
            assert device.consumes is not None
            if counters.fits(device.consumes.counters, self.left[device.consumes.counter_set]):
                self._change(device, -1)
                self.held[device.name] = until
                return device.name
        return None

    def _change(self, device: devices.Device, sign: int) -> None:
        assert device.consumes is not None
        left = self.left[device.consumes.counter_set]
        for name, amount in device.consumes.counters.items():
            left[name] += sign * amount


def kind(device: devices.Device) -> str:
    """Its profile, or WHOLE."""
    return str(device.attributes.get(attributes.PROFILE, WHOLE))


def _play(
    allocator: upstream.Allocator,
    offered: Sequence[devices.Device],
    arrivals: Sequence[Arrival],
    totals: dict[str, float],
) -> int:
    """One sequence: adds up what is placeable, and answers how many claims were refused."""
    node = _Node(offered)
    refused = 0
    for now, arrival in enumerate(arrivals):
        node.give_back(now)
        held = list(node.held)
        found = node.fit(arrival.profile, now + arrival.lifetime)
        refused += found is None
        if now % ASK_EVERY == 0 and (theirs := allocator.fit(_claim(arrival.profile), held)) != (found and (found,)):
            raise upstream.UpstreamError(f"upstream's allocator gives {theirs} where the first that fits is {found}")
        if now % COUNT_EVERY == 0:
            for profile, count in placeable(offered, node.left).items():
                totals[profile] = totals.get(profile, 0) + count * COUNT_EVERY
    return refused


def _claim(profile: str) -> upstream.Body:
    what = (
        migclaims.asked(of=migclaims.GPU_CLASS) if profile == WHOLE else migclaims.asked(migclaims.of_profile(profile))
    )
    return migclaims.claim("claim", migclaims.exactly("one", what))


def placeable(offered: Sequence[devices.Device], left: Mapping[str, Mapping[str, int]]) -> dict[str, int]:
    """How many more of each profile, and whole GPUs, fit into what is left of the counters of each set."""
    found: dict[str, int] = {}
    rest: dict[tuple[str, str], Mapping[str, int]] = {}
    for device in offered:
        if device.consumes is None:
            continue
        of = kind(device)
        key = device.consumes.counter_set, of
        remaining = rest.setdefault(key, left[device.consumes.counter_set])
        fits = counters.fits(device.consumes.counters, remaining)
        found[of] = found.get(of, 0) + fits
        if fits:
            rest[key] = counters.left(remaining, [device.consumes.counters])
    return found


def _slices(device: devices.Device) -> int:
    assert device.consumes is not None
    return sum(name.startswith("memory-slice-") for name in device.consumes.counters)


def shown(results: Sequence[Result]) -> list[str]:
    """The profiles that there is a choice of: the larger half of the plain ones, and the whole."""
    plain = [name for name in results[0].placeable if name != WHOLE and _plain(name)]
    return [*plain[len(plain) // 2 :], *([WHOLE] if WHOLE in results[0].placeable else [])]


def table(results: Sequence[Result]) -> Iterator[str]:
    """Markdown, a row an order."""
    names = shown(results)
    yield f"| {results[0].machine} | {' | '.join(f'{name} placeable' for name in names)} | refused |"
    yield f"|---|{'---|' * len(names)}---|"
    for result in results:
        cells = " | ".join(f"{result.placeable[name]:.2f}" for name in names)
        yield f"| {result.order} | {cells} | {100 * result.refused:.1f} % |"


def verdict(results: Sequence[Result]) -> Iterator[str]:
    """In what ours is worse than another order, a sentence each."""
    ours, *others = results
    for other in others:
        gains = {
            name: ours.placeable[name] / other.placeable[name] - 1 for name in shown(results) if other.placeable[name]
        }
        if sum(gains.values()) < -NOISE * len(gains) or ours.refused > other.refused + NOISE:
            yield f"{ours.machine}: not better than {other.order}"
        for name, gain in gains.items():
            if gain < -TOLERATED:
                yield f"{ours.machine}: {ours.placeable[name]:.2f} {name} placeable, and {other.placeable[name]:.2f} {other.order}"
