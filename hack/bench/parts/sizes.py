# SPDX-License-Identifier: Apache-2.0
"""How the cost of a look grows with the machine: made-up nodes that differ in nothing but how often one piece of them is
there, a PCIe switch with two GPUs and four NICs. The smallest is of the size of nodes of today, the largest has more GPUs
than any.
"""

from __future__ import annotations

from pathlib import Path

from discovery import child
from discovery.mock import render, zoo
from hack.bench import bench as benchmark
from hack.bench import drivers, report
from hack.bench.parts import probe

COUNTS = (8, 16, 64)
"""GPUs. There are twice as many NICs."""

_GPUS_OF_A_SWITCH = 2
_ROOTS_OF_A_DOMAIN = 8
_BUSES_OF_A_ROOT = 0x20

_HEAD = """\
apiVersion: mock.nearfield.dev/v1alpha1
kind: Machine
name: gpus-{count}
description: Made up, {count} H100 SXM5 80GB with NVLinks to switches outside, two ConnectX-7 for each
host: {{cpu: Intel(R) Xeon(R) Platinum 8480C, rootPort: intel-sapphire-rapids-root-port}}
driver: {{version: 580.95.05, cuda: "13.0"}}
numa:
  nodes: [{{node: 0, socket: 0, cpus: "0-55", memory: 1TiB}}, {{node: 1, socket: 1, cpus: "56-111", memory: 1TiB}}]
  distances: [[10, 21], [21, 10]]
nvlink:
  switched: {{links: [18]}}
pci:
"""
_ROOT = """\
  - root: "{domain:04x}:{bus:02x}"
    numa: {numa}
    ports:
      - switch: broadcom-pex890xx
        ports:
          - {{gpu: nvidia-h100-sxm5-80gb}}
          - {{nic: connectx-7-400g-ib}}
          - {{nic: connectx-7-400g-ib}}
          - {{gpu: nvidia-h100-sxm5-80gb}}
          - {{nic: connectx-7-400g-ib}}
          - {{nic: connectx-7-400g-ib}}
"""


def machine(count: int) -> str:
    """The document of a node with so many GPUs, an even number."""
    switches = count // _GPUS_OF_A_SWITCH
    roots = (
        _ROOT.format(
            domain=number // _ROOTS_OF_A_DOMAIN,
            bus=number % _ROOTS_OF_A_DOMAIN * _BUSES_OF_A_ROOT,
            numa=int(number >= switches // 2),
        )
        for number in range(switches)
    )
    return _HEAD.format(count=count) + "".join(roots)


def run(bench: benchmark.Bench) -> report.Part:
    """Turn by turn over the sizes, so that the machine is the same for all; through the child process, as the agent does."""
    folder = bench.fresh_directory("sizes")
    folder.mkdir(parents=True)
    probers = [_prober(folder, count) for count in COUNTS]
    seconds: list[list[float]] = [[] for _ in COUNTS]
    try:
        for turn in range(benchmark.WARM_UP + bench.options.probes):
            for index in benchmark.rotated(range(len(COUNTS)), turn):
                seconds[index].append(probe.timed(bench, probers[index].probe))
    finally:
        for prober in probers:
            prober.close()
    kept = [values[benchmark.WARM_UP :] for values in seconds]
    smallest, *larger = COUNTS
    ratios = [
        report.ratio("probe, warm", f"{count} GPUs / {smallest} GPUs", values, kept[0])
        for count, values in zip(larger, kept[1:], strict=True)
    ]
    return report.Part(
        name="sizes",
        series=(
            *(
                report.milliseconds(f"probe of {count} GPUs and {2 * count} NICs, warm", drivers.AGENT, values)
                for count, values in zip(COUNTS, kept, strict=True)
            ),
            *ratios,
        ),
        figures=tuple(
            report.Figure(
                what=f"probe of {count} GPUs, against {smallest}: no more than so many times as many cost",
                limit=count / smallest,
                unit=report.Unit.RATIO,
                measured=ratio.summary.p50,
            )
            for count, ratio in zip(larger, ratios, strict=True)
        ),
    )


def _prober(folder: Path, count: int) -> child.ProbeChild:
    document = folder / f"{count}.yaml"
    document.write_text(machine(count), encoding="utf-8")
    tree = render.render(zoo.load(str(document)), folder / str(count))
    source = child.Source(sys=tree.sys, proc=tree.proc, dev=tree.dev, mock=tree.directory)
    return child.ProbeChild(source=source, options=child.ProbeOptions())
