# SPDX-License-Identifier: Apache-2.0
"""The agent's metrics, as Prometheus in another pod gets them: found by the pod's annotations, read by prometheus_client's parser."""

from __future__ import annotations

import json
from typing import Any

from tests.e2e.kit import make
from tests.e2e.kit.sites import Site
from tests.e2e.kit.space import Space

SCRAPE = """
import json, sys, urllib.request
from prometheus_client import parser
from prometheus_client.openmetrics import parser as openmetrics
request = urllib.request.Request(sys.argv[1], headers={"Accept": sys.argv[2]})
with urllib.request.urlopen(request, timeout=10) as answer:
    kind, text = answer.headers["Content-Type"], answer.read().decode()
read = openmetrics if "openmetrics" in kind else parser
families = list(read.text_string_to_metric_families(text))
print(json.dumps({
    "kind": kind,
    "families": {family.name: family.type for family in families},
    "samples": [[sample.name, sample.labels, sample.value] for family in families for sample in family.samples],
}))
"""

PLAIN = "text/plain;version=0.0.4"
OPENMETRICS = "application/openmetrics-text;version=1.0.0"


def scrape(site: Site, space: Space, pod: str, accept: str) -> dict[str, Any]:
    """The agent's page as a pod of its own reads it."""
    target = site.agent.pod()
    annotations = target["metadata"]["annotations"]
    assert annotations["prometheus.io/scrape"] == "true"
    place = f"{target['status']['podIP']}:{annotations['prometheus.io/port']}{annotations['prometheus.io/path']}"
    command = ["python3", "-c", SCRAPE, f"http://{place}", accept]
    space.create(make.pod(pod, containers=[make.container(image=make.AGENT_IMAGE, command=command)]))
    space.succeeded(pod)
    told: dict[str, Any] = json.loads(space.logs(pod))
    return told


def values(page: dict[str, Any], name: str, **labels: str) -> list[float]:
    """The values of the series that match."""
    return [value for found, has, value in page["samples"] if found == name and labels.items() <= has.items()]


def test_another_pod_reads_the_metrics(site: Site, space: Space) -> None:
    before = scrape(site, space, "before", PLAIN)
    assert values(before, "nearfield_claims_prepared") == [0]
    assert values(before, "nearfield_devices", state="ready") == [8]
    assert values(before, "nearfield_ready") == [1]
    assert values(before, "nearfield_kubelet_registered") == [1]
    assert values(before, "nearfield_slices_published") == [len(site.agent.slices())]

    space.create(make.template("one"), make.pod("user", claims={"gpu": "template:one"}))
    space.running("user")
    page = scrape(site, space, "during", OPENMETRICS)
    assert page["kind"].startswith("application/openmetrics-text")
    assert values(page, "nearfield_claims_prepared") == [1]
    done = ("nearfield_prepare_total", "nearfield_prepare_duration_seconds_count")
    for name in done:
        labels = {"result": "success"} if name.endswith("total") else {}
        assert values(page, name, **labels) == [values(before, name, **labels)[0] + 1], name

    # The names of a device are joined by one series, and they are those of the slices.
    named = {
        (labels["device"], labels["uuid"], labels["pci_bus_id"])
        for name, labels, _ in page["samples"]
        if name == "nearfield_device_info"
    }
    assert named == {
        (
            device["name"],
            device["attributes"]["uuid"]["string"],
            device["attributes"]["resource.kubernetes.io/pciBusID"]["string"],
        )
        for device in site.agent.devices()
    }
    secrets = {"user", space.name, space.claim_of("user", "gpu")["metadata"]["name"]}
    assert not secrets & {value for _, labels, _ in page["samples"] for value in labels.values()}
