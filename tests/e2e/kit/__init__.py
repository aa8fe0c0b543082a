# SPDX-License-Identifier: Apache-2.0
"""What the scenarios are written with: objects as small dicts, waiting that says what it saw last, and the node seen from
where its users and its operators look. Nothing here knows how the agent works inside.
"""
