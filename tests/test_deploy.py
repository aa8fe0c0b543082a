# SPDX-License-Identifier: Apache-2.0
"""The manifests, read as YAML: what they say agrees with the code, with each other and with docs/install.md. How kustomize puts them
together, and whether they work, is seen on a real node (tests/e2e).

- every file is reached, parses and names its licence
- rights: the verbs are those of the calls that the client can make, each explained; the policies are about our account and driver
- the DaemonSet: options that exist, paths that agree, probes and ports that are served, mounts and volumes in pairs, what is written
- the mock overlay takes out what hardware needs and every privilege
- the folders of components/paths are all places where they stand
- the supervisor of components/mps is updated by hand alone, and meets the agent and the runtime at one path
- the configuration file of components/config is valid, and mounted so that changes reach running agents
- the bounds of claims are those of the judge that measures them, and its classes are the installed ones
- what the policy for the configuration of claims takes is what the agent reads
- names that stand in several places; the image stands in one
"""

from __future__ import annotations

import functools
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from discovery import document
from driver import config, configfile, options, quantity, values
from driver.cli import mps as mps_verb
from driver.kube import access, client
from driver.mps import control, supervisor
from driver.observe import metrics, pages
from driver.prepare import claimconfig, claimschema
from driver.standin import apiserver
from driver.version import VERSION
from hack.judges import impossible, migclaims

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy/daemonset"
BASE = DEPLOY / "base"
MOCK = DEPLOY / "overlays/mock"
CONFIG = DEPLOY / "components/config"
ACCOUNT = "system:serviceaccount:nearfield-system:nearfield"
WRITTEN = {"plugin", "registry", "cdi", "tmp"}

Json = dict[str, Any]


def documents(path: Path) -> list[Json]:
    return [body for body in yaml.safe_load_all(path.read_text(encoding="utf-8")) if body is not None]


@functools.cache
def base() -> tuple[Json, ...]:
    """The objects of the base."""
    return tuple(
        body for name in documents(BASE / "kustomization.yaml")[0]["resources"] for body in documents(BASE / name)
    )


def one(kind: str, name: str | None = None) -> Json:
    (found,) = (body for body in base() if body["kind"] == kind and name in (None, body["metadata"]["name"]))
    return found


def pod() -> Json:
    spec: Json = one("DaemonSet")["spec"]["template"]["spec"]
    return spec


def container() -> Json:
    (found,) = pod()["containers"]
    assert isinstance(found, dict)
    return found


def env() -> dict[str, str]:
    """The variables with a value of their own."""
    return {item["name"]: item["value"] for item in container()["env"] if "value" in item}


def settings(**more: str) -> config.Settings:
    """What the agent makes of its variables."""
    given = {
        option.field: options.Given(text=text) for option in options.OPTIONS if (text := env().get(option.variable))
    }
    return options.build_settings(
        given | {name: options.Given(text=text) for name, text in {"node_name": "n1", "pod_uid": "u", **more}.items()}
    )


def mounts(of: Json) -> dict[str, Json]:
    return {mount["name"]: mount for mount in of["volumeMounts"] if "name" in mount}


def page() -> str:
    return (ROOT / "docs/install.md").read_text(encoding="utf-8")


def test_every_file_is_part_of_something_and_names_its_licence() -> None:
    reached: set[Path] = set()
    for file in sorted(DEPLOY.rglob("kustomization.yaml")):
        (body,) = documents(file)
        reached.add(file)
        patches = [patch["path"] for patch in body.get("patches", ()) if "path" in patch]
        generated = [name for each in body.get("configMapGenerator", ()) for name in each.get("files", ())]
        for name in (*body.get("resources", ()), *body.get("components", ()), *patches, *generated):
            path = (file.parent / name).resolve()
            assert path.exists(), f"{file}: {name}"
            reached.add(path / "kustomization.yaml" if path.is_dir() else path)
    files = {path for path in DEPLOY.rglob("*") if path.is_file()}
    assert files == reached
    for path in files:
        assert path.read_text(encoding="utf-8").startswith("# SPDX-License-Identifier: Apache-2.0\n"), path
        assert documents(path), path


