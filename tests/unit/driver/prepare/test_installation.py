# SPDX-License-Identifier: Apache-2.0
"""installation: what of a driver root goes into containers. Aspects: layouts, names, versions, what is missing, oddities."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from driver.prepare import installation, rootfs
from tests.fakes import driver_roots
from tests.fakes.driver_roots import VERSION

DEBIAN_FOLDER, RHEL_FOLDER = "/usr/lib/x86_64-linux-gnu", "/usr/lib64"


def find(root: Path, *, version: str | None = VERSION, machine: str = "x86_64") -> installation.Installation:
    host = rootfs.DriverRoot(Path("/run/nvidia/driver"), mount=root)
    return installation.find(host, machine=machine, expected_version=version)


def mounted(found: installation.Installation) -> dict[str, str]:
    assert len({mount.container_path for mount in found.mounts}) == len(found.mounts)
    return {mount.container_path: mount.host_path.removeprefix("/run/nvidia/driver") for mount in found.mounts}


def libraries(folder: str, *, triplet: str = "x86_64-linux-gnu") -> dict[str, str]:
    """What every layout must come to: each library under file name, development name and SONAME, in both places."""
    return {
        f"{target}/{name}": f"{folder}/{stem}.so.{VERSION}"
        for stem, soname in driver_roots.SONAMES.items()
        for name in {f"{stem}.so.{VERSION}", f"{stem}.so", soname}
        for target in (f"/usr/lib/{triplet}", "/usr/lib64")
    }


def test_debian(tmp_path: Path) -> None:
    found = find(driver_roots.debian(tmp_path))
    assert mounted(found) == {
        **libraries(DEBIAN_FOLDER),
        **{
            f"/usr/bin/{program}": f"/usr/bin/{program}"
            for program in ("nvidia-smi", "nvidia-cuda-mps-control", "nvidia-cuda-mps-server", "nvidia-persistenced")
        },
        **{
            f"/lib/firmware/nvidia/{VERSION}/{name}": f"/usr/lib/firmware/nvidia/{VERSION}/{name}"
            for name in ("gsp_ga10x.bin", "gsp_tu10x.bin")
        },
        "/etc/vulkan/icd.d/nvidia_icd.json": "/etc/vulkan/icd.d/nvidia_icd.json",
    }
    assert found.version == VERSION
    assert found.missing == ("nvidia-debugdump",)


def test_debian_with_alternatives(tmp_path: Path) -> None:
    found = find(driver_roots.debian_alternatives(tmp_path))
    assert mounted(found) == {
        **libraries(f"{DEBIAN_FOLDER}/nvidia/current"),
        "/usr/bin/nvidia-smi": "/usr/lib/nvidia/current/nvidia-smi",
    }
    assert f"firmware of {VERSION}" in found.missing


def test_rhel(tmp_path: Path) -> None:
    found = find(driver_roots.rhel(tmp_path))
    assert mounted(found) == {
        **libraries(RHEL_FOLDER),
        "/usr/bin/nvidia-smi": "/usr/bin/nvidia-smi",
        f"/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin": f"/usr/lib/firmware/nvidia/{VERSION}/gsp_ga10x.bin",
    }


def test_a_root_with_nothing_but_the_driver(tmp_path: Path) -> None:
    driver_roots.install(tmp_path, "/lib64", links=False)
    assert mounted(find(tmp_path)) == libraries("/lib64")


def test_aarch64(tmp_path: Path) -> None:
    driver_roots.install(tmp_path, "/usr/lib/aarch64-linux-gnu")
    found = find(tmp_path, machine="aarch64")
    assert mounted(found) == libraries("/usr/lib/aarch64-linux-gnu", triplet="aarch64-linux-gnu")


def test_files_that_are_no_elf_are_known_by_their_links(tmp_path: Path) -> None:
    for stem in ("libcuda", "libnvidia-ml"):
        driver_roots.file(tmp_path, f"/usr/lib64/{stem}.so.{VERSION}", b"made up")
        driver_roots.link(tmp_path, f"/usr/lib64/{stem}.so.1", f"{stem}.so.{VERSION}")
    assert set(mounted(find(tmp_path))) == {
        f"{target}/{stem}.so{end}"
        for target in (DEBIAN_FOLDER, RHEL_FOLDER)
        for stem in ("libcuda", "libnvidia-ml")
        for end in ("", ".1", f".{VERSION}")
    }


def test_leftovers_of_another_driver_are_left_alone(tmp_path: Path) -> None:
    driver_roots.debian(tmp_path)
    driver_roots.install(tmp_path, DEBIAN_FOLDER, version="535.183.01", links=False)
    for version in (VERSION, None):
        assert set(mounted(find(tmp_path, version=version)).values()) == set(mounted(find(tmp_path)).values())
        assert not [path for path in mounted(find(tmp_path, version=version)).values() if "535" in path]


def test_the_loaded_kernel_module_decides_over_the_link(tmp_path: Path) -> None:
    driver_roots.debian(tmp_path)
    driver_roots.install(tmp_path, DEBIAN_FOLDER, version="535.183.01", links=False)
    found = find(tmp_path, version="535.183.01")
    assert found.version == "535.183.01"
    assert mounted(found)[f"{RHEL_FOLDER}/libcuda.so.1"] == f"{DEBIAN_FOLDER}/libcuda.so.535.183.01"


def test_a_copy_in_a_second_folder_does_not_give_a_name_twice(tmp_path: Path) -> None:
    driver_roots.debian(tmp_path)
    driver_roots.install(tmp_path, "/usr/lib64")
    assert mounted(find(tmp_path)).items() >= libraries(DEBIAN_FOLDER).items()


def test_a_link_to_the_agents_own_files_is_not_followed(tmp_path: Path) -> None:
    root = driver_roots.debian(tmp_path / "root")
    driver_roots.file(tmp_path, "/outside/libnvidia-evil.so.1")
    driver_roots.link(
        root, f"{DEBIAN_FOLDER}/libnvidia-evil.so.{VERSION}", str(tmp_path / "outside/libnvidia-evil.so.1")
    )
    driver_roots.link(root, f"{DEBIAN_FOLDER}/libnvidia-up.so.{VERSION}", "../../../../outside/libnvidia-evil.so.1")
    assert not [path for path in mounted(find(root)) if "evil" in path or "up.so" in path]


def _remove(root: Path, pattern: str) -> None:
    for path in [path for path in root.rglob(pattern) if path.is_symlink() or not path.is_dir()]:
        path.unlink()


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no root": (shutil.rmtree, "does not exist: see --driver-root and --driver-root-mount"),
    "no driver": (lambda root: _remove(root, "lib*"), "no libcuda.so.<version> is in the driver root"),
    "no cuda library": (lambda root: _remove(root, "libcuda*"), "no libcuda.so.<version> is in the driver root"),
    "no nvml": (lambda root: _remove(root, "libnvidia-ml*"), f"libnvidia-ml.so.{VERSION} is not in the driver root"),
    "only links": (lambda root: _remove(root, f"libcuda.so.{VERSION}"), "no libcuda.so.<version>"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_root_without_a_usable_driver_is_refused_with_the_reason(tmp_path: Path, kind: str) -> None:
    root = driver_roots.debian(tmp_path / "root")
    breaking, expected = BROKEN[kind]
    breaking(root)
    for version in (VERSION, None):
        with pytest.raises(installation.NoDriverError) as caught:
            find(root, version=version)
        assert expected in str(caught.value)


def test_libraries_of_another_version_than_the_kernel_module_are_refused(tmp_path: Path) -> None:
    with pytest.raises(installation.NoDriverError) as caught:
        find(driver_roots.debian(tmp_path), version="590.10")
    assert f"has the libraries of driver {VERSION}, but the loaded kernel module is 590.10" in str(caught.value)


def test_several_drivers_and_nothing_that_says_which(tmp_path: Path) -> None:
    for version in (VERSION, "535.183.01"):
        driver_roots.install(tmp_path, DEBIAN_FOLDER, version=version, links=False)
    with pytest.raises(installation.NoDriverError, match="several drivers"):
        find(tmp_path, version=None)


def test_a_machine_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(installation.NoDriverError, match="riscv64"):
        find(driver_roots.debian(tmp_path), machine="riscv64")
