# SPDX-License-Identifier: Apache-2.0
"""The agent as a whole: what is built of what, in which order it starts and stops, and what it says of itself.

Order of start: probe (it runs beside everything else), record, CDI files, service socket, registration, slices. Whatever
takes long (reading hardware, the API server's client, Prometheus) comes after the sockets serve; a Prepare that needs it waits.
Stop is the reverse.
"""
