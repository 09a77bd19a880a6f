"""Needles that share no word with their question: NoLiMa's idea (Modarressi et al., 2502.05167).

The person asked for must be found by what the needle means. Four people stand in the text, each
with a fact of its own, and each is asked for; ``literal`` asks in the needle's own words and is the
control. The name follows the fact, so that copying what came next answers the control.
"""

from __future__ import annotations

import re
from functools import cache
from importlib.resources import files
from typing import NamedTuple

from razor_dist.config.errors import ConfigError
from razor_dist.evals.suites.sample import HiddenText, SuiteQuestion, Units, prose
from razor_dist.evals.suites.tasks import Making, Suite, Task, first_word


class Fact(NamedTuple):
    said: str  # of a person, in the text
    near: str  # what follows from it at once
    far: str  # what follows from that; no two facts of one text share it


@cache
def facts() -> tuple[Fact, ...]:
    file = files("razor_dist.configs").joinpath("nonliteral_facts.txt")
    lines = file.read_text(encoding="utf-8").splitlines()
    return tuple(Fact(*line.split(" | ")) for line in lines)


_NAMES = (
    *("Aldous", "Barnaby", "Clementine", "Dorothea", "Eusebia", "Fitzgerald", "Griselda"),
    *("Hezekiah", "Isadora", "Jocasta", "Kunigunde", "Lysander", "Marmaduke", "Nepomuk"),
    *("Ottoline", "Peregrine", "Quentin", "Rosamund", "Sigismund", "Theodora", "Ulrika"),
    *("Valentina", "Wilhelmina", "Xanthippe", "Yolanda", "Zebulon"),
)
_ABOUT = "The text below mentions several people. There will be a question about each."
_PEOPLE = 4
_WORD = re.compile(r"[a-z]{3,}")


# Words of three letters and more that lead to no fact.
_COMMON = set(
    _WORD.findall(
        "and are been can day for from got had has her his how its new not now off one our out put "
        "saw set the two was who you down should sort then three took twice used where "
        "after among around back before behind between both could each every from great have "
        "home into know knows last like likes long must need needs never once ones other people "
        "single take takes than that their them these they this those until very well what with "
        "within would works good days"
    )
)


def _stems_of(fact: Fact) -> set[str]:
    """Return word stems that the surrounding prose must not contain, so that only the needle fits.

    ``lawyer`` has ``law``, and ``lived`` ``live``.
    """
    words = set(_WORD.findall(" ".join(fact).lower())) - _COMMON
    return {word.removesuffix("s")[:5] for word in words}


def _units(making: Making) -> Units:
    draw = making.draw
    by_far: dict[str, Fact] = {}
    for one in draw.sample(facts(), len(facts())):
        by_far.setdefault(one.far, one)
    chosen = list(by_far.values())[:_PEOPLE]
    names = draw.sample(_NAMES, _PEOPLE)
    hidden, asked, unsaid = [], [], {name.lower() for name in names}
    for name, fact in zip(names, chosen, strict=True):
        said = f"The one who {fact.said} is {name}."
        hidden.append((draw.random(), said))
        unsaid |= _stems_of(fact)
        for task, what in (("literal", fact.said), ("near", fact.near), ("far", fact.far)):
            question = f"Who {what}, by the text above? Answer with the name alone."
            asked.append(
                SuiteQuestion(question, f"The one who {what} is", [name], {name: said}, task)
            )
    leads = re.compile(rf"\b(?:{'|'.join(sorted(unsaid))})", re.IGNORECASE)
    essay = [sentence for sentence in making.material.essay if not leads.search(sentence)]
    if not essay:
        raise ConfigError("every sentence of the prose has a word of a needle's")
    return HiddenText(_ABOUT, hidden, prose(draw, essay), asked, separator=" ").units


NONLITERAL = Suite(
    "nonliteral",
    "Needles without the question's words",
    dict.fromkeys(("literal", "near", "far"), Task(_units, 10, first_word)),
    several_questions=True,
    one_document=True,
    # 2: several questions; 3: prose without inflections of a needle's words; 4: the name comes
    # last, and all tasks ask about one document
    version=4,
)
