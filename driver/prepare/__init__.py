# SPDX-License-Identifier: Apache-2.0
"""From a claim to devices in a container: claim, plan, durable record, CDI file, answer; and back."""
