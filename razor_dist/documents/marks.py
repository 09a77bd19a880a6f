"""How a text shows what a page shows by its form: powers, numbers of lists, formulas."""

from __future__ import annotations

import re

# Footnotes in brackets, ordinals (1st) and trade marks are read as they stand, without a mark.
_POWER = re.compile(r"(?![^\W\d_]{2,}$)[\w+\-\u2212(]")
_WHOLE = re.compile(r"[+\-\u2212]?(?:\d+(?:[.,]\d+)*|[^\W\d_]*)|\([^()]*\)")
_ROMAN = (
    *((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc")),
    *((50, "l"), (40, "xl"), (10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i")),
)


def raised(text: str) -> str:
    """Return what stands above the line, as ``^6`` if it may be a power: 10⁶ is not 106."""
    said = text.strip()
    return text.replace(said, f"^{grouped(said)}", 1) if _POWER.match(said) else text


def grouped(text: str) -> str:
    """Return a part of a formula, in parentheses unless it is one number or name."""
    return text if _WHOLE.fullmatch(text) else f"({text})"


def numbered(number: int, form: str) -> str:
    """Return an item's number in a form of HTML's lists: ``1``, ``a``, ``A``, ``i`` or ``I``.

    Letters go on with aa, bb, as Word has them. What a form cannot write is a decimal number.
    """
    if form in ("a", "A") and 0 < number <= 260:
        turns, letter = divmod(number - 1, 26)
        text = chr(ord("a") + letter) * (turns + 1)
    elif form in ("i", "I") and 0 < number < 4000:
        text = ""
        for value, digits in _ROMAN:
            count, number = divmod(number, value)
            text += digits * count
    else:
        return str(number)
    return text.upper() if form.isupper() else text
