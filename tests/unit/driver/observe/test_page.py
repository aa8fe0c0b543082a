# SPDX-License-Identifier: Apache-2.0
"""The pages for people and for the cluster.

- /topology: one document, well formed, without scripts or foreign resources; shows devices, findings, claims, readiness
- text from hardware, claims and findings stays text
- memory slices of divided GPUs: whose each is, stranded ones; a machine without has no such part
- before the first probe, without a GPU, without a record
- /snapshot is the Snapshot's JSON; /metrics follows the Accept header; checks are served
"""

from __future__ import annotations

import json
from dataclasses import replace
from html.parser import HTMLParser

from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import address, codec, matrix, model
from driver import values
from driver.observe import http, page, pages, partitions, sharers
from driver.observe.metrics import Metrics
from driver.sharing import rules
from tests.fakes import divided, portions, publishing

GPU = address.parse("0000:1b:00.0")
NIC = address.parse("0000:18:00.0")
BRIDGE = address.HostBridge("pci0000:15")
SWITCH = address.parse("0000:16:00.0")
VOID = {"meta"}


def snapshot(text: str = "NVIDIA H100") -> model.Snapshot:
    def function(place: address.PciAddress) -> model.PciFunction:
        return model.PciFunction(
            address=place,
            vendor_id=1,
            device_id=2,
            class_code=3,
            host_bridge=BRIDGE,
            bridges=(SWITCH,),
            numa_node=0,
            cpus=(0, 1, 2),
        )

    return model.Snapshot(
        origin=model.Origin.RECORDING,
        taken_at=0.0,
        host=model.Host(vendor=text, product="DGX"),
        nvidia_driver=model.NvidiaDriver(version="580.95.05"),
        gpus=(
            model.Gpu(
                pci=function(GPU),
                state=model.GpuState.LOST,
                state_reason=text,
                product=text,
                nic=model.NicPairing(address=NIC, distance=model.PathClass.PIX, name=text),
            ),
        ),
        nics=(model.Nic(pci=function(NIC), interfaces=(model.NetworkInterface(name=text, operstate="up"),)),),
        findings=(model.Finding(code="x", severity=model.Severity.WARNING, subject=text, message=text),),
    )


def claim(text: str = "train") -> page.PreparedClaim:
    ref = values.ClaimRef(uid=values.ClaimUid("u-1"), namespace=text, name=text)
    return page.PreparedClaim(claim=ref, state="completed", devices=(values.gpu_device_name(GPU),))


def view(text: str = "train", **more: object) -> page.View:
    known: dict[str, object] = {
        "node_name": "n1",
        "snapshot": snapshot(text),
        "read_at": 0.0,
        "ready": True,
        "reasons": (text,),
        "claims": (claim(text),),
        "publish_findings": (model.Finding(code="y", severity=model.Severity.ERROR, subject=text, message=text),),
    }
    return page.View(**{**known, **more})  # type: ignore[arg-type]


