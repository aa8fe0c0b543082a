# SPDX-License-Identifier: Apache-2.0
"""How a GPU that is handed out in shares is shown.

- bars: as wide as the memory, a cell for each share, however small and however many
- the row of a table and the item of a list say the same; who has what stays out where the record cannot be read
- sharers that take turns
"""

from __future__ import annotations

import pytest

from driver import values
from driver.cli import shared as shown
from driver.observe import sharers
from driver.sharing import rules
from tests.fakes import portions, publishing
from tests.fakes.portions import GIB

GPU = values.gpu_device_name(publishing.at(1))


def one(*uses: sharers.Use, policy: rules.Policy | None = None) -> sharers.Shared:
    policies = {publishing.at(1): policy or portions.policy()}
    (found,) = sharers.shared(publishing.snapshot(publishing.gpu(1)), policies=policies, used=uses)
    return found


def test_bars() -> None:
    assert shown.bar(one()) == "|" + "." * 40 + "|"
    two = one(portions.use(GPU, 1, gib=20, compute=25), portions.use(GPU, 2, gib=20, compute=50))
    assert shown.bar(two) == "|20G======|20G======|" + "." * 20 + "|"
    assert shown.bar(one(portions.use(GPU, 1, gib=20, compute=100))) == "|20G======|" + "x" * 30 + "|"
    assert shown.bar(one(portions.use(GPU, 1, gib=79, compute=100))) == "|" + "79G".ljust(39, "=") + "||"
    assert shown.bar(one(), known=False) == "|" + "?" * 40 + "|"
    half = one(portions.use(GPU, 1, gib=0.5, compute=5), policy=portions.policy(memory_step=GIB // 2))
    assert shown.bar(half).startswith("|.")


@pytest.mark.parametrize("number", range(1, 129, 7))
def test_bars_of_many_shares_are_as_wide_as_any(number: int) -> None:
    policy = portions.policy(memory_step=GIB // 4, compute_step=1, max_sharers=128)
    uses = [portions.use(GPU, index, gib=0.25 * (1 + index % 5), compute=0) for index in range(number)]
    assert len(shown.bar(one(*uses, policy=policy))) == 42


def test_a_row() -> None:
    found = one(portions.use(GPU, 1, gib=20, compute=25))
    bar = "|20G======|" + "." * 30 + "|"
    assert shown.row(found, known=True) == (GPU, "cgroup, mps", bar, "59.0 GiB", "25 of 100 %", "75 %", "1 of 8")
    unknown = ("|" + "?" * 40 + "|", "-", "100 %", "-", "? of 8")
    assert shown.row(found, known=False) == (GPU, "cgroup, mps", *unknown)
    turns = one(portions.use(GPU, 1, gib=20), policy=portions.policy(enforcement=portions.TURNS))
    assert shown.row(turns, known=True)[4:] == ("turns", "-", "1 of 8")


def test_an_item() -> None:
    found = one(portions.use(GPU, 1, gib=20, compute=25, memory_limit=20 * GIB, soft_limit=10 * GIB, compute_limit=20))
    whole = shown.item(found, known=True)
    assert whole["memory"] == {
        "value": 81559 << 20,
        "step": GIB,
        "given": 20 * GIB,
        "free": 59 * GIB,
        "stranded": (81559 << 20) - 79 * GIB,
    }
    assert whole["compute"] == {"value": 100, "step": 5, "default": 100, "given": 25, "free": 75, "stranded": 0}
    assert whole["sharers"] == {"most": 8, "now": 1}
    assert whole["shares"] == [
        {
            "namespace": "team",
            "name": "claim-1",
            "uid": "u-1",
            "shareId": "share-1",
            "memory": 20 * GIB,
            "compute": 25,
            "memoryLimit": 20 * GIB,
            "softLimit": 10 * GIB,
            "computeLimit": 20,
        }
    ]
    unknown = shown.item(found, known=False)
    assert unknown["memory"] == {"value": 81559 << 20, "step": GIB}
    assert unknown["sharers"] == {"most": 8}
    assert "shares" not in unknown
    assert "compute" not in shown.item(one(policy=portions.policy(enforcement=portions.TURNS)), known=True)


def test_amounts() -> None:
    assert shown.amounts(portions.use(GPU, 1, gib=20, compute=25)) == "20G, 25 %"
    assert shown.amounts(portions.use(GPU, 1, gib=1.5)) == "1536M"
