# SPDX-License-Identifier: Apache-2.0
"""Machines whose `nvidia-smi topo -m` is published: this probe sees the same classes, NVLinks, CPUs and NUMA nodes.

The tables lie in `matrices/`, as people know them, each with its source. They were written down by hand and are the judge here:
where they and the code differ, the code or the machine is wrong. So no program writes them, and their digests stand here.

- `<machine>.txt`: `nvidia-smi topo -m`
- `<machine>.pci.txt`: `nvidia-smi topo -mp`, which leaves NVLinks out and shows what lies below them
"""

from __future__ import annotations

import hashlib
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from discovery import matrix, model, paths

FOLDER = Path(__file__).parent / "matrices"
ROOT = FOLDER.parents[2]

DIGESTS = {
    "dgx-1-v100.pci.txt": "8cc0c19e13d1201a079b4c2b6772eedfeebb83a876edec02c5e33fbda8d2fe20",
    "dgx-1-v100.txt": "beef0b6d044ff925b2be9ca10325cbf309f62acebd9b6c20e6cc5110c5fa4054",
    "dgx-2-v100.pci.txt": "e563f021d577ba32897556771e1a2b1905212a9e47ae98cb3f496599ffafe8b6",
    "dgx-2-v100.txt": "3365c04f2d99944e7090debe4fa2c55838d792dac857d76556719860f85b8cd9",
    "dgx-a100-40gb.txt": "b5e1d4e0559fedd47f8f9e6cf66c44c7105c441861c9e426d3749299259ef727",
    "dgx-h100.txt": "f9595b93d62d53fa0beaad61e7e8e313eadf5364599ba72337146e13ab62a383",
    "hgx-h200.txt": "fdff86fc9ae71fb967a12a33f499e1a10ddbf91a4e521a8a396d1f698b8097ca",
    "l40s-4-pcie.txt": "69e7a1ea09cb73e1fd46d67394072776c32cfdeedc603bdadf31a125eb0e468f",
}
"""SHA-256 of each table. A change of one is a change here too, made by a person who looked at the source again."""

DEVICE = re.compile(r"GPU[0-9]+|mlx5_[0-9]+")
CLASS = re.compile(r"X|NV[0-9]+|PIX|PXB|PHB|NODE|SYS")


@dataclass(frozen=True)
class Table:
    """A published table: what it says of each pair, and of each row."""

    cells: Mapping[tuple[str, str], str] = field(default_factory=dict)
    cpus: Mapping[str, str] = field(default_factory=dict)
    nodes: Mapping[str, str] = field(default_factory=dict)


def parse(text: str) -> Table:
    """A table as nvidia-smi prints it, with tabs; rows may be missing, and cells at the end of a row."""
    lines = [line.split("\t") for line in text.splitlines() if line and not line.startswith("#")]
    header, rows = lines[0], lines[1:]
    columns = [name for name in header if DEVICE.fullmatch(name)]
    assert header[: len(columns) + 1] == ["", *columns]
    assert set(header[len(columns) + 1 :]) <= {"CPU Affinity", "NUMA Affinity", "GPU NUMA ID"}
    cells: dict[tuple[str, str], str] = {}
    further: dict[str, dict[str, str]] = {"CPU Affinity": {}, "NUMA Affinity": {}, "GPU NUMA ID": {}}
    for name, *row in rows:
        assert DEVICE.fullmatch(name)
        assert len(row) >= len(columns)
        for column, cell in zip(columns, row, strict=False):
            assert CLASS.fullmatch(cell), (name, column, cell)
            assert (name, column) not in cells
            cells[name, column] = cell
        for title, cell in zip(header[len(columns) + 1 :], row[len(columns) :], strict=False):
            further[title][name] = cell
    return Table(cells, further["CPU Affinity"], further["NUMA Affinity"])


def published(name: str) -> Table:
    """A table of the folder."""
    return parse((FOLDER / name).read_text(encoding="utf-8"))


def machine_of(name: str) -> str:
    return name.removesuffix(".txt").removesuffix(".pci")


