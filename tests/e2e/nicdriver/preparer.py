# SPDX-License-Identifier: Apache-2.0
"""What the driver does for a claim: a CDI file with the RDMA device nodes of its NICs, and a variable that names each of them.

dranet itself moves interfaces into the pod by NRI; a mock machine has none to move.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from driver import values
from tests.e2e.kit.api import Api, Json
from tests.e2e.nicdriver import inventory

KIND = f"{inventory.DRIVER}/nic"


class Preparer:
    """Stands behind the DRA service. Keeps nothing but the CDI files."""

    def __init__(self, api: Api, *, machine: Path, cdi_dir: Path) -> None:
        self._api = api
        self._machine = machine
        self._cdi_dir = cdi_dir

    def prepare(
        self, refs: Sequence[values.ClaimRef], call: values.Call
    ) -> Mapping[values.ClaimUid, values.Prepared | values.Failed]:
        """A CDI device for each NIC of these claims."""
        del call
        return {ref.uid: self._prepare(ref) for ref in refs}

    def unprepare(
        self, refs: Sequence[values.ClaimRef], call: values.Call
    ) -> Mapping[values.ClaimUid, values.Unprepared | values.Failed]:
        """Removes their files."""
        del call
        for ref in refs:
            self._file(ref).unlink(missing_ok=True)
        return {ref.uid: values.Unprepared() for ref in refs}

    def _prepare(self, ref: values.ClaimRef) -> values.Prepared:
        claim = self._api.get("ResourceClaim", ref.name, ref.namespace)
        assert claim["metadata"]["uid"] == ref.uid, claim["metadata"]
        results = [
            result
            for result in claim["status"]["allocation"]["devices"]["results"]
            if result["driver"] == inventory.DRIVER
        ]
        spec = {
            "cdiVersion": "0.5.0",
            "kind": KIND,
            "devices": [self._device(ref, result) for result in results],
        }
        temporary = self._file(ref).with_suffix(".tmp")
        temporary.write_text(json.dumps(spec))
        temporary.rename(self._file(ref))
        return values.Prepared(
            devices=tuple(
                values.PreparedDevice(
                    request_names=(result["request"].partition("/")[0],),
                    pool=result["pool"],
                    device=result["device"],
                    cdi_device_ids=(f"{KIND}={_cdi_name(ref, result)}",),
                )
                for result in results
            )
        )

    def _device(self, ref: values.ClaimRef, result: Json) -> Json:
        address = inventory.address_of(result["device"])
        return {
            "name": _cdi_name(ref, result),
            "containerEdits": {
                "env": [f"NIC_{result['device'].replace('-', '_').upper()}={address}"],
                "deviceNodes": [
                    {"path": path, "hostPath": "/dev/null"}
                    for path in inventory.character_devices(self._machine, address)
                ],
            },
        }

    def _file(self, ref: values.ClaimRef) -> Path:
        return self._cdi_dir / f"{inventory.DRIVER}_{ref.uid}.json"


def _cdi_name(ref: values.ClaimRef, result: Json) -> str:
    return f"{ref.uid}-{result['device']}"
