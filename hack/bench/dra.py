# SPDX-License-Identifier: Apache-2.0
"""A raw client of a driver's sockets: what kubelet sends, and the time until the answer. No retries, no kubelet."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from hack.bench import claims
from hack.bench.errors import BenchError
from proto.dra.v1 import api_pb2, api_pb2_grpc
from proto.dra_health.v1 import api_pb2 as health_pb2
from proto.dra_health.v1 import api_pb2_grpc as health_pb2_grpc
from proto.pluginregistration.v1 import api_pb2 as registration_pb2
from proto.pluginregistration.v1 import api_pb2_grpc as registration_pb2_grpc

RPC_TIMEOUT_S = 45.0
"""Kubelet's own."""

CLAIM_SERVICE = "v1.DRAPlugin"
_MAX_CONNECT_PAUSE_MS = 20


def answers(path: Path) -> bool:
    """Whether somebody accepts connections on this socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        try:
            connection.connect(str(path))
        except OSError:
            return False
    return True


def _channel(path: Path) -> grpc.Channel:
    return grpc.insecure_channel(
        f"unix:{path}",
        options=(
            # A channel of its own for every driver and every start: no connection of an earlier process is met again.
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.initial_reconnect_backoff_ms", _MAX_CONNECT_PAUSE_MS),
            ("grpc.min_reconnect_backoff_ms", _MAX_CONNECT_PAUSE_MS),
            ("grpc.max_reconnect_backoff_ms", _MAX_CONNECT_PAUSE_MS),
        ),
    )


def register(path: Path) -> None:
    """The handshake of kubelet on a registration socket."""
    with _channel(path) as channel:
        stub = registration_pb2_grpc.RegistrationStub(channel)
        info = stub.GetInfo(registration_pb2.InfoRequest(), timeout=RPC_TIMEOUT_S, wait_for_ready=True)
        if CLAIM_SERVICE not in info.supported_versions:
            raise BenchError(f"{path} announces {list(info.supported_versions)}, not {CLAIM_SERVICE}")
        status = registration_pb2.RegistrationStatus(plugin_registered=True)
        stub.NotifyRegistrationStatus(status, timeout=RPC_TIMEOUT_S)


class Client:
    """Calls on one DRA socket, over one connection as kubelet keeps it. Every method answers the seconds it took."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._channel = _channel(path)
        self._stub = api_pb2_grpc.DRAPluginStub(self._channel)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connection; an open health stream ends."""
        self._channel.close()

    def prepare(self, *wanted: claims.Claim) -> float:
        """One NodePrepareResources. BenchError unless every claim is prepared, with at least one device. None wanted: whether
        the driver serves.
        """
        request = api_pb2.NodePrepareResourcesRequest(claims=_claims(wanted))
        began = time.perf_counter()
        response = self._stub.NodePrepareResources(request, timeout=RPC_TIMEOUT_S, wait_for_ready=True)
        took = time.perf_counter() - began
        self._check_prepared(wanted, response.claims)
        return took

    def prepare_side_by_side(self, wanted: Sequence[claims.Claim]) -> float:
        """A NodePrepareResources for each claim, all at once, until the last is answered."""
        requests = [api_pb2.NodePrepareResourcesRequest(claims=_claims([claim])) for claim in wanted]
        began = time.perf_counter()
        calls = [self._stub.NodePrepareResources.future(request, timeout=RPC_TIMEOUT_S) for request in requests]
        responses = [call.result() for call in calls]
        took = time.perf_counter() - began
        for claim, response in zip(wanted, responses, strict=True):
            self._check_prepared([claim], response.claims)
        return took

    def unprepare(self, *wanted: claims.Claim) -> float:
        """One NodeUnprepareResources. BenchError unless every claim is unprepared."""
        request = api_pb2.NodeUnprepareResourcesRequest(claims=_claims(wanted))
        began = time.perf_counter()
        response = self._stub.NodeUnprepareResources(request, timeout=RPC_TIMEOUT_S)
        took = time.perf_counter() - began
        for claim in wanted:
            if claim.uid not in response.claims or response.claims[claim.uid].error:
                raise BenchError(f"{self._path}: claim {claim.name} was not unprepared: {response}")
        return took

    def watch_health(self) -> None:
        """Open the health stream as kubelet does, and take its messages until the client is closed."""
        stub = health_pb2_grpc.DRAResourceHealthStub(self._channel)
        stream = stub.NodeWatchResources(health_pb2.NodeWatchResourcesRequest())
        threading.Thread(target=_drain, args=(stream,), name="health", daemon=True).start()

    def _check_prepared(
        self, wanted: Sequence[claims.Claim], answered: Mapping[str, api_pb2.NodePrepareResourceResponse]
    ) -> None:
        for claim in wanted:
            answer = answered.get(claim.uid)
            if answer is None or answer.error or not answer.devices:
                raise BenchError(f"{self._path}: claim {claim.name} was not prepared: {answer}")


def _drain(stream: Iterable[health_pb2.NodeWatchResourcesResponse]) -> None:
    with contextlib.suppress(grpc.RpcError):  # how a stream of a closed channel ends
        for _ in stream:
            pass


def _claims(wanted: Sequence[claims.Claim]) -> list[api_pb2.Claim]:
    return [api_pb2.Claim(namespace=claims.NAMESPACE, uid=claim.uid, name=claim.name) for claim in wanted]
