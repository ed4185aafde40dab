"""The embedded model's language: its words, its templates, and seeded dialogues.

The model in `MODEL_PATH` remembers facts ("The code of the amber falcon is 4821.") and
answers questions about them. A dialogue of any length, with the questions and the right
answers, comes from `dialogue`; the same seed gives the same dialogue on every machine.
Trainer, tests and benches all draw from here, so a cache fault shows up as a wrong answer.

>>> told = dialogue(7, tokens=300, facts=3)
>>> len(told.questions), told.tokens <= 300
(3, True)
>>> told == dialogue(7, tokens=300, facts=3)
True
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import TypeAlias

__all__ = [
    "ADJECTIVES",
    "ATTRIBUTES",
    "END",
    "MODEL_PATH",
    "NOTED",
    "NOUNS",
    "PIECE",
    "ROLES",
    "START",
    "UNKNOWN",
    "VALUES",
    "Dialogue",
    "Fact",
    "Message",
    "Question",
    "count_tokens",
    "dialogue",
    "vocabulary",
    "without",
]

MODEL_PATH = Path(__file__).parent / "models" / "recall"
"""The Hugging Face folder of the embedded model."""

START = "<|start|>"
END = "<|end|>"
ROLES = {"system": "<|system|>", "user": "<|user|>", "assistant": "<|assistant|>"}
PIECE = r" ?[^\W\d_]+| ?\d{1,2}|[^\w\s]|_|\s"
"""Pattern of a piece of text: a word or two digits with the space before, or a sign."""

NOTED = "Noted."
"""The reply to a fact."""
UNKNOWN = "I do not know."
"""The reply to a question about something never told."""

Message: TypeAlias = dict[str, str]


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


# ---------------------------------------------------------------- words that name and fill facts

ADJECTIVES = _words(
    """amber ancient arctic bashful bitter blazing bold brave brisk broken burning calm
    careful clever cloudy coastal cosmic crooked crystal curious dancing daring dusty eager
    electric elegant endless faithful fancy fearless fierce floating flying foggy fragile
    frozen gentle giant gleaming glorious golden graceful grumpy hidden hollow humble hungry
    icy invisible jolly lively lonely loyal lucky lunar magic mighty misty modest mystic nimble
    noble northern polished proud quiet radiant rapid restless royal rusty sacred secret shiny
    silent silver sleepy smooth solar southern stormy sturdy swift tidy tiny velvet vivid
    wandering western wicked wild wise wooden"""
)
NOUNS = _words(
    """anchor arrow badger banner barrel beacon beaver bell bison bridge buffalo camel candle
    castle cheetah comet compass coyote crane crow crown dolphin donkey dragon drum eagle
    engine falcon feather ferret fox gazelle giraffe glacier goblin goose hammer harbor hawk
    hedgehog helmet heron hornet hyena jackal jaguar kettle kite koala ladder lantern lemur
    leopard lion lizard lobster magnet mammoth meteor mirror moose needle octopus orchid otter
    owl panda panther parrot pelican penguin phoenix pigeon pirate puffin python rabbit raven
    rocket salmon shark spider squirrel statue sparrow tiger tortoise tower turtle viper walrus
    weasel whale wizard wolf zebra"""
)
VALUES: dict[str, tuple[str, ...]] = {
    "colour": _words(
        """beige black blue brown crimson cyan green grey indigo ivory lavender lime magenta
        maroon olive orange pink purple red scarlet teal turquoise violet white yellow"""
    ),
    "city": _words(
        """Amsterdam Athens Baghdad Bangkok Barcelona Beijing Berlin Bogota Boston Brussels
        Budapest Cairo Chicago Dakar Dallas Delhi Denver Dublin Florence Geneva Hamburg Hanoi
        Havana Helsinki Istanbul Jakarta Kyoto Lagos Lima Lisbon London Madrid Manila Melbourne
        Miami Milan Montreal Moscow Mumbai Munich Nairobi Naples Osaka Oslo Paris Prague Quito
        Riga Rome Santiago Seattle Seoul Shanghai Sofia Stockholm Sydney Tallinn Tehran Tokyo
        Toronto Tunis Venice Vienna Warsaw Zurich"""
    ),
    "country": _words(
        """Algeria Argentina Australia Austria Belgium Bolivia Brazil Bulgaria Canada Chile
        China Colombia Croatia Cuba Cyprus Denmark Ecuador Egypt Estonia Ethiopia Finland
        France Germany Ghana Greece Hungary Iceland India Indonesia Ireland Italy Japan Kenya
        Latvia Lithuania Malta Mexico Morocco Nepal Nigeria Norway Pakistan Peru Poland
        Portugal Romania Serbia Slovakia Slovenia Spain Sweden Switzerland Thailand Tunisia
        Turkey Uganda Ukraine Uruguay Vietnam Zambia"""
    ),
    "owner": _words(
        """Abigail Adrian Agnes Albert Alice Amelia Andrea Anton Arthur Astrid Beatrice
        Benjamin Bruno Camille Carla Caspar Cecilia Clara Cyril Dagmar Daniel Diana Dominic
        Edith Edmund Elena Elias Emil Esther Eva Felix Fiona Florian Frida Gabriel Gloria
        Gustav Hannah Harold Hazel Hector Helga Henry Hugo Ingrid Irene Isaac Ivan Jasper
        Joanna Julian Karin Konrad Laura Leon Lydia Magnus Martha Matilda Nadia Nora Oscar
        Ottilie Rosa Samuel Simon Stella Theodore Ursula Victor Walter Yvonne"""
    ),
    "food": _words(
        """almonds apples apricots bananas beans biscuits bread broccoli burgers butter cabbage
        cake carrots cheese cherries chicken chocolate coconuts cookies corn crackers cucumbers
        dates dumplings eggs figs garlic grapes ham honey jam lamb lemons lentils mangoes melons
        muffins mushrooms noodles nuts oats onions pancakes pasta peaches peanuts pears peas
        pickles pizza plums potatoes pumpkins radishes raisins rice sausages spinach steak
        strawberries toast tomatoes waffles walnuts yogurt"""
    ),
    "instrument": _words(
        """accordion banjo bassoon cello clarinet flute guitar harmonica harp lute mandolin
        oboe organ piano saxophone sitar tambourine triangle trombone trumpet tuba ukulele
        viola violin xylophone"""
    ),
}
"""The words a fact's value is drawn from, by attribute."""

