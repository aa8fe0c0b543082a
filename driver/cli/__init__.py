# SPDX-License-Identifier: Apache-2.0
"""The command line: one module a verb. Imports what a verb needs when it runs."""
