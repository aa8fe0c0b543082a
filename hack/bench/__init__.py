# SPDX-License-Identifier: Apache-2.0
"""The benchmark: a real `nearfield run` beside a Go driver, between a stand-in API server or a real node's and a raw client on its DRA
socket; on a real node under the real kubelet too.

Law: figures of different machines, or of one machine at different hours, are not comparable, so whatever is compared is
measured in one run, turn by turn, with the same pauses, and compared pair by pair. Nothing here asserts a time: a run
measures, says which targets were met, and leaves the judgement to its reader.

`stats` and `report` are pure. `floor` is frozen: a change of it makes all earlier ratios meaningless.
"""
