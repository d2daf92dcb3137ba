"""What does W_V carry?"""

from wvprobe.report.claims import Claim

CLAIMS = (
    Claim(
        "1.1",
        "W_Q and W_K carry routing, W_V carries content",
        "supported if v's decodability over its references exceeds q's and k's and exchanged "
        "values move the destination's content more than exchanged patterns do, intervals above "
        "0; refuted if neither",
    ),
    Claim(
        "1.2",
        "Each layer's W_V decides anew what flows on",
        "overlap of layers' W_V row spaces within .05 of random, and payload range over layers "
        "> .05",
    ),
)