class Reader(HTMLParser):
    """Reads a page strictly: every element is closed where it was opened; collects elements and text."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.elements: list[tuple[str, tuple[str, ...]]] = []
        self.text = ""

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, tuple(name for name, _ in attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text += f" {data}"


def read(text: str) -> Reader:
    reader = Reader()
    reader.feed(text)
    reader.close()
    assert reader.open == []
    return reader


def test_the_page_shows_the_machine() -> None:
    reader = read(page.render(view()))
    words = " ".join(reader.text.split())
    for expected in (
        "Node n1",
        "train DGX, replayed from a recording; NVIDIA driver 580.95.05;",
        "last read 1970-01-01 00:00:00 UTC.",
        "GPU0 X PIX 0-2 0",
        "GPU0 gpu-0000-1b-00-0 train lost: train",
        "train (PIX) train/train",
        "NIC0 0000:18:00.0 train (up)",
        "warning train train x error train train y",
        "train train u-1 completed gpu-0000-1b-00-0",
        "Ready",
    ):
        assert expected in words


def test_what_an_overlay_gave_is_marked() -> None:
    known = snapshot()
    assert matrix.GIVEN_MEANING not in page.render(view(snapshot=known))
    source = model.Provenance.OVERLAY
    pci = replace(known.gpus[0].pci, numa_source=source, switch=SWITCH, switches=(SWITCH,), switch_source=source)
    nic = replace(
        known.nics[0], pci=replace(known.nics[0].pci, switch=SWITCH, switch_source=source), rail=7, rail_source=source
    )
    shown = page.render(view(snapshot=replace(known, gpus=(replace(known.gpus[0], pci=pci),), nics=(nic,))))
    assert "<td>0*</td></tr>" in shown
    assert shown.count(f"<td>{SWITCH}*</td>") == 2
    assert "<td>7*</td>" in shown
    assert f"*: {matrix.GIVEN_MEANING}." in shown


def test_the_page_brings_everything_with_it() -> None:
    text = page.render(view())
    assert {tag for tag, _ in read(text).elements} <= {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "b", "ul", "li", "div"),
        *("table", "tr", "th", "td"),
    }
    for foreign in ("http:", "https:", "url(", "@import", "src=", "href="):
        assert foreign not in text


@settings(max_examples=50)
@given(st.text(min_size=1, max_size=30) | st.sampled_from(["<script>alert(1)</script>", '"><img src=x>', "&lt;b&gt;"]))
def test_text_stays_text(text: str) -> None:
    plain, hostile = read(page.render(view("x"))), read(page.render(view(text)))
    assert hostile.elements == plain.elements


def test_before_the_first_probe() -> None:
    reader = read(page.render(view(snapshot=None, read_at=None, ready=False, reasons=("no probe yet",))))
    words = " ".join(reader.text.split())
    assert "The hardware has not been read yet." in words
    assert "Not ready no probe yet" in words
    assert "GPUs" not in words


def test_a_machine_without_a_gpu_and_a_record_that_cannot_be_read() -> None:
    empty = model.Snapshot(origin=model.Origin.THIS_NODE, taken_at=0, host=model.Host())
    words = " ".join(read(page.render(view(snapshot=empty, claims=(), record_error="locked <here>"))).text.split())
    assert "Machine unknown; no NVIDIA driver;" in words
    assert "There is no NVIDIA GPU on this machine." in words
    assert "Claims locked <here>" in words
    assert "No claim is prepared." in page.render(view(claims=()))


def test_a_picture_is_taken_as_it_is() -> None:
    assert "<svg><g/></svg>" in page.render(view(picture="<svg><g/></svg>"))


def test_inspect_pages() -> None:
    known: list[model.Snapshot | None] = [None]
    made = pages.inspect_pages(view=view, snapshot=lambda: known[0])
    assert sorted(made) == ["/snapshot", "/topology"]
    shown = made["/topology"](http.Request())
    assert shown.body.decode() == page.render(view())
    assert shown.headers["Content-Security-Policy"] == page.POLICY
    assert made["/snapshot"](http.Request()).status == 503
    known[0] = snapshot()
    answer = made["/snapshot"](http.Request())
    assert (answer.status, answer.content_type) == (200, "application/json")
    assert codec.from_json(json.loads(answer.body)) == known[0]


def test_agent_pages() -> None:
    made = pages.agent_pages(Metrics(pool="n1"), healthz=lambda: (True, ()), readyz=lambda: (False, ("why",)))
    assert sorted(made) == ["/healthz", "/metrics", "/readyz"]
    assert b"nearfield_build_info" in made["/metrics"](http.Request()).body
    wanted = http.Request(accept="application/openmetrics-text;version=1.0.0")
    assert made["/metrics"](wanted).content_type.startswith("application/openmetrics-text")
    assert made["/healthz"](http.Request()).body == b"ok\n"
    assert made["/readyz"](http.Request()).body == b"not ready\nwhy\n"


def test_the_memory_slices_of_divided_gpus() -> None:
    ours = "gpu-0000-01-00-0-mig-1g-10gb-19-6"
    parted = divided.gpu(1, divided.instance(19, 6), divided.instance(9, 0))
    dynamic = {parted.address: rules.Policy(mode=rules.Mode.MIG_DYNAMIC)}
    ref = values.ClaimRef(uid=values.ClaimUid("u"), namespace="team-<a>", name="train")
    view = page.View(
        node_name="n1",
        snapshot=publishing.snapshot(parted, divided.gpu(2, enabled=False), publishing.gpu(3)),
        read_at=0.0,
        ready=True,
        claims=(page.PreparedClaim(claim=ref, state="completed", devices=(ours,)),),
        sharing=partitions.Sharing(policies=dynamic),
    )
    text = page.render(view)
    part = text.partition("<h2>MIG</h2>")[2].partition("</table>")[0]
    assert part.count("<tr>") == 2
    assert '<span class="foreign" style="flex-grow:4" title="foreign">3g.40gb</span>' in part
    assert "<span>4</span><span>5</span>" in part
    assert '<span class="ours" style="flex-grow:1" title="team-&lt;a&gt;/train">1g.10gb</span>' in part
    assert '<span class="stranded">7</span>' in part
    assert "<h2>MIG</h2>" not in page.render(replace(view, snapshot=publishing.snapshot(publishing.gpu(3))))


def test_shares_of_a_gpu() -> None:
    name = values.gpu_device_name(publishing.at(1))
    uses = [
        portions.use(name, 1, gib=20, compute=25, memory_limit=20 << 30, compute_limit=25),
        portions.use(name, 2, gib=40, compute=75),
    ]
    now = publishing.snapshot(publishing.gpu(1))
    shared = sharers.shared(now, policies={publishing.at(1): portions.policy()}, used=uses)
    seen = sharers.Seen(device=name, pod_uid="p-1", claims=(values.ClaimUid("u-1"),), used=3 << 30, limit=20 << 30)
    claims = tuple(page.PreparedClaim(claim=use.claim, state="completed", devices=(name, name)) for use in uses)
    words = " ".join(read(page.render(view(snapshot=now, claims=claims, shared=shared, seen=(seen,)))).text.split())
    for text in ("Shares", "cgroup", "mps", "100 of 100 %, 0 % free", "2 of 8", "3.0 GiB of 20.0 GiB (pod p-1)"):
        assert text in words, text
    assert words.count("team/claim-1, team/claim-2") == 1
    assert "Shares" not in page.render(view())


def test_shares_of_hostile_names_stay_text() -> None:
    name = values.gpu_device_name(publishing.at(1))
    hostile = values.ClaimRef(uid=values.ClaimUid("u"), namespace="<script>", name="<b onload=x>")
    use = replace(portions.use(name, 1, gib=20), claim=hostile, share_id="<i>")
    now = publishing.snapshot(publishing.gpu(1))
    shared = sharers.shared(now, policies={publishing.at(1): portions.policy()}, used=[use])
    seen = sharers.Seen(device=name, pod_uid="<u>", claims=(hostile.uid,), used=1, limit=None)
    text = page.render(view(snapshot=now, shared=shared, seen=(seen,)))
    assert "<script" not in text
    assert "<b onload" not in text
    assert "&lt;u&gt;" in text
