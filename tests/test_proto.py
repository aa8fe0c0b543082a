# SPDX-License-Identifier: Apache-2.0
"""The protocol definitions and the code generated from them.

- what goes over the wire is what kubelet 1.37 expects: full names, numbers, types, as a table written by hand
- the generated code is that of the definitions, byte for byte
- the floors of the runtime in pyproject.toml are those that the generated code asks for
- `driver`, `discovery` and `proto` belong to this distribution alone
- the agent does without the generated servicers
"""

from __future__ import annotations

import ast
import importlib.metadata
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import TypeAlias

import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, FileDescriptor
from packaging.requirements import Requirement

from driver.kubelet import health, plugin, registration
from proto.dra.v1 import api_pb2 as dra_v1
from proto.dra.v1beta1 import api_pb2 as dra_v1beta1
from proto.dra_health.v1 import api_pb2 as health_v1
from proto.dra_health.v1alpha1 import api_pb2 as health_v1alpha1
from proto.pluginregistration.v1 import api_pb2 as registration_v1
from proto.podresources.v1 import api_pb2 as podresources_v1

ROOT = Path(__file__).parent.parent

Methods: TypeAlias = dict[str, tuple[str, str, bool]]
Messages: TypeAlias = dict[str, dict[int, str]]

DRA_METHODS = {
    "NodePrepareResources": ("NodePrepareResourcesRequest", "NodePrepareResourcesResponse", False),
    "NodeUnprepareResources": ("NodeUnprepareResourcesRequest", "NodeUnprepareResourcesResponse", False),
}
DRA_V1BETA1 = {
    "Claim": {1: "string namespace", 2: "string uid", 3: "string name"},
    "NodePrepareResourcesRequest": {1: "repeated Claim claims"},
    "NodePrepareResourcesResponse": {1: "map<string, NodePrepareResourceResponse> claims"},
    "NodePrepareResourceResponse": {1: "repeated Device devices", 2: "string error"},
    "Device": {
        1: "repeated string request_names",
        2: "string pool_name",
        3: "string device_name",
        4: "repeated string cdi_device_ids",
    },
    "NodeUnprepareResourcesRequest": {1: "repeated Claim claims"},
    "NodeUnprepareResourcesResponse": {1: "map<string, NodeUnprepareResourceResponse> claims"},
    "NodeUnprepareResourceResponse": {1: "string error"},
}
DRA_V1 = DRA_V1BETA1 | {"Device": DRA_V1BETA1["Device"] | {5: "optional string share_id"}}
HEALTH: Messages = {
    "NodeWatchResourcesRequest": {},
    "NodeWatchResourcesResponse": {1: "repeated DeviceHealth devices"},
    "DeviceHealth": {
        1: "DeviceIdentifier device",
        2: "HealthStatus health",
        3: "int64 last_updated_time",
        4: "int64 health_check_timeout_seconds",
        5: "string message",
    },
    "DeviceIdentifier": {1: "string pool_name", 2: "string device_name"},
    "HealthStatus": {0: "UNKNOWN", 1: "HEALTHY", 2: "UNHEALTHY"},
}
HEALTH_METHODS = {"NodeWatchResources": ("NodeWatchResourcesRequest", "NodeWatchResourcesResponse", True)}
REGISTRATION: Messages = {
    "InfoRequest": {},
    "PluginInfo": {
        1: "string type",
        2: "string name",
        3: "string endpoint",
        4: "repeated string supported_versions",
    },
    "RegistrationStatus": {1: "bool plugin_registered", 2: "string error"},
    "RegistrationStatusResponse": {},
}
PODRESOURCES: Messages = {
    "ListPodResourcesRequest": {},
    "ListPodResourcesResponse": {1: "repeated PodResources pod_resources"},
    "GetPodResourcesRequest": {1: "string pod_name", 2: "string pod_namespace"},
    "GetPodResourcesResponse": {1: "PodResources pod_resources"},
    "PodResources": {1: "string name", 2: "string namespace", 3: "repeated ContainerResources containers"},
    "ContainerResources": {1: "string name", 5: "repeated DynamicResource dynamic_resources"},
    "DynamicResource": {
        2: "string claim_name",
        3: "string claim_namespace",
        4: "repeated ClaimResource claim_resources",
    },
    "ClaimResource": {
        1: "repeated CDIDevice cdi_devices",
        2: "string driver_name",
        3: "string pool_name",
        4: "string device_name",
        5: "optional string share_id",
    },
    "CDIDevice": {1: "string name"},
}
PODRESOURCES_METHODS = {
    "List": ("ListPodResourcesRequest", "ListPodResourcesResponse", False),
    "Get": ("GetPodResourcesRequest", "GetPodResourcesResponse", False),
}
REGISTRATION_METHODS = {
    "GetInfo": ("InfoRequest", "PluginInfo", False),
    "NotifyRegistrationStatus": ("RegistrationStatus", "RegistrationStatusResponse", False),
}


