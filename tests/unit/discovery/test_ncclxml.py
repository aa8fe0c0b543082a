# SPDX-License-Identifier: Apache-2.0
"""Reading NCCL topologies, in the shapes in which clouds ship them.

- a bridge with an address of nothing, devices with and without class, a cpu without a node, comments, addresses in any spelling
- what is no topology, or says what cannot be, is refused with its line
- hostile XML is refused in bounded time and memory: entities, DTDs, depth, elements, encodings, NULs, sizes
- whatever the bytes are, a DocumentError or a machine comes out
"""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from discovery import document, ncclxml, overlay
from discovery.address import parse
from discovery.errors import DocumentError


def read(text: str | bytes) -> overlay.Machine:
    return ncclxml.parse(text if isinstance(text, bytes) else text.encode(), name="t.xml")


def refusal(text: str | bytes) -> str:
    with pytest.raises(DocumentError) as raised:
        read(text)
    message = str(raised.value)
    assert message.isprintable() or "\n" in message
    assert len(message) < 3000
    return message


def system(*lines: str) -> str:
    return "\n".join(('<system version="1">', *lines, "</system>", ""))


def device(address: str, line: int, base_class: int | None = None) -> overlay.Device:
    return overlay.Device(address=parse(address), line=line, base_class=base_class)


def test_groups_with_addresses_of_nothing_around_devices_of_many_domains() -> None:
    text = system(
        '  <cpu numaid="0" affinity="00000000,00ffffff" arch="x86_64" vendor="AuthenticAMD" familyid="23" modelid="49">',
        '    <pci busid="ffffff:ff:01.0" class="0x060400" link_speed="16 GT/s" link_width="16">  <!-- Switch 0 -->',
        '      <pci busid="0003:00:00.0" class="0x030200" link_speed="16 GT/s" link_width="16"/>',
        '      <pci busid="0103:00:00.0" class="0x020700" link_speed="16 GT/s" link_width="16"/>',
        "    </pci>",
        "  </cpu>",
        '  <cpu numaid="1">',
        '    <pci busid="000A:00:00.0" class="0x030200"/>',
        "  </cpu>",
    )
    left = (device("0003:00:00.0", 4, 3), device("0103:00:00.0", 5, 2))
    assert read(text) == overlay.Machine(
        file="t.xml",
        line=1,
        numa_nodes=(
            overlay.NumaNode(node=0, line=2, devices=left, cpus=tuple(range(24))),
            overlay.NumaNode(node=1, line=8, devices=(device("000a:00:00.0", 9, 3),)),
        ),
        groups=(overlay.Group(name="ffffff:ff:01.0", line=3, devices=left),),
    )


def test_networks_give_rails_and_everything_measured_is_left_alone() -> None:
    text = system(
        '<cpu numaid="0" affinity="" host_hash="0x1234">',
        '<pci busid="0000:00:00.0" class="0x060400">',
        '<pci busid="0000:53:00.0" class="0x030200"><gpu dev="0" sm="90" rank="0" gdr="1">',
        '<nvlink target="fffffff:ffff:ff" count="18" tclass="0x068000"/><c2c bw="1" count="2"/></gpu></pci>',
        '<pci busid="0000:4f:00.0" class="0x00ff00"><nic><net name="rdmap79s0" dev="0" rail="3" guid="0x1"/></nic></pci>',
        '<pci busid="0000:50:00.0" class="0x020000"><nic><net name="a" rail="1"/><net name="b" rail="2"/></nic></pci>',
        '<pci busid="0000:51:00.0" class="0x020000"><nic><net name="c" rail="65540"/><net name="d" rail="-1"/></nic></pci>',
        '<pci busid="0000:52:00.0" class="0x010601"/><pcilink target="0000:01:00.0"/>',
        "</pci>",
        '<nic><net name="eth0" dev="1"/></nic>',
        "</cpu>",
    )
    machine = read(text)
    assert machine.rails == (overlay.Rail(nic=parse("0000:4f:00.0"), rail=3, line=6),)
    assert [str(member.address) for member in machine.groups[0].devices] == [
        "0000:53:00.0",
        "0000:4f:00.0",
        "0000:50:00.0",
        "0000:51:00.0",
    ]


def test_devices_that_say_nothing_of_themselves() -> None:
    text = system('<cpu numaid="0"><pci busid="0000:00:16.0"/></cpu><cpu><pci busid="0000:00:17.0"/></cpu>')
    assert read(text).numa_nodes == (overlay.NumaNode(node=0, line=2, devices=(device("0000:00:16.0", 2),)),)
    assert read(text).groups == ()


@pytest.mark.parametrize("node", ["", ' numaid="-1"'])
def test_a_node_that_is_not_known_is_not_told(node: str) -> None:
    machine = read(system(f'<cpu{node}><pci busid="01:00.0"><pci busid=":02:1F.7"/></pci></cpu>'))
    assert machine.numa_nodes == ()
    assert machine.groups == (overlay.Group(name="0000:01:00.0", line=2, devices=(device("0000:02:1f.7", 2),)),)


