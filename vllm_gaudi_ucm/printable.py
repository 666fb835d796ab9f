"""Text for outputs that cannot encode every character: a look-alike replaces a missing character."""

import codecs
import io
import sys

LOOK_ALIKES = {
    # rules, edges and corners of tables; bars
    **dict.fromkeys("─━═╌╍┄┅╴╶╸╺╼╾", "-"),
    **dict.fromkeys("│┃║╎╏┆┇╵╷╹╻", "|"),
    **dict.fromkeys("┌┐└┘├┤┬┴┼╭╮╯╰┏┓┗┛┣┫┳┻╋┡┩╇╈╞╡╪╔╗╚╝╠╣╦╩╬", "+"),
    **dict.fromkeys("█▉▊▋", "#"),
    **dict.fromkeys("▌▍▎▏", ":"),
    # dashes, quotation marks, arrows and signs of names and texts
    **dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-"),
    **dict.fromkeys("\u2018\u2019\u201a\u2039\u203a", "'"),
    **dict.fromkeys("\u201c\u201d\u201e\u00ab\u00bb", '"'),
    **dict.fromkeys("•●·", "*"),
    "→": ">",
    "←": "<",
    "…": "~",
    "\u00d7": "x",
    "µ": "u",
    "≈": "~",
    "✓": "v",
    "✗": "x",
}
"""Replacements character by character, so that columns stay aligned."""

# an error handler of codecs, and its name
HANDLER = "gaudi_ucm.look_alike"


def printable(text: str, encoding: str) -> str:
    """Returns `text` with look-alikes for characters that `encoding` lacks, or a question mark."""
    return text.encode(encoding, HANDLER).decode(encoding)


def print_look_alikes() -> None:
    """Lets stdout and stderr of this process print any text. For programs of our own only."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=HANDLER)


def _look_alike(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    missing = error.object[error.start : error.end]
    return "".join(LOOK_ALIKES.get(character, "?") for character in missing), error.end


codecs.register_error(HANDLER, _look_alike)
