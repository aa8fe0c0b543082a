# SPDX-License-Identifier: Apache-2.0
"""What a container gets to be a client of its share."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import PurePosixPath

from driver.mps import shares

DIRECTORY = PurePosixPath("/run/nearfield/mps")
SHARE = shares.Share(
    device="gpu-0000-1b-00-0",
    uuid="GPU-8f0a2f5c-1111-2222-3333-444455556666",
    share_id="6a9f1c3e-7a4f-4f0e-9d61-5f0a6b9f0c11",
    protocol=shares.Protocol.V3,
    memory=20 << 30,
    compute=25,
)


def test_a_client_of_v3_gets_the_folder_of_its_namespace_alone() -> None:
    made = shares.edits(DIRECTORY, SHARE)
    place = f"/run/nearfield/mps/gpu-0000-1b-00-0/pipes/shares/{SHARE.namespace}"
    assert made == shares.Edits(environment=(("CUDA_MPS_PIPE_DIRECTORY", place),), mounts=((place, place),))
    assert len(f"{place}/control") <= 107


def test_namespaces_are_spelled_as_mps_takes_them_and_differ() -> None:
    assert re.fullmatch(r"[a-z0-9_]{1,64}", SHARE.namespace)
    assert replace(SHARE, share_id="other").namespace != SHARE.namespace


def test_a_client_of_legacy_mps_has_its_limits_in_its_environment() -> None:
    made = shares.edits(DIRECTORY, replace(SHARE, protocol=shares.Protocol.LEGACY, below_normal=True))
    assert made.environment == (
        ("CUDA_MPS_PIPE_DIRECTORY", "/run/nearfield/mps/gpu-0000-1b-00-0/pipes"),
        ("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", "25"),
        ("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", "GPU-8f0a2f5c-1111-2222-3333-444455556666=20480M"),
        ("CUDA_MPS_CLIENT_PRIORITY", "1"),
    )
    assert made.mounts == (
        ("/run/nearfield/mps/gpu-0000-1b-00-0/pipes", "/run/nearfield/mps/gpu-0000-1b-00-0/pipes"),
        ("/run/nearfield/mps/gpu-0000-1b-00-0/shm", "/dev/shm"),
    )


def test_no_limit_leaves_nothing_behind() -> None:
    free = replace(SHARE, protocol=shares.Protocol.LEGACY, memory=None, compute=None)
    assert shares.edits(DIRECTORY, free).environment == (
        ("CUDA_MPS_PIPE_DIRECTORY", "/run/nearfield/mps/gpu-0000-1b-00-0/pipes"),
    )