NUMBERS = ("code", "number")
"""Attributes whose value is a number of four digits."""

ATTRIBUTES = (*NUMBERS, *VALUES)

_FACTS = (
    "The {attribute} of the {key} is {value}.",
    "The {attribute} of the {key} is {value}.",
    "Remember that the {attribute} of the {key} is {value}.",
    "Please note: the {attribute} of the {key} is {value}.",
    "For the {key}, the {attribute} is {value}.",
)
_QUESTIONS = (
    "What is the {attribute} of the {key}?",
    "What is the {attribute} of the {key}?",
    "Tell me the {attribute} of the {key}.",
    "Do you remember the {attribute} of the {key}?",
    "For the {key}, what is the {attribute}?",
    "what is the {attribute} of the {key}",
)

# ------------------------------------------------------------------------------- small talk

_SLOTS: dict[str, tuple[str, ...]] = {
    "friend": _words(
        """Aaron Anna Barbara Bella Carl Chloe Craig David Doris Dylan Ellen Emma Eric Ethan
        Fred Gemma George Grace Greg Helen Ian Jack James Jane Janet Jason Jenny Jim John
        Josh Julia Kate Kevin Kim Larry Linda Lisa Lucy Luke Mark Mary Max Megan Mike Molly
        Nancy Neil Nick Olivia Patrick Paul Peter Philip Rachel Ralph Robert Roger Ruth Sally
        Sam Sarah Scott Sean Sophie Steve Susan Thomas Tim Tom Tony Vera Wendy William Zoe"""
    ),
    "person": _words(
        """aunt boss brother colleague cousin dad daughter dentist doctor father friend
        grandfather grandmother husband landlord mother mum neighbour nephew niece partner
        sister son teacher uncle wife"""
    ),
    "place": _words(
        """airport bakery bank beach bookshop cafe campsite cathedral church cinema circus
        clinic college concert court dentist embassy factory fair farm festival forest gallery
        garage garden gym hospital hostel hotel island kitchen laboratory lake library market
        meadow monastery mosque museum office opera orchard palace park pharmacy playground
        pool port pub quarry restaurant river salon school seaside shop square stadium station
        studio supermarket temple theatre valley village vineyard warehouse woods workshop
        zoo"""
    ),
    "day": _words(
        """Monday Tuesday Wednesday Thursday Friday Saturday Sunday January February March
        April May June July August September October November December"""
    ),
    "thing": _words(
        """backpack bag basket belt bench bicycle blanket blouse book boots bottle bowl box
        bracelet brush bucket calendar camera card carpet chair clock coat computer couch cup
        curtain cushion desk dictionary dish door drawer dress earring envelope fan fork fridge
        frame glass glove glue handbag hat heater iron jacket jar jeans jumper key
        keyboard knife lamp laptop letter magazine map mattress microphone microwave mug
        necklace newspaper notebook oven painting pan paper pen pencil phone photo pillow plate
        pot printer purse puzzle radio rake ring rope rug ruler sandal saucer saw scarf
        scissors screen screwdriver shelf shirt shoe shovel skirt soap sock sofa spoon stamp
        stool stove suitcase sweater table teapot telephone tent ticket tie toaster
        toothbrush torch towel toy tray trousers umbrella vase wallet wardrobe watch
        window"""
    ),
    "dish": _words(
        """bacon beer cereal chips chutney cider cocoa coffee cream cupcakes curry dessert
        fish fries gravy jelly juice ketchup lasagne lemonade marmalade milk mustard omelette
        pepper pie popcorn porridge pudding ravioli risotto salad sandwiches sauce soup stew
        sugar sushi syrup tacos tea toffee tofu vinegar water wine"""
    ),
    "hobby": _words(
        """acting archery baking biking bowling boxing camping carving chess climbing cooking
        cricket cycling darts diving drawing fencing fishing football gardening golf
        gymnastics hiking hockey hunting jogging juggling karate knitting painting photography
        pottery reading rowing rugby running sailing sewing singing skating skiing sledding
        surfing swimming tennis volleyball walking weaving wrestling writing yoga"""
    ),
    "pet": _words(
        """budgie canary cat chick cow dog duck frog gecko goat goldfish hamster hen horse
        kitten mouse mule newt pig pony puppy rat rooster sheep snail snake toad"""
    ),
    "weather": _words(
        """awful bright breezy chilly clear cold cool damp dark dreadful dry dull fine
        freezing gloomy hot humid lovely mild muggy pleasant rainy snowy sunny warm wet
        windy"""
    ),
    "mood": _words(
        """angry annoyed anxious ashamed bored busy cheerful confused content delighted
        depressed disappointed embarrassed excited exhausted frustrated furious glad grateful
        great happy hopeful ill impatient jealous joyful lazy mad miserable nervous optimistic
        overwhelmed pleased relaxed sad scared shocked sick sorry stressed surprised terrible
        thankful tired upset weak weary worried"""
    ),
    "job": _words(
        """accountant actor architect artist author baker barber butcher carpenter cashier
        chef chemist clerk coach cook dancer designer detective driver editor electrician
        engineer farmer fisherman gardener guard guide hairdresser historian janitor
        journalist judge lawyer lecturer lifeguard manager mechanic miner model musician nurse
        painter pharmacist photographer pilot plumber poet porter postman priest professor
        programmer researcher sailor salesman scientist secretary singer soldier surgeon
        tailor translator trainer vet waiter waitress writer"""
    ),
    "subject": _words(
        """algebra anatomy art astronomy ballet biology botany business chemistry culture
        drama economics education English fashion film finance French geography geology
        geometry German grammar history Italian Japanese Latin law literature logic
        mathematics medicine music nature philosophy physics poetry politics psychology
        religion science society Spanish sport statistics technology theology travel
        weather zoology"""
    ),
    "verb": _words(
        """borrowed bought broke brought burned carried changed checked chose cleaned
        collected covered cut delivered described designed destroyed discovered donated
        dropped emptied examined filled finished fixed found gave hid hired ignored inspected
        kept kicked lent lifted lost made measured mended moved needed noticed opened ordered
        packed painted placed pulled pushed put received recognised recommended removed
        rented repaired replaced returned saved selected sent shared showed sold started
        stole studied tested threw tied took touched tried turned used wanted washed watched
        wiped won wrapped"""
    ),
    "kind": _words(
        """beautiful big boring cheap clean comfortable common cute dirty dreadful easy
        empty enormous excellent expensive famous fantastic favourite flat fresh funny good
        handmade heavy horrible huge important incredible interesting large light little long
        lost messy modern narrow neat new nice odd old ordinary perfect plain plastic
        popular pretty rare round second sharp short simple small soft special spare square
        strange strong stupid thick thin typical ugly unusual useful useless valuable
        wonderful wrong young"""
    ),
    "when": _words(
        """yesterday today tomorrow tonight recently again once twice often sometimes early
        late later soon finally suddenly usually together alone outside inside upstairs
        downstairs nearby abroad"""
    ),
}

