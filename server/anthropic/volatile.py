"""Take out of system text what an agent writes anew into each request, and no model needs.

A line that changes at the beginning of a prompt makes everything behind it new. It is taken out of
the prompt itself, before the template: to leave it out of the hash alone would put stored KV
behind other text than it was computed for.
"""

from __future__ import annotations

import re

#: The line that says on whose account an agent works; a checksum in it changes each time.
_BILLING_LINE = re.compile(r"^x-anthropic-billing-header:[^\n]*(?:\n|\Z)", re.MULTILINE)

#: What is left of a budget, added once more at each turn.
_BUDGET_MARKER = re.compile(r"<total_tokens>[ \t]*\d[\d,._]*[ \t]+tokens left[ \t]*</total_tokens>")


def without_volatile_lines(text: str) -> str:
    """Return a system text without the lines that change from request to request.

    A text that consists of them becomes empty; one that has none is returned as it is.
    """
    if "x-anthropic-billing-header:" in text:
        text = _BILLING_LINE.sub("", text)
    *before, rest = _BUDGET_MARKER.split(text)
    if before:
        # The white space that sets a marker off goes with it, however many there are by now.
        head = "".join(part.rstrip() for part in before)
        text = head + rest if head else rest.lstrip("\n")
    return text