def test_bridges_nest_and_may_share_a_name() -> None:
    text = system(
        '<cpu numaid="0">',
        '<pci busid="ffff:ff:01.0" class="0x060400">',
        '<pci busid="ffff:ff:01.0" class="0x060400"><pci busid="0001:00:00.0"/></pci>',
        '<pci busid="0002:00:00.0"/>',
        '<pci busid="ffff:ff:03.0" class="0x060400"/>',
        "</pci></cpu>",
    )
    machine = read(text)
    assert [(group.name, group.parent) for group in machine.groups] == [
        ("ffff:ff:01.0 (line 3)", None),
        ("ffff:ff:01.0 (line 4)", "ffff:ff:01.0 (line 3)"),
    ]
    assert overlay.chains(machine)[parse("0001:00:00.0")] == ("ffff:ff:01.0 (line 4)", "ffff:ff:01.0 (line 3)")


def test_what_nccl_ignores_is_ignored() -> None:
    text = system('<future a="b"><cpu numaid="0"><pci busid="nonsense"/></cpu></future>', '<cpu numaid="0"><x/></cpu>')
    assert read(f'<?xml version="1.0" encoding="UTF-8"?>\n<!-- <!DOCTYPE a> & -->\n{text}').groups == ()
    assert read(b"\xef\xbb\xbf" + text.encode()).rails == ()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "t.xml:1: not XML: no element found"),
        ("<graphs/>", 't.xml:1: <graphs> is no NCCL topology: expected <system version="1">'),
        ("<system/>", "t.xml:1: system has no version, and NCCL takes version 1 only"),
        ('<system version="2"/>', "t.xml:1: system has version '2', and NCCL takes version 1 only"),
        ('<system version="1" version="1"/>', "t.xml:1: not XML: Attribute version redefined"),
        (system('<pci busid="0000:01:00.0"/>'), "t.xml:2: pci stands in system, not in cpu or pci"),
        (system("<cpu><gpu/></cpu>"), "t.xml:2: gpu stands in cpu, not in pci"),
        (system("<cpu>", "<pci/></cpu>"), "t.xml:3: pci has no busid"),
        (
            system('<cpu><pci busid="0000:01:20.0"/></cpu>'),
            "t.xml:2: busid '0000:01:20.0' is not a PCI address (domain:bus:device.function)",
        ),
        (
            system('<cpu><pci busid="0000:01:00.0" class="gpu"/></cpu>'),
            "t.xml:2: class 'gpu' of 0000:01:00.0 is not a PCI class such as 0x030200",
        ),
        (
            system('<cpu numaid="1024"/>'),
            "t.xml:2: numaid 1024 cannot be: nodes are numbered 0 to 1023, -1 is unknown",
        ),
        (system('<cpu numaid="0x1"/>'), "t.xml:2: numaid '0x1' is no number"),
        (system('<cpu numaid="99999999999"/>'), "t.xml:2: numaid '99999999999' is no number"),
        (system('<cpu affinity="0-3"/>'), "t.xml:2: affinity '0-3' is no CPU mask such as 00000000,0000ffff"),
        (
            system('<cpu><pci busid="0000:01:00.0" class="0x030200"><pci busid="0000:02:00.0"/></pci></cpu>'),
            "t.xml:2: 0000:02:00.0 stands in 0000:01:00.0, which is of class 0x030200 and no bridge",
        ),
        (
            system('<cpu><pci busid="0000:01:00.0"><gpu/><pci busid="0000:02:00.0"/></pci></cpu>'),
            "t.xml:2: 0000:02:00.0 stands in 0000:01:00.0, which is a device and no bridge",
        ),
        (
            system('<cpu><pci busid="0000:01:00.0" class="0x060400"><nic/></pci></cpu>'),
            "t.xml:2: nic stands in 0000:01:00.0, which is a bridge",
        ),
        (
            system('<cpu numaid="0"><pci busid="0000:01:00.0"/></cpu>', '<cpu numaid="1"><pci busid="1:01:00.0"/>', '<pci busid="0000:01:00.0"/></cpu>'),
            "t.xml:4: 0000:01:00.0 is in two NUMA nodes: node 1 here, node 0 on line 2",
        ),
        (
            system('<cpu><pci busid="0000:09:00.0"><pci busid="0000:01:00.0"/></pci>', '<pci busid="0000:08:00.0"><pci busid="0000:01:00.0"/></pci></cpu>'),
            "t.xml:3: 0000:01:00.0 is in two groups: group '0000:08:00.0' here, group '0000:09:00.0' on line 2",
        ),
    ],
)  # fmt: skip
def test_what_is_no_topology_is_refused_with_its_line(text: str, message: str) -> None:
    assert refusal(text) == message


BOMB = "".join(f'<!ENTITY e{i + 1} "{f"&e{i};" * 10}">' for i in range(9))


