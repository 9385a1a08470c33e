"""The built-in prompt sets: short, medium, long and thinking.

No two prompts of a set begin with the same word, so that a cache knows none by another.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from vllm_mlx.bench.prompt import Prompt, user_prompt

#: Some 10 to 30 tokens each.
_SHORT = (
    "Name three things that float on water and say why each one does.",
    "Write a two-line poem about a lighthouse in fog.",
    "What is the difference between a queue and a stack? Answer in one paragraph.",
    "Translate into French: The train to the coast leaves at half past nine.",
    "Give me a packing list for two days of hiking in the rain.",
    "Explain to a ten-year-old why the moon seems to change its shape.",
    "Suggest a name for a small bakery beside a canal, and a motto for it.",
    "Python, please: a function that returns the second largest number of a list.",
)

#: Some 300 to 450 tokens each, with the question at the end.
_HANDBOOK = (
    "The reading room opens at eight and closes at ten in the evening, except on the first Monday "
    "of the month, when the floors are waxed and the doors stay shut until noon. Members may take "
    "a seat wherever one is free; a coat on a chair keeps it for twenty minutes and no longer.",
    "Books from the open shelves may be read at any table and are put on the grey trolleys "
    "afterwards, never back on the shelf: a book in the wrong place is a lost book. Books from the "
    "cellar are ordered with a slip, one slip a book, and arrive within the hour on weekdays.",
    "Maps are kept flat in the long drawers of the east wing. They are handled with clean, dry "
    "hands and without gloves, since gloves tear the edges. Tracing is allowed with the soft "
    "pencils provided at the desk; compasses and ink are not allowed anywhere near a map.",
    "Whoever finds damage reports it, whoever caused it: there is no fine for an honest report, "
    "and repairs done early cost a tenth of repairs done late. The bindery takes loose pages on "
    "Tuesdays and Thursdays and returns small repairs within the week.",
    "The catalogue lists works by author, by subject and by the place they describe. Works of more "
    "than three authors stand under the title. A work that was moved keeps its old number on a "
    "yellow card for a year, so that a note made in spring can still be followed in winter.",
    "Groups of more than six ask for the blue room, which has a door that closes. Talking is "
    "welcome there, and nowhere else above a whisper. The blue room has a screen, two lamps and a "
    "kettle; the kettle is the only place in the building where water may be boiled.",
    "In winter the heating starts at seven and the north windows stay closed. In summer they are "
    "opened by the staff alone, since the wind from the harbour has more than once carried a whole "
    "afternoon's notes out over the boats.",
    "Lost things wait at the desk for a month and then go to the spring sale, whose takings buy "
    "the children's section one new shelf a year. Umbrellas are the exception: they go into the "
    "stand by the door, for anybody whom the rain surprises.",
)

_MEDIUM_QUESTIONS = (
    "Write a friendly one-page notice for new members that says all this in your own words.",
    "Which of these rules protect the books, and which protect the readers? Make two lists.",
    "A visitor wants to copy a map for a school project with a group of eight. What should they "
    "do, step by step, and what should they avoid?",
    "Find everything that depends on the time of day, the day of the week or the season.",
)

_LONG_TITLES = (
    "Log of the harbour master.",
    "Notes of the north quay.",
    "Arrivals, as the port office wrote them down.",
)
_LONG_QUESTIONS = (
    "Summarise the log in ten sentences, with the most important events first.",
    "List the boats that came in more than once, with the days, and say what each of them carried.",
    "Write the harbour master's report to the town council on this period.",
)

_THINKING = (
    "There are 17 sheep on a farm. All but 9 run away, then a third of those left are sold, and "
    "then the flock doubles. How many sheep are there? Think step by step.",
    "Three boxes are labelled apples, oranges and mixed; every label is wrong. You may draw one "
    "fruit from one box. How do you find out what is in each? Prove that it always works.",
    "My clock shows the right time at noon and loses 4 minutes an hour from then on. What is the "
    "right time when it shows six in the evening for the first time?",
    "Find all pairs of whole numbers whose product is three times their sum, and show that there "
    "are no others.",
    "A program reads a list of n numbers and must say whether two of them add up to a third one "
    "in the list. Find a good algorithm and argue why it is correct and how long it takes.",
    "Ann is twice as old as Ben was when Ann was as old as Ben is now. Together they are 63. How "
    "old are they? Check your answer.",
)

_BOATS = ("Marigold", "Second Wind", "Old Tom", "Petrel", "Hanna", "Blue Heron", "Constance")
_CARGOES = ("salt", "timber", "mail and parcels", "barrels of oil", "roof tiles", "seed potatoes")
_WEATHER = (
    "fog until ten",
    "a fresh wind from the west",
    "rain all day",
    "calm and clear",
    "sleet",
)
_EVENTS = (
    "the crane at the north quay jammed and was freed after an hour",
    "the pilot was ill and the mate took her in",
    "a rope had worn through and was replaced at the owner's cost",
    "two crates were opened by customs and found in order",
    "she waited outside for the tide and came in after dark",
    "the crew asked for a doctor, who found nothing worse than a sprain",
)
_LOG_DAYS = 45


def builtin_set(name: str) -> Sequence[Prompt]:
    """Return a built-in set, one of `BUILTIN_SETS`; the same at every call."""
    return [
        user_prompt(f"{name}-{number}", text) for number, text in enumerate(_SETS[name](), start=1)
    ]


def _short() -> Sequence[str]:
    return _SHORT


def _medium() -> Sequence[str]:
    """Give each question another selection of the paragraphs."""
    texts = []
    for number, question in enumerate(_MEDIUM_QUESTIONS):
        paragraphs = [_HANDBOOK[(number + step) % len(_HANDBOOK)] for step in range(5)]
        texts.append("\n\n".join([*paragraphs, question]))
    return texts


def _long() -> Sequence[str]:
    """Give each question a log of its own, some 2,000 to 2,500 tokens long."""
    texts = []
    for number, question in enumerate(_LONG_QUESTIONS):
        rng = random.Random(number)
        lines = [_log_line(day, rng) for day in range(1, _LOG_DAYS + 1)]
        texts.append("\n".join([_LONG_TITLES[number], *lines, "", question]))
    return texts


def _log_line(day: int, rng: random.Random) -> str:
    boat, cargo = rng.choice(_BOATS), rng.choice(_CARGOES)
    hour, minute, tons = rng.randrange(5, 22), rng.randrange(60), rng.randrange(2, 80)
    return (
        f"Day {day}: {rng.choice(_WEATHER)}. The {boat} came in at {hour}:{minute:02} with {tons} "
        f"tons of {cargo}; {rng.choice(_EVENTS)}. Dues paid: {tons * 3 + 11}."
    )


def _thinking() -> Sequence[str]:
    return _THINKING


_SETS = {"short": _short, "medium": _medium, "long": _long, "thinking": _thinking}

BUILTIN_SETS = tuple(_SETS)