def as_seen(snapshot: model.Snapshot, *, nvlinks: bool) -> Table:
    """The same of a Snapshot. NICs go by their RDMA device, as in the legend of nvidia-smi; it shows no others."""
    seen = matrix.build(snapshot)
    rdma = {nic.address: nic.rdma_devices[0].name for nic in snapshot.nics if nic.rdma_devices}
    gpus = {gpu.address for gpu in snapshot.gpus}
    rows = [row for row in seen.rows if row.pci.address in gpus or row.pci.address in rdma]
    names = [rdma.get(row.pci.address, row.label) for row in rows]
    columns = [seen.labels.index(row.label) for row in rows]
    cells = {
        (name, other): row.paths[at]
        for name, row in zip(names, rows, strict=True)
        for other, at in zip(names, columns, strict=True)
    }
    if not nvlinks:
        by_address = {row.pci.address: name for name, row in zip(names, rows, strict=True)}
        for path in paths.between_all(snapshot):
            if path.a in by_address and path.b in by_address:
                a, b = by_address[path.a], by_address[path.b]
                cells[a, b] = cells[b, a] = path.path_class.value
    of_gpus = {name: row.pci for name, row in zip(names, rows, strict=True) if row.pci.address in gpus}
    return Table(
        cells=cells,
        cpus={name: matrix.ranges(pci.cpus or ()) for name, pci in of_gpus.items()},
        nodes={name: str(pci.numa_node) for name, pci in of_gpus.items()},
    )


TABLES = pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.glob("*.txt")))


@TABLES
def test_a_machine_is_wired_as_published(name: str, seen: Mapping[str, model.Snapshot]) -> None:
    table = published(name)
    ours = as_seen(seen[machine_of(name)], nvlinks=".pci" not in name)
    assert {pair: ours.cells.get(pair) for pair in table.cells} == table.cells
    assert {device: ours.cpus.get(device) for device in table.cpus} == table.cpus
    assert {device: ours.nodes.get(device) for device in table.nodes} == table.nodes


@TABLES
def test_a_machine_has_the_published_devices_and_no_others(name: str, seen: Mapping[str, model.Snapshot]) -> None:
    table = published(name)
    there = {device for pair in table.cells for device in pair}
    ours = {device for pair in as_seen(seen[machine_of(name)], nvlinks=True).cells for device in pair}
    if name == "dgx-2-v100.pci.txt":  # its source leaves six NICs out
        ours = {device for device in ours if device not in {f"mlx5_{number}" for number in range(4, 10)}}
    assert ours == there


@TABLES
def test_a_table_names_its_source_and_says_the_same_both_ways(name: str) -> None:
    text = (FOLDER / name).read_text(encoding="utf-8")
    comment = " ".join(line.removeprefix("# ") for line in text.splitlines() if line.startswith("# "))
    assert re.search(r"Source: .*https://", comment)
    cells = published(name).cells
    assert {pair: cells[pair[::-1]] for pair in cells if pair[::-1] in cells} == {
        pair: cell for pair, cell in cells.items() if pair[::-1] in cells
    }
    assert {a for (a, b), cell in cells.items() if (a == b) != (cell == "X")} == set()


def test_the_machines_that_must_have_a_table_have_one() -> None:
    assert {"dgx-1-v100", "dgx-2-v100", "dgx-a100-40gb", "dgx-h100", "l40s-4-pcie"} <= {
        machine_of(path.name) for path in FOLDER.iterdir()
    }


def test_nobody_but_a_person_changes_a_table() -> None:
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in FOLDER.iterdir()}
    assert digests == DIGESTS
    here = Path(__file__).relative_to(ROOT).as_posix()
    names = subprocess.run(
        ["git", "grep", "--untracked", "-lE", "machines/matrices|[\"']matrices[\"']"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.split()
    assert {name for name in names if not name.endswith(".md")} == {here}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("\tGPU0\tGPU1\nGPU0\tX\tPIX\nGPU1\tPIX\n", "a row that ends early"),
        ("\tGPU0\tGPU1\nGPU0\tX\tPICS\nGPU1\tPICS\tX\n", "a class that there is not"),
        ("\tGPU0\nGPU0\tX\nGPU0\tX\n", "a row twice"),
        ("\tGPU0\tPower\nGPU0\tX\t12\n", "a column that there is not"),
    ],
)
def test_a_table_that_is_none_is_refused(text: str, said: str) -> None:
    with pytest.raises(AssertionError):
        parse(text)
    assert said