@pytest.mark.parametrize("text", [system("<cpu>")[:-12], system("<cpu>"), system("<cpu", "x=")])
def test_a_file_that_ends_too_early_is_refused(text: str) -> None:
    assert refusal(text).startswith(("t.xml:2: not XML: ", "t.xml:3: not XML: ", "t.xml:4: not XML: "))


MANY = " ".join(f'a{i}=""' for i in range(50_000))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            f'<!DOCTYPE s [<!ENTITY e0 "x">{BOMB}]>\n<system version="&e9;"/>',
            "t.xml:1: <!DOCTYPE is not accepted: a topology has no DTD, no entities and no CDATA",
        ),
        (
            '<?a <!--?>\n<!DOCTYPE s [<!ENTITY e "1">]>\n<system version="&e;"/>\n<?b -->?>',
            "t.xml:2: <!DOCTYPE is not accepted: a topology has no DTD, no entities and no CDATA",
        ),
        (
            '<!-- <? -->\n<!DOCTYPE s [<!ENTITY e "1">]>\n<system version="&e;"/>\n<!-- ?> -->',
            "t.xml:2: <!DOCTYPE is not accepted: a topology has no DTD, no entities and no CDATA",
        ),
        (
            '\n<!DOCTYPE system SYSTEM "http://127.0.0.1:9/x.dtd">\n<system version="1"/>',
            "t.xml:2: <!DOCTYPE is not accepted: a topology has no DTD, no entities and no CDATA",
        ),
        (
            '<!DOCTYPE s [<!ENTITY a SYSTEM "file:///etc/hostname">]><system version="1">&a;</system>',
            "t.xml:1: <!DOCTYPE is not accepted: a topology has no DTD, no entities and no CDATA",
        ),
        (
            system("&a;"),
            "t.xml:2: &a; is not accepted: a topology has no DTD, no entities and no CDATA",
        ),
        (
            system("<![CDATA[<cpu/>]]>"),
            "t.xml:2: <![CDATA[ is not accepted: a topology has no DTD, no entities and no CDATA",
        ),
        ('<system version="1">\n\0</system>', "t.xml:2: not XML: a NUL byte"),
        ('<system version="1"/>'.encode("utf-16"), "t.xml:1: not UTF-8 (byte 0); save it as UTF-8"),
        ('<system version="1"/>'.encode("utf-16-le"), "t.xml:1: not XML: a NUL byte"),
        (
            '<?xml version="1.0" encoding="UTF-7"?><system version="1"/>',
            "t.xml:1: encoding 'UTF-7' is not accepted: save it as UTF-8",
        ),
        (b'<system version="1">\n\xff</system>', "t.xml:2: not UTF-8 (byte 21); save it as UTF-8"),
        (system("<cpu>" + '<pci busid="0000:01:00.0">' * 100), "t.xml:2: nested deeper than 64 elements"),
        (system("<x>" * 1000), "t.xml:2: nested deeper than 64 elements"),
        (system("<a/>" * 200_000), "t.xml:2: more than 4096 elements"),
        (system(f'<cpu affinity="{"f" * 5000}"/>'), f"t.xml:2: affinity '{'f' * 80}...' is no CPU mask such as 00000000,0000ffff"),
        (system(f"<cpu {MANY}/>"), None),
        ("<!--" * 260_000, "t.xml:1: not XML: "),
        ("<!-- -->" * 100_000, "t.xml:1: not XML: "),
        (b"<" + b"x" * document.MAX_BYTES, f"t.xml: larger than {document.MAX_BYTES} bytes, which no topology is"),
    ],
)  # fmt: skip
def test_hostile_xml_is_refused_within_bounds(text: str | bytes, message: str | None) -> None:
    tracemalloc.start()
    try:
        if message is None:
            read(text)
        else:
            assert refusal(text).startswith(message)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


PIECES = st.sampled_from(
    (
        '<system version="1">', "</system>", '<cpu numaid="0">', "</cpu>", '<pci busid="0000:01:00.0">', "</pci>", "<gpu/>",
        '<pci busid="0000:02:00.0" class="0x030200"/>', '<nic><net rail="1"/></nic>', "<!--", "-->", "<?x ", "?>", "&", "<!DOCTYPE x>", "\n",
        "text", '<cpu numaid="-1" affinity="ff">', "<x>", "</x>", "<?p?>", '<pci busid="">', "<pci>", "\x1f", "é",
    )
)  # fmt: skip


@settings(max_examples=200)
@given(st.one_of(st.lists(PIECES, max_size=30).map(lambda parts: "".join(parts).encode()), st.binary(max_size=200)))
def test_whatever_the_bytes_are_it_is_a_machine_or_an_error(data: bytes) -> None:
    try:
        machine = read(data)
    except DocumentError:
        return
    assert overlay.problems(machine) == ()
    overlay.names(overlay.chains(machine))
