"""A small world in prose, among prose: the idea of bAbI (Weston et al., arXiv 1502.05698).

People walk through a house, take things, hand them on and put them down. What is asked follows from
one event, two or more; the events stand in their order between sentences of other prose.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from razor_dist.evals.suites.sample import QUESTIONS, HiddenText, SuiteQuestion, Units, prose
from razor_dist.evals.suites.tasks import NUMBER_NAMES, Making, Suite, Task, first_word

_ABOUT = (
    "The text below tells, between other things, how people walk through a house and what they do "
    "with things there. Remember where everybody and everything is."
)
_EVENTS = 24
_PEOPLE = ("Alrik", "Bettina", "Cosimo", "Dagny", "Ewald", "Fiorella", "Gudrun", "Hjalmar")
_ROOMS = ("attic", "bedroom", "cellar", "garage", "garden", "hallway", "kitchen", "library")
_THINGS = ("basket", "candle", "kettle", "ladder", "lamp", "rope", "umbrella", "violin")
_CAST, _PLACES, _PROPS = 4, 5, 4
# Of events, their wordings; `who` acts, `other` receives.
_WALK = ("{who} went to the {room}.", "{who} walked into the {room}.", "{who} moved to the {room}.")
_TAKE = ("{who} picked up the {thing}.", "{who} took the {thing}.")
_DROP = ("{who} put down the {thing}.", "{who} left the {thing} there.")
_GIVE = ("{who} handed the {thing} to {other}.", "{who} passed the {thing} on to {other}.")


@dataclass
class World:
    """A random story: people's rooms, each thing's rooms, and who gave it to whom."""

    draw: random.Random
    sentences: list[str] = field(default_factory=list)  # in order
    at: dict[str, str] = field(default_factory=dict)  # people's rooms
    lies: dict[str, str] = field(default_factory=dict)  # rooms of things that are not carried
    carrier: dict[str, str] = field(default_factory=dict)
    rooms_of: dict[str, list[str]] = field(default_factory=dict)  # things', each change once
    givers: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # by receiver and thing

    def __post_init__(self) -> None:
        people, rooms = self.draw.sample(_PEOPLE, _CAST), self.draw.sample(_ROOMS, _PLACES)
        self._rooms = rooms
        for who in people:
            self.at[who] = self.draw.choice(rooms)
            self.sentences.append(f"{who} is in the {self.at[who]}.")
        for thing in self.draw.sample(_THINGS, _PROPS):
            self.lies[thing] = self.draw.choice(rooms)
            self.rooms_of[thing] = [self.lies[thing]]
            self.sentences.append(f"The {thing} is in the {self.lies[thing]}.")
        for _ in range(_EVENTS):
            self._happen()

    def _happen(self) -> None:
        """Let one person do what can be done; walking is as likely as all else together."""
        who = self.draw.choice(list(self.at))
        here = self.at[who]
        takes = [thing for thing, room in self.lies.items() if room == here]
        has = [thing for thing, carrier in self.carrier.items() if carrier == who]
        others = [other for other, room in self.at.items() if room == here and other != who]
        gives = [thing for thing in has if others]
        acts = [act for act, on in ((_TAKE, takes), (_DROP, has), (_GIVE, gives)) if on]
        if not acts or self.draw.random() < 0.5:
            room = self.draw.choice([room for room in self._rooms if room != here])
            self.at[who] = room
            for thing in has:
                self.rooms_of[thing].append(room)
            return self._tell(_WALK, who=who, room=room)
        act = self.draw.choice(acts)
        thing = self.draw.choice(takes if act is _TAKE else has)
        if act is _TAKE:
            del self.lies[thing]
            self.carrier[thing] = who
        elif act is _DROP:
            del self.carrier[thing]
            self.lies[thing] = here
        else:
            other = self.draw.choice(others)
            self.carrier[thing] = other
            self.givers.setdefault((other, thing), []).append(who)
            return self._tell(act, who=who, thing=thing, other=other)
        return self._tell(act, who=who, thing=thing)

    def _tell(self, wordings: tuple[str, ...], **about: str) -> None:
        self.sentences.append(self.draw.choice(wordings).format(**about))


def _person(world: World) -> Iterator[SuiteQuestion]:
    for who, room in world.at.items():
        yield SuiteQuestion(f"Where is {who} in the end?", f"In the end, {who} is in the", (room,))


def _thing(world: World) -> Iterator[SuiteQuestion]:
    """Ask for things that were carried away from where they lay in the beginning."""
    for thing, rooms in world.rooms_of.items():
        if len(rooms) > 1:
            question = f"Where is the {thing} in the end?"
            yield SuiteQuestion(question, f"In the end, the {thing} is in the", (rooms[-1],))


def _before(world: World) -> Iterator[SuiteQuestion]:
    for thing, rooms in world.rooms_of.items():
        if len(rooms) > 2:
            when = f"right before it was last brought to the {rooms[-1]}"
            cue = f"Right before it was last brought to the {rooms[-1]}, the {thing} was in the"
            yield SuiteQuestion(f"Where was the {thing} {when}?", cue, (rooms[-2],))


def _giver(world: World) -> Iterator[SuiteQuestion]:
    for (who, thing), givers in world.givers.items():
        question = f"From whom did {who} last get the {thing}?"
        yield SuiteQuestion(question, f"{who} last got the {thing} from", (givers[-1],))


def _count(world: World) -> Iterator[SuiteQuestion]:
    for who in world.at:
        number = sum(carrier == who for carrier in world.carrier.values())
        question = f"How many things does {who} have in the end? Answer with a number."
        cue = f"In the end, the number of things that {who} has is"
        yield SuiteQuestion(question, cue, (str(number), NUMBER_NAMES[number]))


_ASKED = {"person": _person, "thing": _thing, "before": _before, "giver": _giver, "count": _count}
_COUNTS = ("0", "1", "2")  # each is asked for once, so that none is likelier


def _questions(world: World) -> list[SuiteQuestion]:
    """Return what each task asks about a world; nothing if there is a task that cannot ask.

    Two people at least are asked for as givers: where one gave all, its name is easily guessed.
    """
    every = list[SuiteQuestion]()
    for task, ask in _ASKED.items():
        found = list(ask(world))
        world.draw.shuffle(found)
        by_answer = {asked.answers[0]: asked for asked in found}
        if task == "count":
            found = [by_answer[own] for own in _COUNTS] if by_answer.keys() >= {*_COUNTS} else []
        if not found or (task == "giver" and len(by_answer) == 1):
            return []
        every += (replace(asked, task=task) for asked in found[:QUESTIONS])
    return every


def _units(making: Making) -> Units:
    draw, essay = making.draw, making.material.essay
    worlds = ((world, _questions(world)) for world in iter(lambda: World(draw), None))
    world, asked = next((world, asked) for world, asked in worlds if asked)
    places = sorted(draw.random() for _ in world.sentences)
    hidden = list(zip(places, world.sentences, strict=True))
    return HiddenText(_ABOUT, hidden, prose(draw, essay), asked, separator=" ").units


WORLD = Suite(
    "world",
    "A small world",
    dict.fromkeys(_ASKED, Task(_units, 6, first_word)),
    several_questions=True,
    one_document=True,
    # 2: counts are equally frequent; 3: several questions; 4: all tasks ask about one document
    version=4,
)
