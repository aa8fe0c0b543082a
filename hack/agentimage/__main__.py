# SPDX-License-Identifier: Apache-2.0
"""`hack/image`: build the agent's image, or find it built, and print the path of its archive."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from hack.agentimage import build, workspace
from hack.agentimage.engines import ENGINES
from hack.agentimage.errors import ImageError


def main(arguments: Sequence[str]) -> int:
    """Exit status 0, 1 with the reason on stderr, or argparse's 2. Only the path goes to stdout."""
    parser = argparse.ArgumentParser(
        prog="hack/image",
        description="Build the agent's image of this tree as a docker-archive and print its path. A second build of the same tree takes"
        " no time: archives are kept in ${NEARFIELD_CACHE:-${XDG_CACHE_HOME:-~/.cache}/nearfield}/images. See docs/image.md.",
    )
    parser.add_argument("--tag", default=build.TAG, help="the image's name (default: %(default)s)")
    parser.add_argument("--output", metavar="FILE", type=Path, help="write the archive here too")
    parser.add_argument(
        "--engine",
        choices=sorted(ENGINES),
        help="default: docker or podman if it answers, else buildah on Debian packages, for which you are root",
    )
    parser.add_argument(
        "--base", metavar="IMAGE", help="build on this image instead (default: the engine's; see deploy/Containerfile)"
    )
    parser.add_argument("--pull", action="store_true", help="get the base anew and build, though an archive is there")
    options = parser.parse_args(arguments)
    workspace.end_by_exception_when_told_to()
    try:
        archive = build.archive(tag=options.tag, engine=options.engine, base=options.base, again=options.pull)
        if options.output:
            build.copy(archive, options.output)
    except (ImageError, OSError) as error:
        print(f"hack/image: {error}", file=sys.stderr)
        return 1
    print(options.output or archive)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
