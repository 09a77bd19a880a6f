"""Plain text for powers, formulas, symbols and numbers of lists, which a page shows by form."""

from __future__ import annotations

import re

# Footnotes in brackets, ordinals (1st) and trade marks are read as they stand, without a mark.
_POWER = re.compile(r"(?![^\W\d_]{2,}$)[\w+\-\u2212(]")
_WHOLE = re.compile(r"[+\-\u2212]?(?:\d+(?:[.,]\d+)*|[^\W\d_]*)|\([^()]*\)")
_ROMAN = (
    *((1000, "m"), (900, "cm"), (500, "d"), (400, "cd"), (100, "c"), (90, "xc")),
    *((50, "l"), (40, "xl"), (10, "x"), (9, "ix"), (5, "v"), (4, "iv"), (1, "i")),
)
# Word's symbols by their codes, from 0x40 and 0xa1 on in the font Symbol, and some of Wingdings.
_SYMBOLS = {
    **{0x22: "∀", 0x24: "∃", 0x27: "∋", 0x2D: "−"},  # noqa: RUF001
    **dict(enumerate("≅ΑΒΧΔΕΦΓΗΙϑΚΛΜΝΟΠΘΡΣΤΥςΩΞΨΖ[∴]⊥_‾αβχδεφγηιϕκλμνοπθρστυϖωξψζ{|}∼", 0x40)),  # noqa: RUF001
    **dict(enumerate("ϒ′≤⁄∞ƒ♣♦♥♠↔←↑→↓°±″≥×∝∂•÷≠≡≈…⏐⎯↵", 0xA1)),  # noqa: RUF001
    **dict(enumerate("ℵℑℜ℘⊗⊕∅∩∪⊃⊇⊄⊂⊆∈∉∠∇®©™∏√⋅¬∧∨⇔⇐⇑⇒⇓", 0xC0)),  # noqa: RUF001
}
_WINGDINGS = {
    **{0x6F: "☐", 0x78: "☒", 0xA8: "☐", 0xFD: "☒", 0xFE: "☑"},
    **{0xE0: "→", 0xFB: "✗", 0xFC: "✓"},
}


def symbol(font: str, code: int) -> str:
    """Return the character of a symbol in a font; empty for a picture that has none here."""
    if not 0xF000 <= code <= 0xF0FF:  # Word's codes for symbols without a Unicode character
        return chr(code)
    code -= 0xF000
    if font == "Symbol":
        return _SYMBOLS.get(code, chr(code) if code >= 0x20 else "")
    return _WINGDINGS.get(code, "") if font == "Wingdings" else ""


def raised(text: str) -> str:
    """Return raised text as ``^6`` if it may be a power, since 10⁶ is not 106."""
    said = text.strip()
    return text.replace(said, f"^{grouped(said)}", 1) if _POWER.match(said) else text


def reading(text: str) -> str:
    """Return in parentheses how the characters before are read, as in 漢字(かんじ)."""
    return f"({text.strip()})" if text.strip() else ""


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
