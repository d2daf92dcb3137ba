"""What W_V carries: labels read off values by probes, and taken out of them again.

    found = payload(model, load_conllu("en_ewt-ud-dev.conllu"))      # parts of speech
    found.best()                                                     # heads over random projections
    found.labour.contrasts_frame()                                   # v against q and k

`payload` holds every head's values, queries and keys against projections of the same input that
owe nothing to the head; `erase` takes a label out of a head's values and looks at what is left of
it where they arrive.
"""

from wvprobe.value_payload.confirming import confirm_heads
from wvprobe.value_payload.erasing import EraseResult, erase
from wvprobe.value_payload.measuring import payload
from wvprobe.value_payload.results import LabourResult, PayloadMap, PayloadResult, payload_map

__all__ = [
    "EraseResult",
    "LabourResult",
    "PayloadMap",
    "PayloadResult",
    "confirm_heads",
    "erase",
    "payload",
    "payload_map",
]
