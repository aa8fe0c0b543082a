# SPDX-License-Identifier: Apache-2.0
"""Machines that are not here: described or recorded, then replayed behind the same file systems and the same C functions.

    Machine (YAML, by people) --expand--> Recording (JSON) --render--> directory: sys/ proc/ dev/ nvml.json
    a real node -----------capture------> Recording                    `-- load_library --> the functions of libnvidia-ml

The rest of discovery never learns of it: `sysfs` reads the rendered tree, `nvml` lets pynvml marshal into the library's
functions as it does into NVIDIA's. So mock, replay and hardware run one path from the first byte.

Law: what a Recording has not is absent (a file that is not there, NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_FUNCTION_NOT_FOUND),
never made up. All state lies in files of the rendered directory, so that it survives the process as hardware would, and
changes (faults, MIG) act on a running agent. Only `machine`, `products` and `zoo` read what people write; what an agent
imports to replay (`library`, `faults`, `state`, `recording`) needs neither pydantic nor YAML.
"""
