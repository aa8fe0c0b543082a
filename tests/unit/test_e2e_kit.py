# SPDX-License-Identifier: Apache-2.0
"""What the scenarios on a real node are written with, as far as it is functions of values: an error here would let them pass
or fail for a reason of their own.
"""

from __future__ import annotations

import pytest

from tests.e2e.kit import inside, make, samples
from tests.e2e.kit.api import describe

VIEW = f"""
{inside.MARK}env
PATH=/bin
NEARFIELD_DEVICE_X=GPU-2
OTHER=GPU-1
{inside.MARK}nodes
crw-rw-rw-    1 0        0           1,   3 Nov 29 20:00 nvidia3
crw-rw-rw-    1 0        0         195, 255 Nov 29 20:00 nvidiactl
drwxr-xr-x    2 0        0               80 Nov 29 20:00 nvidia-caps
{inside.MARK}caps
nvidia-cap75
nvidia-cap3
{inside.MARK}mounts
100 90 0:50 / / rw - overlay overlay rw
101 100 8:1 /lib/libcuda.so.1 /usr/lib64/libcuda.so.1 ro - ext4 /dev/sda1 rw
{inside.MARK}end
"""

PAGE = """\
# HELP dra_calls calls
# TYPE dra_calls counter
dra_calls_total{driver="a",code="OK"} 2
dra_calls_total{driver="b",code="OK"} 3
# HELP other_gauge other
# TYPE other_gauge gauge
other_gauge 7
"""


def test_the_view_of_a_container_is_read() -> None:
    seen = inside.parse(VIEW)
    assert seen.env["PATH"] == "/bin"
    assert seen.gpu_uuids == ("GPU-1", "GPU-2")
    assert seen.nodes == {"/dev/nvidia3": (1, 3), "/dev/nvidiactl": (195, 255)}
    assert seen.gpu_nodes == ("/dev/nvidia3",)
    assert seen.caps == ("/dev/nvidia-caps/nvidia-cap3", "/dev/nvidia-caps/nvidia-cap75")
    assert seen.mounts == {"/": "/", "/usr/lib64/libcuda.so.1": "/lib/libcuda.so.1"}


def test_half_a_view_is_not_a_view_of_nothing() -> None:
    with pytest.raises(AssertionError, match="not the whole view"):
        inside.parse(VIEW.partition(f"{inside.MARK}end")[0])


def test_metrics_are_found_by_name_and_labels() -> None:
    page = samples.parse(PAGE)
    assert page.total("dra_calls_total", code="OK") == 5
    assert page.one("dra_calls_total", driver="b") == 3
    assert page.total("dra_calls_total", driver="c") == 0
    with pytest.raises(AssertionError, match="2 series"):
        page.one("dra_calls_total")
    assert {line.name for line in samples.parse(PAGE, only="dra_").lines} == {"dra_calls_total"}


def test_claims_of_a_pod_and_of_a_container_are_written_short() -> None:
    pod = make.pod("p", claims={"a": "template:t", "b": "named"}, containers=[make.container(claims=["a/x", "b"])])
    assert pod["spec"]["resourceClaims"] == [
        {"name": "a", "resourceClaimTemplateName": "t"},
        {"name": "b", "resourceClaimName": "named"},
    ]
    assert pod["spec"]["containers"][0]["resources"] == {"claims": [{"name": "a", "request": "x"}, {"name": "b"}]}


def test_an_object_is_described_by_what_is_wrong_with_it() -> None:
    pod = {
        "metadata": {"name": "p"},
        "status": {
            "phase": "Pending",
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "False", "reason": "ContainersNotReady"},
            ],
            "containerStatuses": [{"name": "main", "state": {"waiting": {"reason": "CreateContainerError"}}}],
        },
    }
    assert describe(pod) == "phase Pending; Ready=False ContainersNotReady; main waiting CreateContainerError"
    assert describe(None) == "no such object"
