"""Display of foreign text on a terminal: control characters made visible, long lines cut.

Names, messages, server answers, log lines and a model's text can hold escape sequences that move the cursor, rewrite
what stands above, set the window's title or reverse the order of what is read.
"""

from __future__ import annotations

import re

# The longest line that is printed about a failure.
LONGEST = 2000

# C0 controls except tab and newline, DEL, C1 controls; separators that end a line; embeddings, overrides, isolates of
# bidirectional text; halves of surrogate pairs, which no encoding can write.
_HIDDEN = "\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_IN_TEXT = re.compile(f"[{_HIDDEN}]")
_IN_A_LINE = re.compile(f"[{_HIDDEN}\t\n]")


def visible(text: str) -> str:
    """The text with control characters as escapes, such as \\x1b or \\u202e. Newlines and tabs stay."""
    return _IN_TEXT.sub(_escape, text)


def one_line(text: str) -> str:
    """As `visible`, with newlines and tabs as escapes too, so that a name cannot begin a line of its own."""
    return _IN_A_LINE.sub(_escape, text)


def bounded(text: str) -> str:
    """As `one_line`; of more than LONGEST characters the middle is left out."""
    shown = one_line(text)
    if len(shown) <= LONGEST:
        return shown
    return f"{shown[: LONGEST // 2]} [{len(shown) - LONGEST:,} characters left out] {shown[-LONGEST // 2 :]}"


def _escape(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