_TALK: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Hello! How can I help you?",
        ("Hello!", "Hi!", "Hello.", "Hello", "hello", "Hi", "hi", "Hey!"),
    ),
    ("Good morning!", ("Good morning!", "Good morning.", "good morning")),
    ("Good evening!", ("Good evening!", "Good evening.", "good evening")),
    (
        "I am fine, thank you. And you?",
        ("How are you?", "How are you today?", "How do you do?", "how are you", "Are you well?"),
    ),
    (
        "My name is Recall. I remember what you tell me.",
        ("Who are you?", "What is your name?", "What are you?", "what is your name"),
    ),
    (
        "Tell me facts, and ask me about them later.",
        ("What can you do?", "Can you help me?", "Help!", "help", "How does this work?"),
    ),
    (
        "You are welcome.",
        ("Thank you.", "Thanks!", "Thank you very much!", "thanks", "Thanks a lot, {friend}."),
    ),
    ("Goodbye! See you soon.", ("Goodbye!", "Bye!", "See you {when}!", "bye", "Good night!")),
    ("Nice to meet you.", ("My name is {friend}.", "I am {friend}.", "Call me {friend}.")),
    (
        "I am glad to hear that.",
        ("I am fine.", "I am well, thank you.", "That is good.", "Everything is fine."),
    ),
    (
        "I understand how you feel.",
        (
            "I am so {mood} {when}.",
            "I feel {mood} because of my {person}.",
            "My {person} is very {mood}.",
            "{friend} was {mood} on {day}.",
        ),
    ),
    (
        "I like that kind of weather.",
        (
            "The weather is {weather} today.",
            "It was {weather} and {weather} on {day}.",
            "It will be {weather} at the {place}.",
        ),
    ),
    (
        "That sounds tasty.",
        (
            "I like {dish} with {dish}.",
            "We had {dish} and {dish} at the {place}.",
            "My {person} makes {kind} {dish}.",
            "{friend} cooked {dish} for us {when}.",
        ),
    ),
    (
        "That sounds like fun.",
        (
            "My hobby is {hobby}.",
            "I enjoy {hobby} with my {person} on {day}.",
            "{friend} and I go {hobby} near the {place}.",
            "We tried {hobby} {when}.",
        ),
    ),
    (
        "Animals are good company.",
        (
            "My {person} has a {kind} {pet}.",
            "Our {pet} likes {dish}.",
            "I saw a {pet} and a {pet} near the {place}.",
            "The {pet} of {friend} is very {kind}.",
        ),
    ),
    (
        "That is an honest job.",
        (
            "I work as a {job} at the {place}.",
            "My {person} is a {kind} {job}.",
            "{friend} wants to be a {job}.",
        ),
    ),
    (
        "There is always more to learn.",
        (
            "I am learning {subject} and {subject}.",
            "{friend} is a student of {subject}.",
            "My {person} knows a lot about {subject}.",
            "We had a lesson in {subject} on {day}.",
        ),
    ),
    (
        UNKNOWN,
        (
            "What is my {thing}?",
            "Where is the {kind} {thing}?",
            "Who {verb} the {thing} of {friend}?",
            "Why is my {person} so {mood}?",
            "When does the {place} open?",
            "Tell me about {subject}.",
            "Do you like {dish} or {hobby}?",
            "What is {unheard}?",
            "Is {friend} a {job}?",
        ),
    ),
    (
        "I see.",
        (
            "I {verb} a {kind} {thing} at the {place}.",
            "My {person} {verb} the {thing} {when}.",
            "On {day} I went to the {place} with {friend}.",
            "{friend} {verb} my {thing} and a {kind} {thing}.",
            "There is a {kind} {thing} in the {place}.",
            "We walked from the {place} to the {place}.",
            "The {thing} was more {kind} than the {thing}.",
            "I met a {kind} {job} called {unheard}.",
            "They {verb} {few} {kind} things.",
            "Someone {verb} the {unheard} {when}.",
            "I like {dish} and my {pet}.",
            "{any} {any} {any}",
            "The {any} {unheard} {any} of {any}.",
            "Okay.",
            "Yes.",
            "No.",
        ),
    ),
)