def test_every_object_is_labelled() -> None:
    assert all(body["metadata"]["labels"]["app.kubernetes.io/name"] == "nearfield" for body in base())


def granted() -> set[tuple[str, str, str]]:
    """(group, resource, verb) of the ClusterRole."""
    return {
        (group, resource, verb)
        for rule in one("ClusterRole")["rules"]
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def test_the_rights_are_the_calls_that_the_client_can_make() -> None:
    """Every call of the client, made; a new one has to come in here."""
    event = {"metadata": {"name": "e", "namespace": "default"}, "involvedObject": {"kind": "Node", "name": "n1"}}
    claim = {"metadata": {"name": "c", "namespace": "default"}, "spec": {}}
    body = {
        "apiVersion": "resource.k8s.io/v1",
        "kind": "ResourceSlice",
        "metadata": {"name": "s"},
        "spec": {
            "driver": values.DRIVER_NAME,
            "nodeName": "n1",
            "pool": {"name": "n1", "generation": 1, "resourceSliceCount": 1},
        },
    }
    with apiserver.ApiServer() as server:
        server.seed("nodes", {"metadata": {"name": "n1"}})
        server.seed("resourceclaims", claim)
        kube = client.KubeClient(access.Access(server=server.url, token=server.token), user_agent="tests/0")
        made = {"get_claim", "list_claims", "get_node", "create_slice", "replace_slice", "list_slices", "watch_slices"}
        made |= {"delete_slice", "create_event", "patch_event", "watch_claim"}
        kube.get_claim("default", "c", timeout_s=40)
        kube.list_claims(timeout_s=40)
        kube.get_node("n1", timeout_s=40)
        stored = kube.create_slice(body, timeout_s=40)
        stored = kube.replace_slice(stored, timeout_s=40)
        version, _ = kube.list_slices(node_name="n1", timeout_s=40)
        watch = kube.watch_slices(node_name="n1", resource_version=version, timeout_s=40)
        kube.delete_slice("s", uid=stored["metadata"]["uid"], resource_version=None, timeout_s=40)
        assert next(watch)[0] == "DELETED"
        watch.close()
        assert list(watch) == []
        watch = kube.watch_claim("default", "c", timeout_s=40)
        assert next(watch)[0] == "ADDED"
        watch.close()
        assert list(watch) == []
        kube.create_event("default", event, timeout_s=40)
        kube.patch_event("default", "e", {"count": 2}, timeout_s=40)
        kube.close()
        calls = {(call.resource, call.verb) for call in server.calls}
    public = {name for name in vars(client.KubeClient) if not name.startswith("_")}
    assert made == public - {"load", "server", "close", "delete_slices"}
    uses = [path for path in ROOT.glob("driver/**/*.py") if ".delete_slices(" in path.read_text(encoding="utf-8")]
    assert uses == [], (
        "the agent deletes one slice at a time: deletecollection, which is kubelet's, is not among its rights"
    )
    assert {(resource, verb) for _, resource, verb in granted()} == calls


def test_every_right_is_explained() -> None:
    explained = set(re.findall(r"^\| `(\w+)` \| `(\w+)` \| .{20,}\|$", page(), re.MULTILINE))
    assert explained == {(resource, verb) for _, resource, verb in granted()}


def test_names_that_stand_in_several_places() -> None:
    namespace = one("Namespace")["metadata"]["name"]
    account = one("ServiceAccount")["metadata"]
    assert f"system:serviceaccount:{namespace}:{account['name']}" == ACCOUNT
    assert account["namespace"] == one("DaemonSet")["metadata"]["namespace"] == namespace
    (subject,) = one("ClusterRoleBinding")["subjects"]
    assert (subject["namespace"], subject["name"]) == (namespace, account["name"])
    assert one("ClusterRoleBinding")["roleRef"]["name"] == one("ClusterRole")["metadata"]["name"]
    assert pod()["serviceAccountName"] == account["name"]
    labels = one("DaemonSet")["spec"]["template"]["metadata"]["labels"].items()
    assert labels >= one("DaemonSet")["spec"]["selector"]["matchLabels"].items()


@pytest.mark.parametrize(
    ("name", "resource", "operations"),
    [
        ("nearfield-resourceslices", "resourceslices", ["CREATE", "UPDATE", "DELETE"]),
        ("nearfield-events", "events", ["CREATE", "UPDATE"]),
    ],
)
def test_the_policies_are_about_our_account_and_driver(name: str, resource: str, operations: list[str]) -> None:
    spec = one("ValidatingAdmissionPolicy", name)["spec"]
    assert spec["failurePolicy"] == "Fail"
    (rule,) = spec["matchConstraints"]["resourceRules"]
    assert (rule["resources"], rule["operations"]) == ([resource], operations)
    assert {
        verb for _, of, verb in granted() if of == resource and verb in ("create", "update", "patch", "delete")
    } <= {{"CREATE": "create", "UPDATE": "update", "DELETE": "delete"}[operation] for operation in operations} | {
        "patch"
    }
    assert [condition["expression"] for condition in spec["matchConditions"]] == [
        f'request.userInfo.username == "{ACCOUNT}"'
    ]
    assert any(f'== "{values.DRIVER_NAME}"' in check["expression"] for check in spec["validations"])
    binding = one("ValidatingAdmissionPolicyBinding", name)["spec"]
    assert binding == {"policyName": name, "validationActions": ["Deny"]}


@pytest.mark.parametrize(("name", "kind"), [(values.DRIVER_NAME, "gpu"), ("mig.nearfield.dev", "mig")])
def test_a_class_takes_devices_of_one_type_of_this_driver(name: str, kind: str) -> None:
    """The driver stands first, so that nothing of other drivers' devices is read."""
    (selector,) = one("DeviceClass", name)["spec"]["selectors"]
    assert selector["cel"]["expression"] == (
        f'device.driver == "{values.DRIVER_NAME}" && device.attributes["{values.DRIVER_NAME}"].type == "{kind}"'
    )


def test_a_class_takes_what_is_shared_of_this_driver() -> None:
    """Also on servers that know no such field: they refuse an expression that names it outright."""
    (selector,) = one("DeviceClass", "share.nearfield.dev")["spec"]["selectors"]
    assert selector["cel"]["expression"] == (
        f'device.driver == "{values.DRIVER_NAME}" && dyn(device).?allowMultipleAllocations.orValue(false)'
    )


def test_every_variable_is_an_option() -> None:
    known = {option.variable for option in options.OPTIONS}
    used = {item["name"] for item in container()["env"]}
    (patch,) = documents(MOCK / "daemonset.yaml")
    (mock,) = patch["spec"]["template"]["spec"]["containers"]
    used |= {item["name"] for item in mock["env"]}
    for file in DEPLOY.rglob("*.yaml"):
        used |= set(re.findall(r"NEARFIELD_[A-Z_]+", file.read_text(encoding="utf-8")))
    used |= set(re.findall(r"NEARFIELD_[A-Z_]+", page()))
    assert used <= known


def test_the_options_lead_to_what_is_mounted() -> None:
    chosen = settings()
    volumes = {volume["name"]: volume for volume in pod()["volumes"]}
    found = {name: Path(mount["mountPath"]) for name, mount in mounts(container()).items()}
    assert found["plugin"] == chosen.plugin_dir
    assert found["registry"] == chosen.registry_dir
    assert found["cdi"] == chosen.cdi_dir
    assert found["driver-root"] == chosen.driver_root_mount
    assert found["sys"] == chosen.sysfs
    assert found["proc"] == chosen.procfs
    assert found["dev"] == chosen.dev
    assert chosen.state_dir.is_relative_to(found["plugin"])
    assert Path(volumes["driver-root"]["hostPath"]["path"]) == chosen.driver_root
    # Kubelet and the runtime are told these paths, and look at them on the host.
    for name in ("plugin", "registry", "cdi"):
        assert Path(volumes[name]["hostPath"]["path"]) == found[name]


def test_mounts_and_volumes_come_in_pairs_and_little_is_written() -> None:
    named = mounts(container())
    assert sorted(named) == sorted(volume["name"] for volume in pod()["volumes"])
    assert {name for name, mount in named.items() if not mount.get("readOnly", False)} == WRITTEN
    assert container()["securityContext"]["readOnlyRootFilesystem"] is True
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod())


