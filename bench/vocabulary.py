"""Common words to make prompts of: most tokenizers have one token for each, a space before it."""

from __future__ import annotations

import random
import secrets
from collections.abc import Iterator


def _words_of(text: str) -> list[str]:
    return text.split()


#: First words of prompts that are measured.
MEASURED_FIRST_WORDS = _words_of("""
able across action active actual address after again against agent agree air album alone along
already also always among amount animal another answer any appear apply area army around art
article ask attack author away baby back ball bank base beach beautiful because become bed before
begin behind believe below best better between beyond big bill bird black block blood blue board
boat body book border born both bottom box boy branch bread break bridge bright bring broad
brother brown budget build burn business busy button buy cabin call camera camp capital captain
car card care carry case castle cat catch cause cell center central century certain chain chair
chance change chapter charge cheap check child choice church circle city claim class clean clear
client climb clock close cloth cloud coach coast code coffee cold collect college color column
come common company compare complete computer concern condition contain content control cook
""")

#: First words of prompts that are thrown away; none of those above.
THROWAWAY_FIRST_WORDS = _words_of("""
yard year yellow yes yesterday yet young yourself youth zero zone wagon wait walk wall want war
warm wash watch water wave way weak wear weather web wedding week weight welcome west wet wheel
when where while white whole wide wife wild will wind window wine wing winter wire wise wish with
within without woman wonder wood word work world worry worth write wrong
""")

#: Words of which texts of a wanted length are made.
BODY_WORDS = _words_of("""
the of and to in that it was for on are with as his they at be this from have or by one had not
but what all were when we there can an your which their said if do will each about how up out
them then she many some so these would other into has more her two like him see time could no
make than first been its who now people my made over did down only way find use may water long
little very after words called just where most know get through back much before go good new
write our used me man too any day same right look think also around another came come work three
word must because does part even place well such here take why things help put years different
away again off went old number great tell men say small every found still between name should
home big give air line set own under read last never us left end along while might next sound
below saw something thought both few those always looked show large often together asked house
world going want school important until form food keep children feet land side without boy once
animals life enough took sometimes four head above kind began almost live page got earth need far
hand high year mother light parts country father let night following picture being study second
""")

#: Words after the first that make a beginning unique, together with it.
NUM_MARK_WORDS = 5


def beginnings(words: list[str], rng: random.Random) -> Iterator[str]:
    """Yield texts of `NUM_MARK_WORDS` words without end, none like another.

    As long as `words` lasts no two share even their first word; all have the same number of
    words, hence nearly always the same number of tokens.
    """
    seen: set[str] = set()
    while True:
        first_words = list(words)
        rng.shuffle(first_words)
        for first in first_words:
            rest = rng.choices(BODY_WORDS, k=NUM_MARK_WORDS - 1)
            text = " ".join([first, *rest])
            if text not in seen:
                seen.add(text)
                yield text


def unseen_rng() -> random.Random:
    """Return a generator that no run has used: what it makes is in no server's cache."""
    return random.Random(secrets.randbits(64))


def body_words(rng: random.Random) -> Iterator[str]:
    """Yield random words without end."""
    while True:
        yield rng.choice(BODY_WORDS)