_TALK_FORMS = tuple(
    (text, reply) for reply, texts in _TALK for text in texts for _ in range(1 + text.count("{"))
)
_LETTERS = "abcdefghijklmnoprstuvwxyz"


@dataclass(frozen=True, slots=True)
class Fact:
    """Something told once: the `attribute` of the `adjective` `noun` is `value`."""

    attribute: str
    adjective: str
    noun: str
    value: str

    @property
    def key(self) -> tuple[str, str, str]:
        """What a question names; no two facts of a dialogue share all three."""
        return (self.attribute, self.adjective, self.noun)


@dataclass(frozen=True, slots=True)
class Question:
    """A question about a fact, and where in the dialogue that fact was told."""

    text: str
    answer: str
    fact: Fact
    message: int
    """Index of the telling message in `Dialogue.messages`."""
    token: int
    """Tokens of the rendered dialogue before that message."""


@dataclass(frozen=True, slots=True)
class Dialogue:
    """A finished conversation, and the questions that may be asked next."""

    messages: tuple[Message, ...]
    questions: tuple[Question, ...]
    facts: tuple[Fact, ...]
    """Every fact told, distractors (facts without a question) included, in order."""
    tokens: int
    """Length of `messages` under the model's chat template, without a generation prompt."""

    def ask(self, question: Question) -> list[Message]:
        """Return the conversation with `question` as its last, unanswered message."""
        return [*self.messages, {"role": "user", "content": question.text}]


