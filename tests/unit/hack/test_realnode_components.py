# SPDX-License-Identifier: Apache-2.0
"""What the components of a real node are started with.

- gates and emulated release: reach the components that take them, with the API groups that a gate needs
- files: every file that a command line or a configuration names is made, secrets are tokens of their own
- the machine: folders and settings that a component would make outside are inside
- options: come back from the file that keeps them
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hack.realnode import components, gates
from hack.realnode.components import Options
from hack.realnode.layout import Layout

LAYOUT = Layout("a")
BINARIES = Path("/cache")
CONTROL_PLANE = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")


def arguments(component: str, **options: object) -> list[str]:
    return components.arguments(component, layout=LAYOUT, options=Options(**options), binaries=BINARIES)  # type: ignore[arg-type]


def files(**options: object) -> dict[Path, str]:
    tokens = {name: f"token-{name}" for name in components.user_names()}
    return components.files(layout=LAYOUT, options=Options(**options), tokens=tokens)  # type: ignore[arg-type]


@pytest.mark.parametrize("component", components.ORDER)
def test_a_component_runs_its_own_program(component: str) -> None:
    assert str(BINARIES / component) in arguments(component)


def test_every_component_is_stopped() -> None:
    assert sorted(components.ORDER) == sorted(components.STOP_ORDER)


@pytest.mark.parametrize("component", components.ORDER)
def test_a_release_is_emulated_by_the_control_plane(component: str) -> None:
    emulated = "--emulated-version=kube=1.35" in arguments(component, emulate="1.35")
    assert emulated == (component in CONTROL_PLANE)
    assert not any("emulated" in argument for argument in arguments(component))


def test_gates_reach_all_components() -> None:
    switched = {"B": False, "A": True}
    for component in CONTROL_PLANE:
        assert "--feature-gates=A=true,B=false" in arguments(component, gates=switched)
    kubelet = json.loads(files(gates=switched)[LAYOUT.config / "kubelet.yaml"])
    assert kubelet["featureGates"] == switched


def test_a_gate_brings_its_api_group() -> None:
    assert "--runtime-config=scheduling.k8s.io/v1beta1=true" in arguments(
        "kube-apiserver", gates={"GenericWorkload": True}
    )
    assert not any("runtime-config" in part for part in arguments("kube-apiserver", gates={"GenericWorkload": False}))


@pytest.mark.parametrize(
    ("switched", "emulate", "given", "served"),
    [
        ({}, None, {}, {}),
        ({"GenericWorkload": True}, "1.36", {}, {}),
        ({"GenericWorkload": True}, "1.37", {}, {"scheduling.k8s.io/v1beta1": True}),
        ({"GenericWorkload": True}, None, {"scheduling.k8s.io/v1beta1": False}, {"scheduling.k8s.io/v1beta1": False}),
        ({"DRADerivedAttributes": True}, None, {"api/all": True}, {"api/all": True}),
    ],
)
def test_what_is_served(
    switched: dict[str, bool], emulate: str | None, given: dict[str, bool], served: dict[str, bool]
) -> None:
    assert gates.runtime_config(switched, emulate=emulate, given=given) == served


def test_files_that_are_named_are_made() -> None:
    made = files(audit=True)
    later = {LAYOUT.config / "service-accounts.key", LAYOUT.certificates / "apiserver.crt"}
    for component in components.ORDER:
        for argument in arguments(component, audit=True):
            path = Path(argument.rpartition("=")[2])
            if path.is_relative_to(LAYOUT.config) and path.suffix:
                assert path in made or path in later, argument


def test_each_user_has_a_token_of_its_own() -> None:
    made = files()
    rows = made[LAYOUT.config / "tokens.csv"].splitlines()
    assert len({row.split(",")[0] for row in rows}) == len(rows) == len(components.user_names())
    assert "token-admin,admin,admin," in made[LAYOUT.config / "tokens.csv"]
    assert "system:node:a-0" in made[LAYOUT.config / "tokens.csv"]
    assert json.loads(made[LAYOUT.kubeconfig])["users"][0]["user"] == {"token": "token-admin"}


def test_kubelet_leaves_the_machine_alone() -> None:
    made = files()
    settings = {path: text for path, text in made.items() if path.is_relative_to(LAYOUT.config / "kernel")}
    assert settings[LAYOUT.config / "kernel/vm/overcommit_memory"] == "1\n"
    for path in settings:
        assert str(path) in arguments("kubelet")
    kubelet = json.loads(made[LAYOUT.config / "kubelet.yaml"])
    assert kubelet["volumePluginDir"].startswith("/var/lib/kubelet/")
    assert kubelet["cgroupRoot"] == LAYOUT.cgroup


def test_options_come_back_from_json() -> None:
    options = Options(
        name="a", emulate="1.36", gates={"X": True}, runtime_config={"y/v1": True}, audit=True, hollow=("dgx-h100",)
    )
    again = Options(**json.loads(json.dumps(options.to_json())))
    assert again.to_json() == options.to_json()
