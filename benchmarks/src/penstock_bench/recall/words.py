"""Words and phrases of the embedded model's language; no figure of them may change."""

from __future__ import annotations

NOTED = "Noted."
"""Reply to a fact."""
UNKNOWN = "I do not know."
"""Reply to a question about an unknown fact."""
SYSTEM = "You are a helpful assistant. Remember what the user tells you."


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
"""Possible values of a fact, by attribute."""

NUMBERS = ("code", "number")
"""Attributes with a value of four digits."""

ATTRIBUTES = (*NUMBERS, *VALUES)

FACT_FORMS = (
    "The {attribute} of the {key} is {value}.",
    "The {attribute} of the {key} is {value}.",
    "Remember that the {attribute} of the {key} is {value}.",
    "Please note: the {attribute} of the {key} is {value}.",
    "For the {key}, the {attribute} is {value}.",
)
QUESTION_FORMS = (
    "What is the {attribute} of the {key}?",
    "What is the {attribute} of the {key}?",
    "Tell me the {attribute} of the {key}.",
    "Do you remember the {attribute} of the {key}?",
    "For the {key}, what is the {attribute}?",
    "what is the {attribute} of the {key}",
)

# ------------------------------------------------------------------------------- small talk

SLOTS: dict[str, tuple[str, ...]] = {
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

TALK: tuple[tuple[str, tuple[str, ...]], ...] = (
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