def test_every_mount_is_explained() -> None:
    explained = dict(re.findall(r"^\| `(/[^`]*)` \| .*? \| (read|write) \| .{20,}\|$", page(), re.MULTILINE))
    assert explained == {
        mount["mountPath"]: "read" if mount.get("readOnly") else "write" for mount in mounts(container()).values()
    }


def test_the_probes_ask_what_is_served() -> None:
    served = pages.agent_pages(metrics.Metrics(pool="n1"), healthz=lambda: (True, ()), readyz=lambda: (True, ()))
    (port,) = container()["ports"]
    chosen = settings().http
    assert chosen is not None
    assert (port["name"], port["containerPort"]) == ("metrics", chosen.port)
    probed = {name: container()[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
    assert {name: get["path"] for name, get in probed.items()} == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    assert {get["port"] for get in probed.values()} == {port["name"]}
    annotations = one("DaemonSet")["spec"]["template"]["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true"
    assert annotations["prometheus.io/port"] == str(port["containerPort"])
    assert {annotations["prometheus.io/path"], *(get["path"] for get in probed.values())} <= set(served)


def test_the_bounds_of_claims_are_those_that_were_measured() -> None:
    policy, binding = documents(DEPLOY / "components/mig-claim-bounds/policy.yaml")
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    said = {variable["name"]: variable["expression"] for variable in policy["spec"]["variables"]}
    assert said["classes"] == f'["{migclaims.MIG_CLASS}"]'
    assert [int(said[name]) for name in ("mostDevices", "mostRequests", "mostApart")] == [
        impossible.MOST_DEVICES,
        impossible.MOST_REQUESTS,
        impossible.MOST_APART,
    ]
    classes = {body["metadata"]["name"]: body["spec"] for body in base() if body["kind"] == "DeviceClass"}
    assert {body["metadata"]["name"]: body["spec"] for body in migclaims.CLASSES}.items() <= classes.items()


def test_the_policy_for_the_configuration_of_claims_knows_what_the_agent_does() -> None:
    policy, binding = documents(DEPLOY / "components/claim-config-policy/policy.yaml")
    assert binding["spec"]["policyName"] == policy["metadata"]["name"]
    said = {variable["name"]: variable["expression"] for variable in policy["spec"]["variables"]}
    lists = {
        "memoryLevels": claimconfig.MemoryLevel,
        "computeLevels": claimconfig.ComputeLevel,
        "priorities": claimconfig.Priority,
    }
    assert {name: json.loads(said[name]) for name in lists} == {name: list(kinds) for name, kinds in lists.items()}
    assert json.loads(said["driver"]) == values.DRIVER_NAME
    assert json.loads(said["apiVersion"]) == claimconfig.API_VERSION
    # A dot as a class, as CEL, YAML and JSON have their own ideas of what a backslash is.
    pattern = claimconfig.QUANTITY_PATTERN.replace(r"\.", "[.]")
    assert json.loads(said["quantityPattern"]) == f"^{pattern}$"
    assert 'quantity("1Ei")' in said["readable"]
    assert quantity.parse("1Ei") == claimconfig.MOST_BYTES
    rules = " ".join(rule["expression"] for rule in policy["spec"]["validations"])
    assert 'quantity("1Mi")' in rules
    assert quantity.parse("1Mi") == claimconfig.LEAST_BYTES
    known = json.loads(re.findall(r"field in (\[[^\]]*\])", said["shaped"])[0])
    assert known == list(claimschema.json_schema()["properties"])


def mps_pod() -> Json:
    (body,) = documents(DEPLOY / "components/mps/daemonset.yaml")
    spec: Json = body["spec"]["template"]["spec"]
    return spec


def test_the_supervisor_of_mps_is_updated_by_hand_alone_and_asks_the_api_server_nothing() -> None:
    (body,) = documents(DEPLOY / "components/mps/daemonset.yaml")
    assert body["spec"]["updateStrategy"] == {"type": "OnDelete"}
    selector = body["spec"]["selector"]["matchLabels"]
    assert selector == body["spec"]["template"]["metadata"]["labels"] == body["metadata"]["labels"]
    # The agent's DaemonSet must not take its pods for its own.
    assert selector != one("DaemonSet")["spec"]["selector"]["matchLabels"]
    assert mps_pod()["automountServiceAccountToken"] is False
    assert mps_pod()["terminationGracePeriodSeconds"] > supervisor.END_S
    assert mps_pod()["tolerations"] == pod()["tolerations"]


def test_the_supervisor_and_the_agent_meet_where_the_runtime_looks() -> None:
    (supervised,) = mps_pod()["containers"]
    chosen = {item["name"]: item["value"] for item in supervised["env"]}
    given = {
        option.field: options.Given(text=text) for option in options.OPTIONS if (text := chosen.get(option.variable))
    }
    parsed = options.parse_given([option for option in options.OPTIONS if option.field in given], given)
    mounted = mounts(supervised)
    volumes = {volume["name"]: volume["hostPath"]["path"] for volume in mps_pod()["volumes"]}
    assert sorted(mounted) == sorted(volumes)
    assert str(parsed["mps_dir"]) == mounted["mps"]["mountPath"] == volumes["mps"]
    assert mounted["mps"]["mountPropagation"] == "Bidirectional"
    assert str(parsed["driver_root_mount"]) == mounted["driver-root"]["mountPath"]
    assert str(parsed["driver_root"]) == volumes["driver-root"]
    (component,) = documents(DEPLOY / "components/mps/kustomization.yaml")
    (patch,) = [yaml.safe_load(each["patch"]) for each in component["patches"]]
    (agent,) = patch["spec"]["template"]["spec"]["containers"]
    assert agent["env"] == [{"name": "NEARFIELD_MPS_DIR", "value": volumes["mps"]}]
    assert [mount["mountPath"] for mount in agent["volumeMounts"]] == [volumes["mps"]]
    # The paths of the sockets of the longest device name that there is have to fit.
    assert control.socket_path_fits(Path(volumes["mps"]) / "gpu-ffffffff-ff-1f-7" / "pipes", "s" + "0" * 24)


def test_the_probes_of_the_supervisor_ask_its_socket() -> None:
    (supervised,) = mps_pod()["containers"]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert supervised[probe]["exec"]["command"] == ["nearfield", "mps", "status"]
        assert supervised[probe]["timeoutSeconds"] > mps_verb.LOOK_S


def test_the_limits_of_cgroups_reach_those_of_the_node() -> None:
    (component,) = documents(DEPLOY / "components/cgroups/kustomization.yaml")
    (patch,) = [yaml.safe_load(each["patch"]) for each in component["patches"]]
    spec = patch["spec"]["template"]["spec"]
    (agent,) = spec["containers"]
    (volume,) = spec["volumes"]
    (mount,) = agent["volumeMounts"]
    assert agent["env"] == [{"name": "NEARFIELD_CGROUP_ROOT", "value": volume["hostPath"]["path"]}]
    assert mount == {"name": volume["name"], "mountPath": volume["hostPath"]["path"]}


def test_the_podmonitor_scrapes_what_the_annotations_did() -> None:
    (monitor,) = documents(DEPLOY / "components/podmonitor/podmonitor.yaml")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert (endpoint["port"], endpoint["path"]) == ("metrics", "/metrics")
    assert monitor["spec"]["selector"] == one("DaemonSet")["spec"]["selector"]
    assert monitor["metadata"]["namespace"] == one("Namespace")["metadata"]["name"]
    (body,) = documents(DEPLOY / "components/podmonitor/kustomization.yaml")
    removed = yaml.safe_load(body["patches"][0]["patch"])["spec"]["template"]["metadata"]["annotations"]
    annotations = one("DaemonSet")["spec"]["template"]["metadata"]["annotations"]
    assert removed == {name: None for name in annotations if name.startswith("prometheus.io/")}


def test_an_update_leaves_no_gap() -> None:
    spec = one("DaemonSet")["spec"]
    assert spec["updateStrategy"] == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    fields = {
        item["name"]: item["valueFrom"]["fieldRef"]["fieldPath"] for item in container()["env"] if "valueFrom" in item
    }
    assert fields == {"NEARFIELD_NODE_NAME": "spec.nodeName", "NEARFIELD_POD_UID": "metadata.uid"}
    # Two pods on one node cannot have the same port of it.
    assert all("hostPort" not in port for port in container()["ports"])


def test_it_runs_on_every_node_and_before_others() -> None:
    assert pod()["priorityClassName"] == "system-node-critical"
    assert pod()["tolerations"] == [{"operator": "Exists"}]
    resources = container()["resources"]
    assert set(resources["requests"]) == {"cpu", "memory"}
    assert set(resources["limits"]) == {"memory"}


def test_the_mock_overlay_takes_out_what_hardware_needs_and_every_privilege() -> None:
    (patch,) = documents(MOCK / "daemonset.yaml")
    spec = patch["spec"]["template"]["spec"]
    (mock,) = spec["containers"]
    assert mock["securityContext"] == {
        "privileged": False,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
    }
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    deleted = {mount["mountPath"] for mount in mock["volumeMounts"] if mount.get("$patch") == "delete"}
    hardware = {mount["mountPath"] for name, mount in mounts(container()).items() if name not in WRITTEN}
    assert deleted == hardware
    assert {volume["name"] for volume in spec["volumes"] if volume.get("$patch") == "delete"} == {
        name for name in mounts(container()) if name not in WRITTEN
    }
    gone = {item["name"] for item in mock["env"] if item.get("$patch") == "delete"}
    assert gone == {"NEARFIELD_DRIVER_ROOT", "NEARFIELD_DRIVER_ROOT_MOUNT", "NEARFIELD_SYSFS", "NEARFIELD_PROCFS"}
    added = mounts(mock)
    assert {name: mount["readOnly"] for name, mount in added.items()} == {"machine": True}


@pytest.mark.parametrize("overlay", ["mock", "kind"])
def test_the_machine_comes_from_the_config_map(overlay: str) -> None:
    (body,) = documents(DEPLOY / f"overlays/{overlay}/kustomization.yaml")
    (generator,) = body["configMapGenerator"]
    said = dict(literal.split("=") for literal in generator["literals"])
    (patch,) = documents(MOCK / "daemonset.yaml")
    (mock,) = patch["spec"]["template"]["spec"]["containers"]
    keys = {item["name"]: item["valueFrom"]["configMapKeyRef"] for item in mock["env"] if "valueFrom" in item}
    assert {name: ref["key"] for name, ref in keys.items()} == {
        "NEARFIELD_MOCK": "machine",
        "NEARFIELD_MOCK_NODE_LABEL": "node-label",
    }
    assert {ref["name"] for ref in keys.values()} == {generator["name"]}
    chosen = {
        option: said[key] for option, key in (("mock", "machine"), ("mock_node_label", "node-label")) if key in said
    }
    assert settings_of_mock(**chosen).mocked


def settings_of_mock(**given: str) -> config.Settings:
    return options.build_settings(
        {name: options.Given(text=text) for name, text in {"node_name": "n1", **given}.items()}
    )


def test_the_label_of_kind_is_the_label_that_chooses_its_nodes() -> None:
    text = (DEPLOY / "overlays/kind/kustomization.yaml").read_text(encoding="utf-8")
    (key,) = re.findall(r"node-label=(\S+)", text)
    assert f"- key: {key}\n" in text
    assert f"labels: {{{key}: $machine}}" in (ROOT / "hack/kind-up").read_text(encoding="utf-8")
    assert f"node-label={key}" in (MOCK / "kustomization.yaml").read_text(encoding="utf-8")
    assert f"{key}=" in page()


def places(body: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Every text of an object, with its place as kustomize writes it."""
    if isinstance(body, dict):
        for key, value in body.items():
            yield from places(value, f"{path}.{key}")
    elif isinstance(body, list):
        for number, value in enumerate(body):
            name = value.get("name") if isinstance(value, dict) else None
            yield from places(value, f"{path}.[name={name}]" if name is not None else f"{path}.{number}")
    elif isinstance(body, str):
        yield path.removeprefix("."), body


def test_a_change_of_the_configuration_reaches_a_running_agent() -> None:
    """Kubelet swaps what a mounted folder holds, for a ConfigMap of the same name; never what is mounted by subPath."""
    (component,) = documents(CONFIG / "kustomization.yaml")
    (generator,) = component["configMapGenerator"]
    assert generator["options"]["disableNameSuffixHash"] is True
    assert generator["options"]["labels"] == {"app.kubernetes.io/name": "nearfield"}
    spec = yaml.safe_load(component["patches"][0]["patch"])["spec"]["template"]["spec"]
    (agent,) = spec["containers"]
    (mount,) = agent["volumeMounts"]
    assert (set(mount), mount["readOnly"]) == ({"name", "mountPath", "readOnly"}, True)
    assert spec["volumes"] == [{"name": mount["name"], "configMap": {"name": generator["name"]}}]
    assert [Path(mount["mountPath"]) / name for name in generator["files"]] == [
        Path(agent["env"][0]["value"]),
    ]
    assert [item["name"] for item in agent["env"]] == ["NEARFIELD_CONFIG"]


def test_the_configuration_of_the_overlays_changes_nothing_and_shows_how() -> None:
    path = CONFIG / "agent.yaml"
    assert configfile.load(path) == config.AgentConfig()
    text = (
        path.read_text(encoding="utf-8")
        .replace("sharing: []\n# - match", "sharing:\n- match")
        .replace("\n#   mode", "\n  mode")
    )
    (rule,) = configfile.parse(document.parse(text.encode(), name="c"), folder=Path()).sharing
    assert (rule.match.product, rule.match.count, rule.mode.value) == ("*H100*", 4, "mig-dynamic")
    for overlay in ("mock", "podmonitor"):
        assert (
            "../../components/config" in documents(DEPLOY / f"overlays/{overlay}/kustomization.yaml")[0]["components"]
        )


@pytest.mark.parametrize(("key", "folder"), [("kubeletDir", "/var/lib/kubelet"), ("cdiDir", "/var/run/cdi")])
def test_the_folders_are_changed_wherever_they_stand(key: str, folder: str) -> None:
    (component,) = documents(DEPLOY / "components/paths/kustomization.yaml")
    changed = {
        field: target.get("options")
        for replacement in component["replacements"]
        if replacement["source"]["fieldPath"] == f"data.{key}"
        for target in replacement["targets"]
        for field in target["fieldPaths"]
    }
    standing = {place: text for place, text in places(one("DaemonSet")) if text.startswith(folder)}
    assert set(changed) == set(standing)
    for place, text in standing.items():
        # What the replacement leaves behind the folder is what stood there.
        option = changed[place]
        assert text.split(option["delimiter"])[0] == folder if option else text == folder


def test_the_image_stands_in_one_place() -> None:
    images = [
        (path, line)
        for path in DEPLOY.rglob("*.yaml")
        for line in re.findall(r"image: (\S*nearfield\S*)", path.read_text())
    ]
    assert images == [(BASE / "daemonset.yaml", f"localhost/nearfield/agent:{VERSION}")]
    assert f'newTag: "{VERSION}"' in page()


STUB = """\
#!/bin/sh
echo "$(basename "$0") $*" >> "$CALLS"
case "$(basename "$0") $*" in
  "kind create "*) cat > "$CALLS.config" ;;
esac
"""


def kind_up(programs: Path, *arguments: str, stubs: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """hack/kind-up where there are only a few programs, and some that do nothing but write down how they were called."""
    programs.mkdir()
    for program in ("bash", "sh", "dirname", "basename", "cat", "sed", "grep", "realpath", "python3"):
        found = shutil.which(program)
        assert found is not None, program
        (programs / program).symlink_to(found)
    for stub in stubs:
        (programs / stub).write_text(STUB)
        (programs / stub).chmod(0o755)
    return subprocess.run(
        ["bash", str(ROOT / "hack/kind-up"), *arguments],
        env={"PATH": str(programs), "CALLS": str(programs / "calls")},
        capture_output=True,
        text=True,
        check=False,
    )


def test_kind_up_says_what_is_missing_before_it_does_anything(tmp_path: Path) -> None:
    helped = kind_up(tmp_path / "a", "--help")
    assert (helped.returncode, "is not run by the project's tests" in helped.stdout) == (0, True)
    missing = kind_up(tmp_path / "b")
    assert (missing.returncode, missing.stderr) == (1, "hack/kind-up: kind is not installed\n")
    engine = kind_up(tmp_path / "c", stubs=("kind", "kubectl"))
    assert (engine.returncode, "neither Docker nor Podman" in engine.stderr) == (1, True)
    machine = kind_up(tmp_path / "d", "dgx-h200", stubs=("kind", "kubectl", "docker"))
    assert (machine.returncode, "no machine dgx-h200; there are: " in machine.stderr) == (1, True)
    assert kind_up(tmp_path / "e", "--colour").returncode == 2


def test_kind_up_asks_for_a_worker_a_machine_and_applies_the_overlay(tmp_path: Path) -> None:
    """With programs that only note their arguments: what it would do, not whether kind does it."""
    archive = tmp_path / "agent.tar"
    archive.touch()
    programs = tmp_path / "programs"
    done = kind_up(
        programs,
        *("--name", "gpus", "--archive", str(archive), "gb200-tray", "l40s-8-pcie"),
        stubs=("kind", "kubectl", "docker"),
    )
    assert done.returncode == 0, done.stderr
    kubectl = "kubectl --context kind-gpus"
    assert (programs / "calls").read_text().splitlines() == [
        "docker info",
        "kind get clusters",
        "kind create cluster --name gpus --config -",
        f"{kubectl} get --raw /apis/resource.k8s.io/v1",
        f"kind load image-archive {archive} --name gpus",
        f"{kubectl} apply -k deploy/daemonset/overlays/kind",
        f"{kubectl} -n nearfield-system rollout restart daemonset/nearfield",
        f"{kubectl} -n nearfield-system rollout status daemonset/nearfield --timeout 180s",
        f"{kubectl} get resourceslices",
    ]
    assert yaml.safe_load((programs / "calls.config").read_text()) == {
        "kind": "Cluster",
        "apiVersion": "kind.x-k8s.io/v1alpha4",
        "nodes": [
            {"role": "control-plane"},
            {"role": "worker", "labels": {"mock.nearfield.dev/machine": "gb200-tray"}},
            {"role": "worker", "labels": {"mock.nearfield.dev/machine": "l40s-8-pcie"}},
        ],
    }
