"""Request and response formats of OpenAI's `/v1/decisions`, and of `/v1/systemone`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field, StrictBool, StrictStr

from penstock.server.decisions.deciding import Decided, DecisionInput, Messages
from penstock.server.decisions.decision_questions import (
    FixedQuestion,
    OptionReading,
    choice,
    plain,
    predicate,
    score,
)
from penstock.server.forms import Each, Name, RequestForm
from penstock.server.openai.response_items import Conversation, items_of
from penstock.server.problems import BadRequest
from penstock.server.prompts import flatten

MOST_QUESTIONS = 4_096
MOST_OPTIONS = 255

Content: TypeAlias = str | dict[str, Any] | list[Any]
"""Text, or JSON that is given to the model as text."""
Salt: TypeAlias = Annotated[str, Field(max_length=1_024)] | None


# ---- OpenAI's


class PredicateQuestion(RequestForm):
    """Question for the probability that a statement is true."""

    type: Literal["predicate"]
    name: Name | None = None
    instructions: str | Each[dict[str, Any]]

    def question(self, place: str) -> FixedQuestion:
        return predicate(_text(self.instructions, place))


class ChoiceOption(RequestForm):
    """An option; the text "true" and the boolean `true` are different options."""

    value: StrictStr | StrictBool
    description: str | None = None


class ChoiceQuestion(RequestForm):
    """Question for the right one of several options."""

    type: Literal["choice"]
    name: Name | None = None
    instructions: str | Each[dict[str, Any]]
    choices: Each[ChoiceOption] = Field(min_length=2, max_length=MOST_OPTIONS)

    def question(self, place: str) -> FixedQuestion:
        options = [(option.value, option.description or "") for option in self.choices]
        return choice(_text(self.instructions, place), options)


class ScoreLevel(RequestForm):
    """A level of a scale."""

    label: str
    description: str | None = None


class ScoreQuestion(RequestForm):
    """Question for the position of the input on a scale of ordered levels."""

    type: Literal["score"]
    name: Name | None = None
    instructions: str | Each[dict[str, Any]]
    levels: Each[ScoreLevel] = Field(min_length=2, max_length=MOST_OPTIONS)

    def question(self, place: str) -> FixedQuestion:
        levels = [
            f"{level.label} ({level.description})" if level.description else level.label
            for level in self.levels
        ]
        return score(_text(self.instructions, place), levels)


OpenAIQuestion: TypeAlias = Annotated[
    PredicateQuestion | ChoiceQuestion | ScoreQuestion, Field(discriminator="type")
]


class DecisionsRequest(RequestForm):
    """The body of `POST /v1/decisions`."""

    model: Name | None = None
    input: str | Each[dict[str, Any]]
    questions: Each[OpenAIQuestion] = Field(min_length=1, max_length=MOST_QUESTIONS)
    cache_salt: Salt = None

    def asked(self) -> DecisionInput:
        questions = {
            place: question.question(place)
            for place, question in (
                (f"questions.{index}", question) for index, question in enumerate(self.questions)
            )
        }
        return DecisionInput(_messages(self.input), questions, self.cache_salt)

    def answer(self, model: str, decided: Decided) -> dict[str, Any]:
        pairs = zip(self.questions, decided.readings, strict=True)
        return {
            "object": "decision",
            "model": model,
            "answers": [_openai_answer(question, reading) for question, reading in pairs],
            "usage": {
                "input_tokens": decided.input_tokens,
                "input_tokens_details": {
                    "cached_tokens": decided.cached_tokens,
                    "cache_write_tokens": decided.input_tokens - decided.cached_tokens,
                },
                "output_tokens": 0,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": decided.input_tokens,
            },
        }


def _openai_answer(
    question: PredicateQuestion | ChoiceQuestion | ScoreQuestion, reading: OptionReading
) -> dict[str, Any]:
    answer: dict[str, Any] = {"type": question.type, "name": question.name}
    values = reading.probabilities
    if isinstance(question, PredicateQuestion):
        answer["probability"] = values[0]
    elif isinstance(question, ChoiceQuestion):
        names = [option.value for option in question.choices]
        answer["choice"] = names[reading.best]
        answer["confidence"] = reading.confidence
        answer["probabilities"] = [
            {"value": name, "probability": value} for name, value in zip(names, values, strict=True)
        ]
    else:
        answer["score"] = reading.expected
        answer["confidence"] = reading.confidence
        answer["probabilities"] = [
            {"label": level.label, "value": number, "probability": value}
            for number, (level, value) in enumerate(zip(question.levels, values, strict=True))
        ]
    return {**answer, "option_mass": reading.mass}


def _messages(content: str | list[dict[str, Any]]) -> Messages:
    messages = Conversation([_shown(item) for item in items_of(content)]).messages
    if not messages:
        raise BadRequest("input is empty", param="input")
    if messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": ""}]
    last = messages[-1]
    return [*messages[:-1], {**last, "content": flatten(last["content"], "input")}]


def _shown(item: dict[str, Any]) -> dict[str, Any]:
    """Replace the JSON parts of an item with text parts."""
    content = item.get("content")
    if not isinstance(content, list):
        return item
    return {**item, "content": [_shown_part(part) for part in content]}


def _shown_part(part: Any) -> Any:
    if isinstance(part, Mapping) and part.get("type") == "input_json":
        return {"type": "input_text", "text": plain(part.get("data"))}
    return part


def _text(instructions: str | list[dict[str, Any]], place: str) -> str:
    if isinstance(instructions, str):
        return flatten(instructions, place)
    parts = [_shown_part(part) for part in instructions]
    return "\n".join(flatten([part], f"{place}.instructions") for part in parts)


# ---- System One's


class NoulCriteria(RequestForm):
    """Descriptions of the answers yes and no."""

    true: Content | None = None
    false: Content | None = None


class NoulForm(RequestForm):
    """A yes-or-no question."""

    type: Literal["noul"]
    instructions: Content = ""
    criteria: NoulCriteria = NoulCriteria()

    def question(self) -> FixedQuestion:
        true, false = self.criteria.true, self.criteria.false
        return predicate(plain(self.instructions), plain(true or ""), plain(false or ""))

    def answer(self, reading: OptionReading) -> dict[str, Any]:
        return {"type": "noul", "noul": reading.probabilities[0]}


class ChoiceForm(RequestForm):
    """A choice among named options."""

    type: Literal["choice"]
    instructions: Content = ""
    criteria: dict[str, Content | None] = Field(min_length=1, max_length=MOST_OPTIONS)

    def question(self) -> FixedQuestion:
        options = [(name, plain(text or "")) for name, text in self.criteria.items()]
        return choice(plain(self.instructions), options)

    def answer(self, reading: OptionReading) -> dict[str, Any]:
        names = list(self.criteria)
        return {
            "type": "choice",
            "choice": names[reading.best],
            "confidence": reading.confidence,
            "probabilities": dict(zip(names, reading.probabilities, strict=True)),
        }


class ScoreForm(RequestForm):
    """A level of an ordered scale."""

    type: Literal["score"]
    instructions: Content = ""
    criteria: Each[Content] = Field(min_length=1, max_length=MOST_OPTIONS)

    def question(self) -> FixedQuestion:
        return score(plain(self.instructions), [plain(level) for level in self.criteria])

    def answer(self, reading: OptionReading) -> dict[str, Any]:
        return {
            "type": "score",
            "score": reading.expected,
            "confidence": reading.confidence,
            "legend": {str(number): level for number, level in enumerate(self.criteria)},
            "probabilities": {
                str(number): value for number, value in enumerate(reading.probabilities)
            },
        }


NamedQuestion: TypeAlias = Annotated[NoulForm | ChoiceForm | ScoreForm, Field(discriminator="type")]


class SystemOneRequest(RequestForm):
    """The body of `POST /v1/systemone`."""

    model: Name | None = None
    state: Content
    questions: dict[Name, NamedQuestion] = Field(min_length=1, max_length=MOST_QUESTIONS)
    cache_salt: Salt = None

    def asked(self) -> DecisionInput:
        questions = {
            f"questions.{name}": question.question() for name, question in self.questions.items()
        }
        return DecisionInput(
            [{"role": "user", "content": plain(self.state)}], questions, self.cache_salt
        )

    def answer(self, model: str, decided: Decided) -> dict[str, Any]:
        pairs = zip(self.questions.items(), decided.readings, strict=True)
        return {
            "model": model,
            "answers": {
                name: {**question.answer(reading), "option_mass": reading.mass}
                for (name, question), reading in pairs
            },
            "usage": {"input_tokens": decided.input_tokens, "output_tokens": 0},
        }
