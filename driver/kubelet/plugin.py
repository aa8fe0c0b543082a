# SPDX-License-Identifier: Apache-2.0
"""The DRA service, in both versions: kubelet's messages on one side, the driver's values on the other.

Kubelet throws the whole answer away when the RPC fails, when a claim it asked for is missing, or when one it did not ask
for is there (pkg/kubelet/cm/dra/manager.go). So a claim's trouble, whatever it is, stands in that claim's entry, and
there is exactly one entry for every UID of the request.

This is the RPC door: it names the call for the log, hands the deadline down, and turns what nobody foresaw into the
error of the claims concerned, with the traceback in the log.
"""

from __future__ import annotations

import functools
import itertools
import logging
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, TypeAlias

import grpc

from driver import context as log_context
from driver import values
from driver.kubelet import wire
from proto.dra.v1 import api_pb2 as dra_v1

logger = logging.getLogger(__name__)

SERVICE_V1 = "k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin"
SERVICE_V1BETA1 = "k8s.io.kubelet.pkg.apis.dra.v1beta1.DRAPlugin"
PREPARE = "NodePrepareResources"
UNPREPARE = "NodeUnprepareResources"

KUBELET_DEADLINE_S = 45.0
"""How long kubelet waits for an answer (defaultClientCallTimeout of pkg/kubelet/cm/dra/plugin). Nobody gets longer."""

ERROR_MAX_BYTES = 4096
"""An answer over 4 MiB is lost at kubelet, and the Event that people read holds 1 KiB of this."""

