"""The configuration that a YAML file describes, checked and with every default filled in.

model       OffloadConfig, the whole        fields      sections, types of values, sizes
optimizer   `optimizer:`                    training    `train:`
file        reading YAML, keys and lines    source      from files, mappings and overrides
errors      one line that names the key
"""

from offload.config.sections import NvmeConfig as NvmeConfig
from offload.config.sections import OffloadConfig as OffloadConfig