def vocabulary() -> tuple[str, ...]:
    """List every token that is a word, a number or a sign, in the order of their ids.

    The 256 single bytes and the special tokens, which the tokenizer adds, are not here.
    """
    texts = [*_FACTS, *_QUESTIONS, NOTED, UNKNOWN, _SYSTEM, *ATTRIBUTES]
    texts += [text for reply, forms in _TALK for text in (reply, *forms)]
    plain = " ".join(re.sub(r"\{\w+\}", " ", text) for text in texts)
    words = re.findall(r"[^\W\d_]+", plain)
    for group in (ADJECTIVES, NOUNS, *VALUES.values(), *_SLOTS.values()):
        words += group
    both_cases = [form for word in words for form in (word, word.capitalize())]
    numbers = [f"{n:02}" for n in range(100)]
    spaced = [f" {word}" for word in (*both_cases, *numbers, *"0123456789")]
    return tuple(dict.fromkeys([*spaced, *numbers]))


def count_tokens(messages: Sequence[Message]) -> int:
    """Count the tokens of `messages` under the model's chat template, without the tokenizer."""
    return 1 + sum(_message_tokens(message["content"]) for message in messages)


def dialogue(
    seed: int,
    *,
    tokens: int = 1000,
    facts: int = 8,
    place: tuple[float, float] = (0.0, 1.0),
    distractors: float = 0.4,
    quiz: float = 0.0,
    strangers: float = 0.0,
) -> Dialogue:
    """Make the dialogue of this seed: `facts` facts to ask about, among other talk.

    Args:
        seed: The same seed and arguments give the same dialogue.
        tokens: Upper bound of its length; it ends less than 48 tokens below.
        facts: How many facts are told that `questions` ask about, one question each.
        place: The part of the dialogue, as two fractions of `tokens`, in which they are told:
            (0, 0.1) for the start (inside `keep`), (0.9, 1) for the end (inside the window).
        distractors: Share of the other turns that tell facts without a question. Half of them
            differ in one word from a fact already told.
        quiz: Share of the other turns that ask about a fact told before, and are answered.
        strangers: Share of quiz questions about something never told, answered `UNKNOWN`.

    Raises:
        ValueError: If `place` is not an interval within 0 and 1, or `tokens` cannot hold the
            facts.
    """
    first, last = place
    if not 0.0 <= first <= last <= 1.0:
        raise ValueError(f"place must be two fractions 0 <= first <= last <= 1, not {place}")
    if facts < 0:
        raise ValueError(f"facts must not be negative, not {facts}")
    if tokens < (needed := 1 + facts * _FACT_TOKENS):
        raise ValueError(f"{facts} facts need {needed} tokens or more, not {tokens}")

    writer = _Writer(Random(f"recall {seed}"))
    if writer.rng.random() < 0.25 and tokens - needed > 32:
        writer.add("system", _SYSTEM)
    span = tokens - facts * _FACT_TOKENS
    due = sorted(writer.rng.uniform(first, last) * span for _ in range(facts))
    asked: list[tuple[Fact, int, int]] = []
    while True:
        filler = writer.filler(distractors, quiz, strangers)
        room = writer.tokens + filler.tokens <= tokens - _FACT_TOKENS * len(due)
        if due and (not room or writer.tokens - _FACT_TOKENS * len(asked) >= due[0]):
            due.pop(0)
            fact = writer.new_fact()
            asked.append((fact, len(writer.messages), writer.tokens))
            writer.say(writer.telling(fact))
        elif room:
            writer.say(filler)
        else:
            break
    questions = tuple(
        Question(writer.question(fact.key), f"{fact.value}.", fact, message, token)
        for fact, message, token in asked
    )
    return Dialogue(tuple(writer.messages), questions, tuple(writer.facts), writer.tokens)