_UID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
"""Wider than the UUIDs of the API server, narrow enough to be part of a file name."""
_NAMESPACE = re.compile(r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?")
_NAME = re.compile(r"(?=.{1,253}\Z)[a-z0-9](?:[a-z0-9-]*[a-z0-9])?(?:\.[a-z0-9](?:[a-z0-9-]*[a-z0-9])?)*")

_Outcome: TypeAlias = values.Prepared | values.Unprepared | values.Failed


class Preparer(Protocol):
    """Who does the work. One entry for each ref; a claim's trouble is `Failed`, never an exception."""

    def prepare(
        self, refs: Sequence[values.ClaimRef], call: values.Call
    ) -> Mapping[values.ClaimUid, values.Prepared | values.Failed]:
        """Make the devices of these claims ready; again for a claim that is ready, with the same answer."""

    def unprepare(
        self, refs: Sequence[values.ClaimRef], call: values.Call
    ) -> Mapping[values.ClaimUid, values.Unprepared | values.Failed]:
        """Give up the devices of these claims; also of claims that are unknown here."""


class RpcObserver(Protocol):
    """Who counts calls."""

    def rpc(self, method: str, *, seconds: float, ok: bool) -> None:
        """A call of `method` was answered; `ok`: no claim of it failed."""


class RpcCall:
    """The `values.Call` of one RPC. The deadline is taken once and kept on a clock that nobody sets back."""

    def __init__(self, context: grpc.ServicerContext, clock: Callable[[], float]) -> None:
        self._context = context
        self._clock = clock
        self._until = clock() + min(context.time_remaining(), KUBELET_DEADLINE_S)

    def remaining_s(self) -> float:
        """Seconds until the deadline; 0 or less once it has passed."""
        return self._until - self._clock()

    def over(self) -> bool:
        """Whether the deadline has passed or the caller has gone."""
        return self.remaining_s() <= 0 or not self._context.is_active()


class PluginService:
    """Answers from `preparer`. Calls run side by side; nothing is kept between them."""

    def __init__(
        self, preparer: Preparer, *, observer: RpcObserver, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._preparer = preparer
        self._observer = observer
        self._clock = clock
        self._request_ids = itertools.count(1)

    def handlers(self) -> list[grpc.GenericRpcHandler]:
        """Both services. A message of v1beta1 is one of v1 without share ids, so the classes of v1 serve both.

        Registered by hand rather than through the generated servicers for the sake of the serialiser: theirs orders a
        map by hash, and a repeated call must give the same bytes.
        """
        return [self._service(SERVICE_V1, share_ids=True), self._service(SERVICE_V1BETA1, share_ids=False)]

    def _service(self, name: str, *, share_ids: bool) -> grpc.GenericRpcHandler:
        return grpc.method_handlers_generic_handler(
            name,
            {
                PREPARE: grpc.unary_unary_rpc_method_handler(
                    functools.partial(self._prepare, share_ids=share_ids),
                    request_deserializer=dra_v1.NodePrepareResourcesRequest.FromString,
                    response_serializer=functools.partial(
                        dra_v1.NodePrepareResourcesResponse.SerializeToString, deterministic=True
                    ),
                ),
                UNPREPARE: grpc.unary_unary_rpc_method_handler(
                    self._unprepare,
                    request_deserializer=dra_v1.NodeUnprepareResourcesRequest.FromString,
                    response_serializer=functools.partial(
                        dra_v1.NodeUnprepareResourcesResponse.SerializeToString, deterministic=True
                    ),
                ),
            },
        )

    def _prepare(
        self, request: dra_v1.NodePrepareResourcesRequest, context: grpc.ServicerContext, *, share_ids: bool
    ) -> dra_v1.NodePrepareResourcesResponse:
        response = dra_v1.NodePrepareResourcesResponse()

        def fill(uid: str, outcome: _Outcome | None) -> None:
            entry = response.claims[uid]
            entry.Clear()
            match outcome:
                case values.Prepared():
                    entry.devices.extend(_device(device, share_ids=share_ids) for device in outcome.devices)
                case values.Failed():
                    entry.error = _error(outcome)
                case _:
                    raise TypeError(f"{outcome!r} is no answer to {PREPARE}")

        self._answer(PREPARE, self._preparer.prepare, request.claims, context, fill)
        return response

    def _unprepare(
        self, request: dra_v1.NodeUnprepareResourcesRequest, context: grpc.ServicerContext
    ) -> dra_v1.NodeUnprepareResourcesResponse:
        response = dra_v1.NodeUnprepareResourcesResponse()

        def fill(uid: str, outcome: _Outcome | None) -> None:
            entry = response.claims[uid]
            match outcome:
                case values.Unprepared():
                    entry.Clear()
                case values.Failed():
                    entry.error = _error(outcome)
                case _:
                    raise TypeError(f"{outcome!r} is no answer to {UNPREPARE}")

        self._answer(UNPREPARE, self._preparer.unprepare, request.claims, context, fill)
        return response

    def _answer(
        self,
        method: str,
        work: Callable[[Sequence[values.ClaimRef], values.Call], Mapping[values.ClaimUid, _Outcome]],
        claims: Iterable[dra_v1.Claim],
        context: grpc.ServicerContext,
        fill: Callable[[str, _Outcome | None], None],
    ) -> None:
        """Have `fill` called for each UID of the request: once, or a second time when the first raised.

        What `work` calls failed is not logged here: who does the work knows the claim's circumstances, and says them.
        """
        began = self._clock()
        call = RpcCall(context, self._clock)
        with log_context.bound(method=method, request_id=str(next(self._request_ids))):
            refs, refused = _read(claims)
            outcomes: Mapping[values.ClaimUid, _Outcome] = {}
            if refs:
                try:
                    outcomes = dict(work(tuple(refs.values()), call))
                except Exception as error:  # noqa: BLE001 -- the RPC door
                    failed = _unforeseen(method, error)
                    outcomes = dict.fromkeys(refs, failed)
            ok = not refused
            for uid, failed in refused.items():
                fill(uid, failed)
            for uid in refs:
                outcome = outcomes.get(uid)
                try:
                    fill(uid, outcome)
                except Exception as error:  # noqa: BLE001 -- the RPC door
                    outcome = _unforeseen(method, error)
                    fill(uid, outcome)
                ok = ok and not isinstance(outcome, values.Failed)
        self._observer.rpc(method, seconds=self._clock() - began, ok=ok)


def _read(
    claims: Iterable[dra_v1.Claim],
) -> tuple[dict[values.ClaimUid, values.ClaimRef], dict[str, values.Failed]]:
    """The claims that can be worked on, and why the others cannot; a claim named twice is one claim."""
    refs: dict[values.ClaimUid, values.ClaimRef] = {}
    refused: dict[str, values.Failed] = {}
    for claim in claims:
        ref = values.ClaimRef(uid=values.ClaimUid(claim.uid), namespace=claim.namespace, name=claim.name)
        if not _UID.fullmatch(ref.uid):
            refused[ref.uid] = _refusal(f"Claim UID {_quoted(ref.uid)} is not one that the API server gives")
        elif not _NAMESPACE.fullmatch(ref.namespace) or not _NAME.fullmatch(ref.name):
            refused[ref.uid] = _refusal(
                f"Claim UID {ref.uid} comes with the namespace {_quoted(ref.namespace)} and the name"
                f" {_quoted(ref.name)}, which cannot be those of a ResourceClaim"
            )
        elif refs.setdefault(ref.uid, ref) != ref:
            refused[ref.uid] = _refusal(f"Claim UID {ref.uid} stands for both {refs[ref.uid]} and {ref} in one request")
    for uid in refused:
        refs.pop(values.ClaimUid(uid), None)
    return refs, refused


def _refusal(message: str) -> values.Failed:
    logger.warning("Kubelet's request is not usable: %s", message)
    return values.Failed(message=message)


def _quoted(value: str) -> str:
    return ascii(value[:64]) + ("..." if len(value) > 64 else "")


def _unforeseen(method: str, error: Exception) -> values.Failed:
    logger.error("%s failed in a way nobody foresaw", method, exc_info=error)
    request_id = log_context.fields().get("request_id", "")
    return values.Failed(
        message=f"Internal error in the driver: {type(error).__name__}: {error}; its log has the traceback"
        f" (request_id {request_id})"
    )


def _error(failed: values.Failed) -> str:
    """Never empty: kubelet takes an empty error for success."""
    return wire.text(failed.message, max_bytes=ERROR_MAX_BYTES) or "The driver failed without giving a reason"


def _device(device: values.PreparedDevice, *, share_ids: bool) -> dra_v1.Device:
    return dra_v1.Device(
        request_names=device.request_names,
        pool_name=device.pool,
        device_name=device.device,
        cdi_device_ids=device.cdi_device_ids,
        share_id=device.share_id if share_ids else None,
    )
