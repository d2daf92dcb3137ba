"""Public functions with arguments that work, and what each argument must not be.

A table that tests of hostile arguments go through. Each of ``CALLS`` is a function with arguments
that work, and says of which kind the others are; `values` holds the values of a kind.
"""

from hostile import changes, labels, probing, scores, texts
from hostile.things import Call as Call
from hostile.things import Things as Things

CALLS: dict[str, Call] = {
    **texts.CALLS,
    **changes.CALLS,
    **labels.CALLS,
    **probing.CALLS,
    **scores.CALLS,
}
