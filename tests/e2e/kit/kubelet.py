# SPDX-License-Identifier: Apache-2.0
"""Kubelet's own view: its metrics, and which devices it says containers have (the PodResources API)."""

from __future__ import annotations

import ssl
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass

import grpc

from driver import values
from hack.realnode.layout import Layout
from proto.podresources.v1 import api_pb2, api_pb2_grpc
from tests.e2e.kit import samples
from tests.e2e.kit.api import Api

PORT = 10250
TIMEOUT_S = 60.0
ANY_DRIVER = "<any>"


@dataclass(frozen=True, slots=True)
class Given:
    """A device that a container has, as kubelet says. `cdi_ids`: entry k of a claim lists those of the devices before it too."""

    claim: str
    driver: str
    pool: str
    device: str
    cdi_ids: tuple[str, ...]
    share_id: str | None


class Kubelet:
    """The kubelet of the node."""

    def __init__(self, api: Api, layout: Layout) -> None:
        self._api = api
        self._node = layout.node_name
        self._socket = layout.kubelet_dir / "pod-resources/kubelet.sock"

    def metrics(self, *, only: str = "") -> samples.Samples:
        """Its own metrics, or those whose names begin with `only`."""
        addresses = self._api.get("Node", self._node)["status"]["addresses"]
        (address,) = (item["address"] for item in addresses if item["type"] == "InternalIP")
        unchecked = ssl.create_default_context()
        unchecked.check_hostname = False
        unchecked.verify_mode = ssl.CERT_NONE
        with urllib.request.urlopen(f"https://{address}:{PORT}/metrics", timeout=TIMEOUT_S, context=unchecked) as page:
            return samples.parse(page.read().decode(), only=only)

    def claims_in_use(self, driver: str = ANY_DRIVER) -> int:
        """How many claims it has prepared and not unprepared, of a driver or of any."""
        return int(self.metrics(only="dra_").total("dra_resource_claims_in_use", driver_name=driver))

    def calls(self, method: str, *, driver: str = values.DRIVER_NAME, code: str | None = None) -> int:
        """How many calls it made to a driver (`NodePrepareResources`), with one gRPC status (`OK`) or any."""
        labels = {"driver_name": driver} | ({"grpc_status_code": code} if code is not None else {})
        lines = self.metrics(only="dra_").matching("dra_grpc_operations_duration_seconds_count", **labels)
        return int(sum(line.value for line in lines if line.labels["method_name"].endswith(method)))

    def pod_resources(self, namespace: str, pod: str) -> Mapping[str, tuple[Given, ...]]:
        """The DRA devices of each container of a pod."""
        with grpc.insecure_channel(f"unix:{self._socket}") as channel:
            lister = api_pb2_grpc.PodResourcesListerStub(channel)
            answer = lister.Get(
                api_pb2.GetPodResourcesRequest(pod_name=pod, pod_namespace=namespace), timeout=TIMEOUT_S
            )
        return {
            container.name: tuple(
                Given(
                    claim=resource.claim_name,
                    driver=device.driver_name,
                    pool=device.pool_name,
                    device=device.device_name,
                    cdi_ids=tuple(cdi.name for cdi in device.cdi_devices),
                    share_id=device.share_id if device.HasField("share_id") else None,
                )
                for resource in container.dynamic_resources
                for device in resource.claim_resources
            )
            for container in answer.pod_resources.containers
        }
