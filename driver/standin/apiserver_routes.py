# SPDX-License-Identifier: Apache-2.0
"""URLs of the stand-in API server: which resource a path names, what a selector selects, and the discovery documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from driver.standin import apiserver_resources as resources
from driver.standin import apiserver_status as status


@dataclass(frozen=True, slots=True)
class Route:
    """What a path names. `namespace` is empty for cluster scope and for all namespaces."""

    resource: resources.Resource
    namespace: str = ""
    name: str = ""
    subresource: str = ""

    @property
    def key(self) -> str:
        """The key of the one object it names."""
        return f"{self.namespace}/{self.name}" if self.resource.namespaced else self.name


def route(path: str) -> Route | None:
    """The route of a path, None when it names nothing that is served."""
    parts = path.strip("/").split("/")
    group, rest = ("", parts[2:]) if parts[:2] == ["api", "v1"] else ("", [])
    if parts[:1] == ["apis"] and parts[2:3] == ["v1"]:
        group, rest = parts[1], parts[3:]
    namespace = ""
    if rest[:1] == ["namespaces"] and len(rest) > 2:
        namespace, rest = rest[1], rest[2:]
    if not 1 <= len(rest) <= 3:
        return None
    resource = resources.RESOURCES.get(rest[0])
    if resource is None or resource.group != group or (namespace and not resource.namespaced):
        return None
    if len(rest) > 1 and resource.namespaced and not namespace:
        return None
    if len(rest) == 3 and not (rest[2] == "status" and resource.has_status):
        return None
    return Route(resource, namespace, *rest[1:])


def selection(where: Route, query: Mapping[str, str], version: str) -> Callable[[str, Mapping[str, Any]], bool]:
    """The test that namespace, name and the selectors of a query stand for: key and body of an object -> selected."""
    fields = _requirements(query.get("fieldSelector", ""))
    paths: dict[str, tuple[str, ...]] = {"metadata.name": ("metadata", "name")}
    if where.resource.namespaced:
        paths["metadata.namespace"] = ("metadata", "namespace")
    paths |= {
        label: path
        for label, path in where.resource.fields.items()
        if where.resource.fields_since.get(label, version) <= version
    }
    for label, _, _ in fields:
        if label not in paths:
            raise status.bad_request(f"field label not supported for {where.resource.kind}: {label}")
    labels = _requirements(query.get("labelSelector", ""))
    prefix = f"{where.namespace}/" if where.namespace else ""

    def matches(key: str, body: Mapping[str, Any]) -> bool:
        return (
            key.startswith(prefix)
            and (not where.name or key == where.key)
            and all((resources.field_value(body, paths[label]) == value) is equal for label, equal, value in fields)
            and all(
                ((body["metadata"].get("labels") or {}).get(label, "") == value) is equal
                for label, equal, value in labels
            )
        )

    return matches


def _requirements(selector: str) -> list[tuple[str, bool, str]]:
    """`a=b,c!=d` as (label, whether equal, value). Set-based selectors are refused."""
    found = []
    for term in filter(None, selector.split(",")):
        label, sign, value = term.partition("!=" if "!=" in term else "=")
        if not sign or not label:
            raise status.bad_request(f"invalid selector: {selector!r}; can't understand {term!r}")
        found.append((label.strip(), sign == "=", value.removeprefix("=").strip()))
    return found


def discovery(path: str, version: str) -> dict[str, Any] | None:
    """The discovery document at a path, as far as kubectl needs it; None where there is none."""
    match path.rstrip("/"):
        case "/version":
            major, minor = version.split(".")
            return {"major": major, "minor": minor, "gitVersion": f"v{version}.0-standin", "platform": "linux/amd64"}
        case "/api":
            return {"kind": "APIVersions", "versions": ["v1"], "serverAddressByClientCIDRs": []}
        case "/apis":
            group_version = {"groupVersion": "resource.k8s.io/v1", "version": "v1"}
            group = {"name": "resource.k8s.io", "versions": [group_version], "preferredVersion": group_version}
            return {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group]}
        case "/api/v1":
            return _resource_list("", "v1")
        case "/apis/resource.k8s.io/v1":
            return _resource_list("resource.k8s.io", "resource.k8s.io/v1")
    return None


def _resource_list(group: str, group_version: str) -> dict[str, Any]:
    verbs = ["create", "delete", "deletecollection", "get", "list", "patch", "update", "watch"]
    return {
        "kind": "APIResourceList",
        "apiVersion": "v1",
        "groupVersion": group_version,
        "resources": [
            {
                "name": resource.plural,
                "singularName": resource.kind.lower(),
                "namespaced": resource.namespaced,
                "kind": resource.kind,
                "verbs": verbs,
            }
            for resource in resources.RESOURCES.values()
            if resource.group == group
        ],
    }
