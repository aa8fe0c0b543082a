# SPDX-License-Identifier: Apache-2.0
"""What the stand-in API server answers when it does not do what was asked: metav1.Status with its reasons and texts."""

from __future__ import annotations

from typing import Any


class StatusError(Exception):
    """A refusal. `code` and `reason` as apimachinery's pkg/api/errors pairs them."""

    def __init__(
        self,
        code: int,
        reason: str,
        message: str,
        *,
        details: dict[str, Any] | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.reason = reason
        self.message = message
        self.details = details or {}
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The Status object that goes over the wire."""
        details = dict(self.details)
        if self.retry_after_s is not None:
            details["retryAfterSeconds"] = self.retry_after_s
        return {
            "kind": "Status",
            "apiVersion": "v1",
            "metadata": {},
            "status": "Failure",
            "message": self.message,
            "reason": self.reason,
            **({"details": details} if details else {}),
            "code": self.code,
        }


def bad_request(message: str) -> StatusError:
    """400."""
    return StatusError(400, "BadRequest", message)


def unauthorized() -> StatusError:
    """401."""
    return StatusError(401, "Unauthorized", "Unauthorized")


def forbidden(verb: str, group_resource: str, name: str) -> StatusError:
    """The authorizer found no rule that allows it."""
    subject = f'{group_resource} "{name}"' if name else group_resource
    return StatusError(403, "Forbidden", f"{subject} is forbidden: User cannot {verb} resource {group_resource}")


def not_found(group_resource: str, name: str) -> StatusError:
    """404 of an object."""
    return StatusError(
        404, "NotFound", f'{group_resource} "{name}" not found', details={"name": name, **_split(group_resource)}
    )


def no_such_path() -> StatusError:
    """404 of a URL."""
    return StatusError(404, "NotFound", "the server could not find the requested resource")


def method_not_allowed() -> StatusError:
    """405."""
    return StatusError(405, "MethodNotAllowed", "the server does not allow this method on the requested resource")


def already_exists(group_resource: str, name: str) -> StatusError:
    """409 of a create."""
    return StatusError(
        409,
        "AlreadyExists",
        f'{group_resource} "{name}" already exists',
        details={"name": name, **_split(group_resource)},
    )


def conflict(group_resource: str, name: str, why: str) -> StatusError:
    """409 of an update or a precondition."""
    return StatusError(
        409,
        "Conflict",
        f'Operation cannot be fulfilled on {group_resource} "{name}": {why}',
        details={"name": name, **_split(group_resource)},
    )


def modified(group_resource: str, name: str) -> StatusError:
    """409 because the sent resourceVersion is not the present one."""
    return conflict(
        group_resource,
        name,
        "the object has been modified; please apply your changes to the latest version and try again",
    )


def expired(message: str) -> StatusError:
    """410: the resource version is compacted away."""
    return StatusError(410, "Expired", message)


def invalid(kind: str, group: str, name: str, causes: tuple[str, ...]) -> StatusError:
    """422 with its causes."""
    listed = causes[0] if len(causes) == 1 else f"[{', '.join(causes)}]"
    return StatusError(
        422,
        "Invalid",
        f'{kind}{f".{group}" if group else ""} "{name}" is invalid: {listed}',
        details={
            "name": name,
            "group": group,
            "kind": kind,
            "causes": [{"reason": "FieldValueInvalid", "message": cause} for cause in causes],
        },
    )


def too_large_version(asked: int, present: int) -> StatusError:
    """504: the caller has seen a newer state than this server has."""
    return StatusError(504, "Timeout", f"Too large resource version: {asked}, current: {present}", retry_after_s=1)


def _split(group_resource: str) -> dict[str, str]:
    plural, _, group = group_resource.partition(".")
    return {"kind": plural, **({"group": group} if group else {})}
