"""Needles that share no word with their question: NoLiMa's idea (Modarressi et al., 2502.05167).

The person asked for must be found by what the needle means. Other people stand in the text with
other facts; ``literal`` quotes the needle, and is the control.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable
from typing import NamedTuple

from razor_dist.config.errors import ConfigError
from razor_dist.evals.suites.sample import Filler, Sample, Units, among, places_of
from razor_dist.evals.suites.tasks import Making, Suite, Task, first_word


class Fact(NamedTuple):
    said: str  # of a person, in the text
    near: str  # what follows from it at once
    far: str  # what follows from that; no two facts of one text share it


FACTS = (
    Fact("took a photograph inside the Colosseum", "has been to Italy", "has been to Europe"),
    Fact("once got lost at the foot of the Acropolis", "has been to Greece", "has been to Europe"),
    Fact("walked up the Eiffel Tower on foot", "has been to France", "has been to Europe"),
    Fact(
        "caught a cold in the shadow of the great Sphinx", "has been to Egypt", "has been to Africa"
    ),
    Fact("saw the sun rise behind the Taj Mahal", "has been to India", "has been to Asia"),
    Fact("sketched Mount Fuji from a train window", "has been to Japan", "has been to Asia"),
    Fact(
        "proposed on the terraces of Machu Picchu", "has been to Peru", "has been to South America"
    ),
    Fact("camped within sight of Uluru", "has been to Australia", "has been where kangaroos live"),
    Fact(
        "rubs rosin on the bow every evening", "plays the violin", "would fit into a string quartet"
    ),
    Fact("has eighty-eight keys to dust", "owns a piano", "can read two staves at once"),
    Fact("soaks the reed before each rehearsal", "plays the clarinet", "sits among the woodwinds"),
    Fact("is covered in flour long before dawn", "works as a baker", "sells bread"),
    Fact("nailed new iron on the hooves of the mare", "works as a farrier", "is used to kicks"),
    Fact("put on the wig and objected twice", "works as a barrister", "has studied law"),
    Fact("warmed the stethoscope between both palms", "works as a doctor", "can treat a fever"),
    Fact("marks essays until midnight on Sundays", "works as a teacher", "spends days at school"),
    Fact(
        "drove the red engine with the hose to the blaze",
        "is a firefighter",
        "slides down a pole at the station",
    ),
    Fact("swells up after a single peanut", "has an allergy", "keeps adrenaline within reach"),
    Fact("never touches beef, pork, or trout", "is a vegetarian", "would refuse a hamburger"),
    Fact("pricks a finger and measures the sugar", "has diabetes", "carries insulin"),
    Fact("waxed the board and waited for a swell", "likes surfing", "swims well"),
    Fact("lost the set by a double fault", "plays tennis", "owns a racket"),
    Fact(
        "fell off the saddle on the last climb to the pass",
        "rides a bicycle",
        "oils a chain now and then",
    ),
    Fact("empties the litter tray twice a day", "has a cat", "owns a scratching post"),
    Fact("smokes the hive before lifting its lid", "is a beekeeper", "never runs out of honey"),
    Fact(
        "takes the green signal for the red one",
        "is colour-blind",
        "should not sort coloured wires",
    ),
    Fact("pushes the pram around the block at three at night", "has a baby", "buys nappies"),
    Fact("pays the tailor for sleeves of double length", "is very tall", "bumps into lintels"),
)
_NAMES = (
    *("Aldous", "Barnaby", "Clementine", "Dorothea", "Eusebia", "Fitzgerald", "Griselda"),
    *("Hezekiah", "Isadora", "Jocasta", "Kunigunde", "Lysander", "Marmaduke", "Nepomuk"),
    *("Ottoline", "Peregrine", "Quentin", "Rosamund", "Sigismund", "Theodora", "Ulrika"),
    *("Valentina", "Wilhelmina", "Xanthippe", "Yolanda", "Zebulon"),
)
_PEOPLE = 4
_WORD = re.compile(r"[a-z]{4,}")


# Words of four letters and more that lead to no fact.
_COMMON = set(
    _WORD.findall(
        "after among around back been before behind between both could each every from great have "
        "home into know knows last like likes long must need needs never once ones other people "
        "single take takes than that their them these they this those until very well what with "
        "within would works good days"
    )
)


def _about(fact: Fact) -> set[str]:
    """Return what prose around a fact may not say, so that nothing else leads to it."""
    return set(_WORD.findall(" ".join(fact).lower())) - _COMMON


def _literal(fact: Fact) -> tuple[str, str]:
    return f'Of which person does the text above say "{fact.said}"?', "The text says so of"


def _follows(what: str) -> tuple[str, str]:
    return (
        f"Which person in the text above {what}? The text says so in other words.",
        f"The person who {what} is",
    )


def _task(ask: Callable[[Fact], tuple[str, str]]) -> Task:
    def units(making: Making) -> Units:
        draw = making.draw
        facts: dict[str, Fact] = {}
        for fact in draw.sample(FACTS, len(FACTS)):
            facts.setdefault(fact.far, fact)
        chosen = list(facts.values())[:_PEOPLE]
        names = draw.sample(_NAMES, _PEOPLE)
        asked, name = chosen[0], names[0]
        said = [f"{who} {fact.said}." for who, fact in zip(names, chosen, strict=True)]
        hidden = [(draw.random(), sentence) for sentence in said]
        question, cue = ask(asked)
        unsaid = _about(asked) | {name.lower()}
        prose = [s for s in making.material.essay if not unsaid & set(_WORD.findall(s.lower()))]
        if not prose:
            raise ConfigError("every sentence of the prose has a word of the needle's")
        begin = draw.randrange(len(prose))
        filler = Filler(itertools.islice(itertools.cycle(prose), begin, None))

        def build(count: int) -> Sample:
            text = (
                "The text below mentions several people. There will be a question about one.\n"
                f"{' '.join(among(filler.first(count), hidden))}\n"
                f"Question: {question} Answer with the name alone."
            )
            places = places_of(text, {name: said[0]})
            return Sample.asking(text, f"Answer: {cue}", [name], places)

        return Units(build)

    return Task(units, 10, first_word)


NONLITERAL = Suite(
    "nonliteral",
    "Needles without the question's words",
    {
        "literal": _task(_literal),
        "near": _task(lambda fact: _follows(fact.near)),
        "far": _task(lambda fact: _follows(fact.far)),
    },
)