def without(dialogue: Dialogue, question: Question) -> Dialogue:
    """Return `dialogue` with the fact of `question` taken out: the negative control."""
    gone = (question.message, question.message + 1)
    kept = tuple(m for i, m in enumerate(dialogue.messages) if i not in gone)
    facts = tuple(fact for fact in dialogue.facts if fact != question.fact)
    return Dialogue(kept, (question,), facts, count_tokens(kept))


_SYSTEM = "You are a helpful assistant. Remember what the user tells you."
_FACT_TOKENS = 20
"""Room for one fact and its acknowledgement: the tokens of the longest form."""
_PIECE = re.compile(PIECE)
_Key: TypeAlias = tuple[str, str, str]


@dataclass(frozen=True, slots=True)
class _Turn:
    """What the user says, the reply, and the fact told by it, if any."""

    text: str
    reply: str
    fact: Fact | None = None

    @property
    def tokens(self) -> int:
        return _message_tokens(self.text) + _message_tokens(self.reply)


class _Writer:
    """A dialogue while it is written: its messages, facts and length so far."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.messages: list[Message] = []
        self.facts: list[Fact] = []
        self.keys: set[_Key] = set()
        self.tokens = 1

    def add(self, role: str, text: str) -> None:
        """Append one message."""
        self.messages.append({"role": role, "content": text})
        self.tokens += _message_tokens(text)

    def say(self, turn: _Turn) -> None:
        """Append a turn and take note of its fact."""
        self.add("user", turn.text)
        self.add("assistant", turn.reply)
        if turn.fact is not None:
            self.facts.append(turn.fact)
            self.keys.add(turn.fact.key)

    def new_key(self) -> _Key:
        """Draw an unused key; every second one differs from a used one in a single word."""
        choose = self.rng.choice
        while True:
            attribute, adjective, noun = choose(ATTRIBUTES), choose(ADJECTIVES), choose(NOUNS)
            if self.facts and self.rng.random() < 0.5:
                twin = choose(self.facts)
                attribute, adjective, noun = choose(
                    (
                        (attribute, twin.adjective, twin.noun),
                        (twin.attribute, adjective, twin.noun),
                        (twin.attribute, twin.adjective, noun),
                    )
                )
            if (attribute, adjective, noun) not in self.keys:
                return attribute, adjective, noun

    def new_fact(self) -> Fact:
        """Draw a fact with an unused key."""
        key = self.new_key()
        if key[0] in NUMBERS:
            return Fact(*key, str(self.rng.randrange(1000, 10000)))
        return Fact(*key, self.rng.choice(VALUES[key[0]]))

    def telling(self, fact: Fact) -> _Turn:
        """Draw the turn that tells `fact`."""
        form = self.rng.choice(_FACTS)
        return _Turn(_filled(form, fact.key).replace("{value}", fact.value), NOTED, fact)

    def question(self, key: _Key) -> str:
        """Draw a question about `key`."""
        return _filled(self.rng.choice(_QUESTIONS), key)

    def filler(self, distractors: float, quiz: float, strangers: float) -> _Turn:
        """Draw a turn that tells a distractor, asks about an earlier fact, or just chats."""
        kind = self.rng.random()
        if kind < distractors:
            return self.telling(self.new_fact())
        if kind < distractors + quiz and self.facts:
            if self.rng.random() < strangers:
                return _Turn(self.question(self.new_key()), UNKNOWN)
            fact = self.rng.choice(self.facts)
            return _Turn(self.question(fact.key), f"{fact.value}.")
        text, reply = self.rng.choice(_TALK_FORMS)
        return _Turn(re.sub(r"\{(\w+)\}", lambda slot: self._word(slot[1]), text), reply)

    def _word(self, slot: str) -> str:
        if slot == "unheard":
            return "".join(self.rng.choices(_LETTERS, k=self.rng.randrange(3, 9)))
        if slot == "few":
            return str(self.rng.randrange(2, 100))
        if slot == "any":
            return self.rng.choice(_SLOTS[self.rng.choice(list(_SLOTS))])
        return self.rng.choice(_SLOTS[slot])


def _filled(form: str, key: _Key) -> str:
    attribute, adjective, noun = key
    return form.replace("{attribute}", attribute).replace("{key}", f"{adjective} {noun}")


def _message_tokens(content: str) -> int:
    """Count a message's role, the space after it, its pieces and its end."""
    pieces = _PIECE.findall(f" {content}")
    return 2 + sum(1 if piece in _WORDS else len(piece.encode()) for piece in pieces)


_WORDS = frozenset(vocabulary())
