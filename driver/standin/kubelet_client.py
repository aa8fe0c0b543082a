# SPDX-License-Identifier: Apache-2.0
"""How kubelet calls a DRA plugin, and what it makes of the answer (pkg/kubelet/cm/dra/manager.go, Kubernetes 1.37)."""

from __future__ import annotations

import os
import socket
import urllib.parse
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

import grpc

from driver import values
from driver.errors import DriverError
from proto.dra.v1 import api_pb2 as dra_v1
from proto.dra.v1 import api_pb2_grpc as dra_v1_grpc
from proto.dra.v1beta1 import api_pb2 as dra_v1beta1
from proto.dra.v1beta1 import api_pb2_grpc as dra_v1beta1_grpc

Version: TypeAlias = Literal["v1", "v1beta1"]

CALL_TIMEOUT_S: Final = 45.0

Prepared: TypeAlias = Mapping[values.ClaimUid, values.Prepared | values.Failed]
Unprepared: TypeAlias = Mapping[values.ClaimUid, values.Unprepared | values.Failed]


class KubeletError(DriverError):
    """What kubelet would put into the pod's events: no plugin, no answer, or one that it cannot use."""


def open_channel(socket_path: Path) -> grpc.Channel:
    """A connection of its own to a unix socket, which looks for the socket again after 0.1 to 1 s when it is lost."""
    return grpc.insecure_channel(
        f"unix:{urllib.parse.quote(os.fspath(socket_path))}",
        options=(
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 100),
            ("grpc.max_reconnect_backoff_ms", 1000),
        ),
    )


class Connection:
    """Whether somebody serves a socket, learned from a connection that is held open and never used.

    Kubelet learns it from its gRPC connection, which in Python cannot be watched and then closed in good order: grpcio's
    watching thread dies with a traceback.
    """

    def __init__(self, socket_path: Path) -> None:
        self._path = socket_path
        self._socket: socket.socket | None = None

    def alive(self) -> bool:
        """Whether the other end is there, now. Looks for it again when it was not."""
        return self._held() or self._connect()

    def close(self) -> None:
        """Let go."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _held(self) -> bool:
        if self._socket is None:
            return False
        try:
            while self._socket.recv(4096):
                pass  # the server's side of an HTTP/2 greeting
        except BlockingIOError:
            return True
        except OSError:
            pass
        # The end, or the server got tired of a client that says nothing: then it takes another connection at once.
        self.close()
        return False

    def _connect(self) -> bool:
        client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        client.setblocking(False)
        try:
            client.connect(os.fspath(self._path))
        except OSError:
            client.close()
            return False
        self._socket = client
        return True


class DraClient:
    """Calls one service socket. `v1` and `v1beta1` are the bare stubs, for a caller that measures or sends odd messages.

    `channel`, where given, is used and stays the caller's.
    """

    def __init__(self, socket_path: Path, *, channel: grpc.Channel | None = None) -> None:
        self._owned = channel is None
        self._channel = open_channel(socket_path) if channel is None else channel
        self.v1 = dra_v1_grpc.DRAPluginStub(self._channel)
        self.v1beta1 = dra_v1beta1_grpc.DRAPluginStub(self._channel)

    def close(self) -> None:
        """End the connection."""
        if self._owned:
            self._channel.close()

    def prepare(
        self, claims: Sequence[values.ClaimRef], *, version: Version = "v1", timeout_s: float = CALL_TIMEOUT_S
    ) -> Prepared:
        """All claims in one call; one entry for each. Raises KubeletError where kubelet could not use the answer."""
        response: dra_v1.NodePrepareResourcesResponse | dra_v1beta1.NodePrepareResourcesResponse
        try:
            if version == "v1":
                response = self.v1.NodePrepareResources(
                    dra_v1.NodePrepareResourcesRequest(claims=_v1(claims)), timeout=timeout_s
                )
            else:
                response = self.v1beta1.NodePrepareResources(
                    dra_v1beta1.NodePrepareResourcesRequest(claims=_v1beta1(claims)), timeout=timeout_s
                )
        except grpc.RpcError as error:
            raise _rpc_failed("NodePrepareResources", error) from error
        _check("NodePrepareResources", claims, response.claims)
        return {
            values.ClaimUid(uid): values.Failed(message=entry.error)
            if entry.error
            else values.Prepared(devices=tuple(_device(device) for device in entry.devices))
            for uid, entry in response.claims.items()
        }

    def unprepare(
        self, claims: Sequence[values.ClaimRef], *, version: Version = "v1", timeout_s: float = CALL_TIMEOUT_S
    ) -> Unprepared:
        """The same for the other direction."""
        response: dra_v1.NodeUnprepareResourcesResponse | dra_v1beta1.NodeUnprepareResourcesResponse
        try:
            if version == "v1":
                response = self.v1.NodeUnprepareResources(
                    dra_v1.NodeUnprepareResourcesRequest(claims=_v1(claims)), timeout=timeout_s
                )
            else:
                response = self.v1beta1.NodeUnprepareResources(
                    dra_v1beta1.NodeUnprepareResourcesRequest(claims=_v1beta1(claims)), timeout=timeout_s
                )
        except grpc.RpcError as error:
            raise _rpc_failed("NodeUnprepareResources", error) from error
        _check("NodeUnprepareResources", claims, response.claims)
        return {
            values.ClaimUid(uid): values.Failed(message=entry.error) if entry.error else values.Unprepared()
            for uid, entry in response.claims.items()
        }


def _v1(claims: Iterable[values.ClaimRef]) -> list[dra_v1.Claim]:
    return [dra_v1.Claim(namespace=claim.namespace, uid=claim.uid, name=claim.name) for claim in claims]


def _v1beta1(claims: Iterable[values.ClaimRef]) -> list[dra_v1beta1.Claim]:
    return [dra_v1beta1.Claim(namespace=claim.namespace, uid=claim.uid, name=claim.name) for claim in claims]


def _device(device: dra_v1.Device | dra_v1beta1.Device) -> values.PreparedDevice:
    share_id = None
    if isinstance(device, dra_v1.Device) and device.HasField("share_id"):
        share_id = device.share_id
    return values.PreparedDevice(
        request_names=tuple(device.request_names),
        pool=device.pool_name,
        device=device.device_name,
        cdi_device_ids=tuple(device.cdi_device_ids),
        share_id=share_id,
    )


def _check(method: str, claims: Sequence[values.ClaimRef], answered: Iterable[str]) -> None:
    asked = {claim.uid for claim in claims}
    found = set(answered)
    if unasked := sorted(found - asked):
        raise KubeletError(f"{method} returned result for unknown claim UID {', '.join(unasked)}")
    # Kubelet compares numbers: a claim that stands twice in its request and once in the answer counts as skipped.
    if skipped := len(claims) - len(found):
        raise KubeletError(f"{method} skipped {skipped} ResourceClaims")


def _rpc_failed(method: str, error: grpc.RpcError) -> KubeletError:
    return KubeletError(f"{method}: rpc error: {describe(error)}")


def describe(error: grpc.RpcError) -> str:
    """Status and text of a failed call."""
    return f"code = {error.code().name} desc = {error.details()}"
