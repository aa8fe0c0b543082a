# SPDX-License-Identifier: Apache-2.0
"""The command `hack/oracle`."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence

from hack.judges import allocator, hwloc, impossible, mig, places, shares

JUDGES: Mapping[str, Callable[[Sequence[str]], int]] = {
    "allocator": allocator.main,
    "hwloc": hwloc.main,
    "impossible": impossible.main,
    "mig": mig.main,
    "places": places.main,
    "shares": shares.main,
}

USAGE = """usage: hack/oracle [allocator|hwloc|impossible|mig|places|shares] [option ...]

Judges that are not ours. Without a name all of them, as short as they can be.

  allocator   upstream's own allocator over random claims: the order of our devices against other orders
  hwloc       hwloc's view of this machine and of every machine of the zoo against that of our probe
  impossible  what claims for parts of GPUs that do not fit cost upstream's allocator
  mig         what upstream's allocator gives away of divided GPUs, prepared by an agent that is killed now and then
  places      upstream's allocator over random claims for parts of GPUs: the order of places against other orders
  shares      what upstream's allocator gives away of shared GPUs, prepared by an agent that is killed now and then

Go and hwloc are fetched where they are missing. Exit status 1: a judge found against us, or could not judge.

examples:
  hack/oracle
  hack/oracle allocator --help
  hack/oracle allocator --claims 2000 --sequences 20 --kinds dgx-1-v100     a long run
  hack/oracle hwloc --help
  hack/oracle mig --steps 10000                                             an hour
  hack/oracle shares --steps 10000
  hack/oracle impossible --most 9 dgx-h100 h100-16-pcie
  hack/oracle places --claims 1000 --sequences 4 dgx-h100 dgx-a100-divided rtx-pro-4
"""


def main(arguments: Sequence[str]) -> int:
    """Runs the judge that is named, or all of them, and returns the worst exit status."""
    if not arguments:
        return max([judge([]) for judge in JUDGES.values()])
    name, *rest = arguments
    if name in {"-h", "--help"}:
        print(USAGE, end="")
        return 0
    if name not in JUDGES:
        print(f"hack/oracle: there is no judge {name!r}\n\n{USAGE}", file=sys.stderr, end="")
        return 2
    return JUDGES[name](rest)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
