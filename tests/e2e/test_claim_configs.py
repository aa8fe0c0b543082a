# SPDX-License-Identifier: Apache-2.0
"""Configuration in claims and classes. It is written by users and shown to them: what is wrong must be said where they look.

- for our driver and not as documented, in the claim, in the template or in the class: refused with its place and the next step, in
  an Event on the pod and on the claim and in `kubectl describe`; the pod starts when the cause is gone;
- for another driver, or for a subrequest that was not chosen: none of our business;
- a claim by its name, kept over pods.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from driver import values
from tests.e2e.kit import load, make
from tests.e2e.kit.api import Json
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

WITH_CONFIG = "e2e-with-config"
PARAMETERS = {"apiVersion": "gpu.example.com/v1", "kind": "GpuConfig", "sharing": {"strategy": "TimeSlicing"}}


def opaque(driver: str = values.DRIVER_NAME, *, requests: tuple[str, ...] = (), parameters: Json | None = None) -> Json:
    """An entry of `config`."""
    found: Json = {"opaque": {"driver": driver, "parameters": PARAMETERS if parameters is None else parameters}}
    return {**found, **({"requests": list(requests)} if requests else {})}


def refused(site: Site, space: Space, pod: str, claim: str, *told: str) -> None:
    """The pod waits, and kubelet's Event on it, our Event on its claim and `kubectl describe` say all of this."""
    event = load.refused(space, pod)
    ours = site.api.wait_event("ResourceClaim", claim, space.name, text="PrepareFailed")
    described = " ".join(site.cluster.kubectl("describe", "pod", pod, "-n", space.name).split())
    claim_described = " ".join(site.cluster.kubectl("describe", "resourceclaim", claim, "-n", space.name).split())
    for text in (event, ours["message"], described, claim_described):
        for words in told:
            assert words in text, (words, text)
    assert (ours["type"], ours["source"]["component"]) == ("Warning", values.DRIVER_NAME)


def test_configuration_in_a_claim_is_refused_with_the_next_step(site: Site, space: Space) -> None:
    space.create(make.claim("c", config=[opaque()]), make.pod("p", claims={"gpu": "c"}))
    refused(
        site,
        space,
        "p",
        "c",
        f"{space.name}/c",
        "status.allocation.devices.config[0].opaque.parameters",
        'apiVersion "gpu.example.com/v1" and kind "GpuConfig"',
        "(from the claim)",
        "change it, or take it out",
    )
    assert site.disk.record() == ()
    assert site.kubelet.calls("NodePrepareResources", code="OK") >= 1  # an error of one claim is no error of the call
    space.delete("Pod", "p")


def test_configuration_in_a_template_is_refused_too(site: Site, space: Space) -> None:
    space.create(make.template("t", config=[opaque(parameters={})]), make.pod("p", claims={"gpu": "template:t"}))
    claim = site.api.wait(
        "Pod", "p", space.name, until=lambda pod: pod["status"].get("resourceClaimStatuses"), what="with its claim"
    )["status"]["resourceClaimStatuses"][0]["resourceClaimName"]
    refused(site, space, "p", claim, "apiVersion null and kind null", "(from the claim)")
    space.delete("Pod", "p")


@pytest.fixture
def device_class(site: Site) -> Iterator[Json]:
    """A class of our GPUs with configuration for our driver."""
    spec = {**site.api.get("DeviceClass", make.CLASS)["spec"], "config": [opaque()]}
    yield site.api.create(
        {"apiVersion": make.API, "kind": "DeviceClass", "metadata": {"name": WITH_CONFIG}, "spec": spec}
    )
    site.api.delete("DeviceClass", WITH_CONFIG)


@pytest.mark.usefixtures("device_class")
def test_configuration_in_a_class_is_refused_and_the_class_is_named(site: Site, space: Space) -> None:
    space.create(
        make.claim("c", make.request(device_class=WITH_CONFIG)),
        make.template("good"),
        make.pod("p", claims={"gpu": "c"}),
        make.pod("neighbour", claims={"gpu": "template:good"}),
    )
    refused(site, space, "p", "c", "(from its DeviceClass)")
    space.running("neighbour")
    # The administrator mends the class, the user makes claim and pod again: an allocation keeps the configuration it was made with.
    site.api.patch("DeviceClass", WITH_CONFIG, {"spec": {"config": None}})
    space.delete("Pod", "p")
    space.delete("ResourceClaim", "c")
    space.create(make.claim("c", make.request(device_class=WITH_CONFIG)), make.pod("p", claims={"gpu": "c"}))
    space.running("p")
    assert len(space.look("p").gpu_nodes) == 1


def test_configuration_for_others_is_none_of_our_business(site: Site, space: Space) -> None:
    first, second, *_ = site.disk.gpus()
    choices = [make.request(name, where="true" if name == "one" else "false") for name in ("none", "one")]
    space.create(
        make.claim("of-another-driver", config=[opaque("gpu.example.com")]),
        make.claim("not-chosen", make.first_of("gpu", *choices), config=[opaque(requests=("gpu/none",))]),
        make.pod("p", claims={"one": "of-another-driver", "two": "not-chosen"}),
    )
    space.running("p")
    assert space.look("p").gpu_nodes == tuple(sorted((first.node, second.node)))


def test_a_claim_by_its_name_keeps_its_gpu_from_pod_to_pod(site: Site, space: Space) -> None:
    first, second, *_ = site.disk.gpus()
    space.create(make.claim("kept"), make.template("made"), make.pod("a", claims={"gpu": "kept"}))
    space.running("a")
    space.create(make.pod("b", claims={"gpu": "template:made"}))
    space.running("b")
    assert (space.devices("a"), space.devices("b")) == ((first.device,), (second.device,))
    made = space.claim_of("b", "gpu")["metadata"]["name"]
    space.delete("Pod", "a")
    space.delete("Pod", "b")
    space.gone("ResourceClaim", made)
    assert site.disk.record() == ()
    space.create(make.pod("c", claims={"gpu": "kept"}))
    space.running("c")
    assert space.look("c").gpu_nodes == (first.node,)
