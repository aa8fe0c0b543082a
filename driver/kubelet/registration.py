# SPDX-License-Identifier: Apache-2.0
"""How kubelet gets to know the driver: it reads GetInfo on the registration socket and says by NotifyRegistrationStatus
what came of it. Kubelet repeats the pair after every failure, after its own restart, and when the socket is made anew.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from pathlib import Path

import grpc

from driver.kubelet import wire
from proto.pluginregistration.v1 import api_pb2 as registration_v1

logger = logging.getLogger(__name__)

SERVICE = "pluginregistration.Registration"
PLUGIN_TYPE = "DRAPlugin"

SUPPORTED_VERSIONS = ("v1.DRAPlugin", "v1beta1.DRAPlugin", "v1.DRAResourceHealth", "v1alpha1.DRAResourceHealth")
"""What the service socket serves, as `<version>.<service>`. Kubelet takes the first DRAPlugin of *this* list that it knows,
so the newest stands first; of the health services it takes the newest it knows wherever it stands.
"""

ERROR_MAX_BYTES = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class RegistrationState:
    """Whether kubelet said that it took the driver, and if not, why not as far as is known."""

    registered: bool
    error: str = ""


class RegistrationService:
    """Answers kubelet, and remembers what it said."""

    def __init__(self, *, driver_name: str, socket: Path, endpoint: Path) -> None:
        self._info = registration_v1.PluginInfo(
            type=PLUGIN_TYPE, name=driver_name, endpoint=str(endpoint), supported_versions=SUPPORTED_VERSIONS
        )
        self._socket = socket
        self._lock = threading.Lock()
        self._state = RegistrationState(
            registered=False,
            error=f"Kubelet has not registered the driver yet; it looks for {socket} where it is itself,"
            " so its directory must be mounted here at the same path",
        )

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """The one service."""
        return [
            grpc.method_handlers_generic_handler(
                SERVICE,
                {
                    "GetInfo": grpc.unary_unary_rpc_method_handler(
                        self._get_info,
                        request_deserializer=registration_v1.InfoRequest.FromString,
                        response_serializer=registration_v1.PluginInfo.SerializeToString,
                    ),
                    "NotifyRegistrationStatus": grpc.unary_unary_rpc_method_handler(
                        self._notify,
                        request_deserializer=registration_v1.RegistrationStatus.FromString,
                        response_serializer=registration_v1.RegistrationStatusResponse.SerializeToString,
                    ),
                },
            )
        ]

    def state(self) -> RegistrationState:
        """What kubelet said last."""
        with self._lock:
            return self._state

    def lost(self, reason: str) -> None:
        """The registration socket is not where kubelet looks: it unregisters the driver, without telling it."""
        self._set(RegistrationState(registered=False, error=reason))

    def _set(self, state: RegistrationState) -> None:
        with self._lock:
            before, self._state = self._state, state
        if state == before:
            return
        if state.registered:
            logger.info("Kubelet registered the driver %s through %s", self._info.name, self._socket)
        else:
            logger.warning("The driver %s is not registered: %s", self._info.name, state.error)

    def _get_info(
        self, _request: registration_v1.InfoRequest, _context: grpc.ServicerContext
    ) -> registration_v1.PluginInfo:
        return self._info

    def _notify(
        self, request: registration_v1.RegistrationStatus, context: grpc.ServicerContext
    ) -> registration_v1.RegistrationStatusResponse:
        if not request.plugin_registered:
            error = wire.line(wire.text(request.error, max_bytes=ERROR_MAX_BYTES)) or "kubelet gave no reason"
            self._set(RegistrationState(registered=False, error=f"Kubelet refused the driver: {error}"))
            # An error back is what the helper of Kubernetes answers; kubelet logs it and starts again from GetInfo.
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"the driver is not registered: {error}")
        self._set(RegistrationState(registered=True))
        return registration_v1.RegistrationStatusResponse()
