# SPDX-License-Identifier: Apache-2.0
"""The moments of prepare, unprepare and recovery at which a crash would leave something half done.

A test sets NEARFIELD_CRASH_AT to one name before the process starts, and the process kills itself there as a power switch
would (SIGKILL: no handler, no flush). Without the variable a point costs one comparison.
"""

from __future__ import annotations

import os
import signal
from enum import StrEnum


class Point(StrEnum):
    """Every named moment, in the order in which a claim passes them."""

    PREPARE_LOCKED = "prepare.locked"
    PREPARE_CLAIM_READ = "prepare.claim-read"
    PREPARE_PLANNED = "prepare.planned"
    PREPARE_BEFORE_COMMIT = "prepare.before-commit"
    PREPARE_AFTER_COMMIT = "prepare.after-commit"
    PREPARE_TEMPORARY_FILE = "prepare.temporary-file"
    PREPARE_AFTER_CDI_FILE = "prepare.after-cdi-file"
    PREPARE_BEFORE_ANSWER = "prepare.before-answer"
    UNPREPARE_LOCKED = "unprepare.locked"
    UNPREPARE_AFTER_CDI_FILE = "unprepare.after-cdi-file"
    UNPREPARE_BEFORE_COMMIT = "unprepare.before-commit"
    UNPREPARE_AFTER_COMMIT = "unprepare.after-commit"
    UNPREPARE_BEFORE_ANSWER = "unprepare.before-answer"
    MIG_BEFORE_STARTED = "mig.before-started"
    MIG_AFTER_STARTED = "mig.after-started"
    MIG_MADE = "mig.made"
    MIG_BEFORE_REMOVAL = "mig.before-removal"
    MIG_REMOVED = "mig.removed"
    MIG_BEFORE_RELEASING = "mig.before-releasing"
    MIG_AFTER_RELEASING = "mig.after-releasing"
    SHARES_APPLIED = "shares.applied"
    SHARES_BEFORE_UNDO = "shares.before-undo"
    SHARES_UNDONE = "shares.undone"
    RECOVER_MOVED_ASIDE = "recover.moved-aside"
    RECOVER_BEFORE_COMMIT = "recover.before-commit"


NAMES: tuple[str, ...] = tuple(Point)
"""All of them, for tests that must leave none out."""

_target = os.environ.get("NEARFIELD_CRASH_AT")


def reach(point: Point) -> None:
    """Pass a point; the process ends here if it was started to end here."""
    if point == _target:
        os.kill(os.getpid(), signal.SIGKILL)