FILES: tuple[tuple[FileDescriptor, str, str, Messages, Methods], ...] = (
    (dra_v1.DESCRIPTOR, "k8s.io.kubelet.pkg.apis.dra.v1", "DRAPlugin", DRA_V1, DRA_METHODS),
    (dra_v1beta1.DESCRIPTOR, "k8s.io.kubelet.pkg.apis.dra.v1beta1", "DRAPlugin", DRA_V1BETA1, DRA_METHODS),
    (health_v1.DESCRIPTOR, "v1", "DRAResourceHealth", HEALTH, HEALTH_METHODS),
    (health_v1alpha1.DESCRIPTOR, "v1alpha1", "DRAResourceHealth", HEALTH, HEALTH_METHODS),
    (registration_v1.DESCRIPTOR, "pluginregistration", "Registration", REGISTRATION, REGISTRATION_METHODS),
    (podresources_v1.DESCRIPTOR, "v1", "PodResourcesLister", PODRESOURCES, PODRESOURCES_METHODS),
)

SCALARS = {
    FieldDescriptor.TYPE_STRING: "string",
    FieldDescriptor.TYPE_BOOL: "bool",
    FieldDescriptor.TYPE_INT64: "int64",
}


def _type(field: FieldDescriptor) -> str:
    if field.message_type is not None:
        return str(field.message_type.name)
    return str(field.enum_type.name) if field.enum_type is not None else SCALARS[field.type]


def _spell(field: FieldDescriptor) -> str:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        key, value = entry.fields_by_number[1], entry.fields_by_number[2]
        return f"map<{_type(key)}, {_type(value)}> {field.name}"
    label = "repeated " if field.is_repeated else "optional " if field.containing_oneof is not None else ""
    return f"{label}{_type(field)} {field.name}"


def _fields(message: Descriptor) -> dict[int, str]:
    return {number: _spell(field) for number, field in message.fields_by_number.items()}


@pytest.mark.parametrize(
    ("file", "package", "service", "messages", "methods"), FILES, ids=lambda v: getattr(v, "name", "")
)
def test_definitions_are_those_of_kubelet(
    file: FileDescriptor, package: str, service: str, messages: Messages, methods: Methods
) -> None:
    assert file.package == package
    found = {name: _fields(message) for name, message in file.message_types_by_name.items()}
    found |= {
        name: {value.number: value.name for value in enum.values} for name, enum in file.enum_types_by_name.items()
    }
    assert found == messages
    assert list(file.services_by_name) == [service]
    assert {
        method.name: (method.input_type.name, method.output_type.name, bool(method.server_streaming))
        for method in file.services_by_name[service].methods
    } == methods
    assert not any(method.client_streaming for method in file.services_by_name[service].methods)


def test_services_registered_by_hand_carry_the_names_of_the_definitions() -> None:
    assert dra_v1.DESCRIPTOR.services_by_name["DRAPlugin"].full_name == plugin.SERVICE_V1
    assert dra_v1beta1.DESCRIPTOR.services_by_name["DRAPlugin"].full_name == plugin.SERVICE_V1BETA1
    assert (
        health_v1.DESCRIPTOR.services_by_name["DRAResourceHealth"].full_name,
        health_v1alpha1.DESCRIPTOR.services_by_name["DRAResourceHealth"].full_name,
    ) == health.SERVICES
    assert registration_v1.DESCRIPTOR.services_by_name["Registration"].full_name == registration.SERVICE


def test_a_v1_answer_without_share_ids_is_a_v1beta1_answer() -> None:
    answer = dra_v1.NodePrepareResourcesResponse()
    answer.claims["a"].devices.add(
        request_names=["x", "y"], pool_name="p", device_name="d", cdi_device_ids=["k/c=1", "k/c=2"]
    )
    answer.claims["b"].error = "no"
    data = answer.SerializeToString(deterministic=True)
    assert dra_v1beta1.NodePrepareResourcesResponse.FromString(data).SerializeToString(deterministic=True) == data


def test_generated_code_is_that_of_the_definitions(tmp_path: Path) -> None:
    subprocess.run(
        [ROOT / "hack/genproto", tmp_path], env={"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}, check=True
    )

    def generated(root: Path) -> dict[str, bytes]:
        return {
            str(path.relative_to(root)): path.read_bytes()
            for path in (root / "proto").rglob("*.py*")
            if path.suffix in {".py", ".pyi"} and path.parent != root / "proto"
        }

    assert generated(ROOT) == generated(tmp_path)


def test_floors_are_what_generated_code_asks_for() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    requirements = [Requirement(line) for line in project["project"]["dependencies"]]
    floors = {
        requirement.name: spec.version
        for requirement in requirements
        for spec in requirement.specifier
        if spec.operator == ">="
    }
    protobuf, grpcio = set(), set()
    for path in (ROOT / "proto").rglob("*_pb2*.py"):
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("ValidateProtobufRuntimeVersion"):
                protobuf.add(".".join(str(ast.literal_eval(argument)) for argument in node.args[1:4]))
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "GRPC_GENERATED_VERSION":
                grpcio.add(ast.literal_eval(node.value))
    assert protobuf == {floors["protobuf"]}
    assert grpcio == {floors["grpcio"]}


@pytest.mark.parametrize("name", ["driver", "discovery", "proto"])
def test_top_level_packages_have_one_owner(name: str) -> None:
    owners = set(importlib.metadata.packages_distributions()[name])
    assert owners == {"nearfield"}, f"{owners} all install {name}/; the last one installed has overwritten the others"


def test_the_agent_does_without_generated_servicers() -> None:
    code = "import sys, driver.kubelet.server; print([n for n in sys.modules if n.endswith('_pb2_grpc')])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
