"""Several conversations at once on one engine: their text, answers and costs.

system prompt   facts of a seeded dialogue, the same for all: read once, held once
agent 1         tells a fact of its own, asks for a shared one, asks for its own; again
agent 2         tells another one, ...                          all of them at the same time
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, field
from itertools import takewhile
from random import Random

import mlx.core as mx

from penstock import config, memory
from penstock.cli.engines import make_engine
from penstock.engine.request import Request
from penstock.engine.stats import Stats
from penstock.models.mlx_lm import Loaded, render
from penstock_bench.recall import Message, Question, dialogue

ROUNDS = 2
"""Rounds of an agent, each telling one fact and asking for two."""
ANSWER_TOKENS = 32
FACT_TOKENS = 20
"""Tokens of a dialogue for each fact that is told in it."""
LEAST_TOKENS_A_FACT = 6
"""No tokenizer takes fewer for a sentence that tells one."""


@dataclass(frozen=True, slots=True)
class AgentLine:
    """Turn of an agent: a fact that it tells, or a question."""

    text: str
    question: Question | None = None
    shared: bool = False
    """Whether the fact asked for stands in the system prompt."""


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """A question, its answer, and the right answer."""

    question: str
    answer: str
    expected: str
    right: bool
    shared: bool


@dataclass(frozen=True, slots=True)
class Account:
    """Totals of one agent."""

    agent: int
    answers: tuple[AgentAnswer, ...]
    conversation_tokens: int
    prompt_tokens: int
    """Prompt tokens of all its requests; each sends the conversation so far."""
    hit_tokens: int
    """Prompt tokens that were not computed again: prefill avoided."""
    hit_rate: float
    own_bytes: int
    """KV bytes of its conversation behind the part that all agents share."""
    plain_bytes: int
    """KV bytes that a cache of its own would hold."""


@dataclass(frozen=True, slots=True)
class AgentsReport:
    """Totals of all agents, together and as if each had run alone."""

    model_type: str
    agents: tuple[Account, ...]
    asked: int
    right: int
    block_size: int
    shared_tokens: int
    """Whole blocks that all agents have in common."""
    shared_bytes: int
    held_bytes: int
    """KV that is held for all of them."""
    plain_bytes: int
    """KV that caches of their own would hold."""
    peak_bytes: int
    """Most that MLX had allocated at any moment since the engine was made, the weights included."""
    limit_bytes: int
    prompt_tokens: int
    hit_tokens: int
    hit_rate: float
    prefilled_tokens: int
    plain_prefilled_tokens: int
    """Prompt tokens that caches of their own, kept from turn to turn, would have prefilled."""
    generated_tokens: int
    seconds: float
    tokens_per_second: float
    """Generated, all agents together."""
    stats: Stats

    def record(self) -> dict[str, object]:
        """Return the report as an object for --json."""
        return asdict(self)


@dataclass(eq=False, slots=True)
class Agent:
    """One conversation while it goes on."""

    number: int
    lines: list[AgentLine]
    messages: list[Message]
    answers: list[AgentAnswer] = field(default_factory=list)
    conversation: tuple[int, ...] = ()
    """The last prompt that was answered, and the answer."""
    tokens: int = 0
    """Tokens read and generated so far, which a cache of its own would hold."""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """Where things stand while the agents talk."""

    stats: Stats
    plain_bytes: int
    seconds: float

    def line(self) -> str:
        """Say it in one line."""
        stats = self.stats
        waiting = stats.waiting + stats.preempted
        kinds = ", ".join(
            f"{kind} {memory.format_bytes(nbytes)}"
            for kind, nbytes in stats.by_kind.items()
            if nbytes
        )
        return (
            f"{stats.prefilling + stats.restoring + stats.running} running, {waiting} waiting; "
            f"{memory.format_bytes(stats.used_bytes)} of {memory.format_bytes(stats.limit_bytes)}: "
            f"{kinds}; plain caches {memory.format_bytes(self.plain_bytes)}; "
            f"{stats.hit_tokens:,} hit tokens ({stats.hit_rate:.0%}); "
            f"{_per_second(stats.generated_tokens, self.seconds):,.0f} tokens/s"
        )


class Crowd:
    """Agents that talk at the same time, each in a thread, as clients of one server would.

    Args:
        loaded: a model with a chat template that takes a system prompt.
        agents: how many.
        prompt_tokens: length of the system prompt, at most.
        seed: decides which agent tells which fact.
        memory_limit: of the engine; None takes the machine's.
        block_size: of the engine, in tokens.

    Raises:
        ModelError: no chat template, or one that refuses a system prompt; or a model that the
            engine cannot run.
        SettingError: weights and buffers are over the limit, or a setting is out of its range.
    """

    def __init__(
        self,
        loaded: Loaded,
        *,
        agents: int,
        prompt_tokens: int,
        seed: int,
        memory_limit: int | str | None,
        block_size: int,
    ) -> None:
        self.loaded = loaded
        self.block_size = block_size
        self._tokenizing = threading.Lock()
        self.spec = memory.read_model_spec(loaded.config)
        system, scripts = write_scripts(
            seed, agents, prompt_tokens, lambda messages: len(self._tokens(messages, answer=False))
        )
        self.agents = [Agent(i, lines, [system]) for i, lines in enumerate(scripts, 1)]
        first = [self._tokens([system, _said(agent.lines[0])]) for agent in self.agents]
        self.shared_tokens = common_tokens(first) // block_size * block_size
        self.engine = make_engine(
            loaded,
            memory_limit=memory_limit,
            block_size=block_size,
            max_queue=max(config.MAX_QUEUE, agents),
        )
        self._started_seconds = time.perf_counter()

    def run(self, watch: Callable[[Figures], None], every_seconds: float) -> None:
        """Let all agents talk until they have said everything; show how it goes now and then.

        Raises:
            PenstockError: a request failed; the engine is closed then.
        """
        self._started_seconds = time.perf_counter()
        with ThreadPoolExecutor(len(self.agents), "agent") as pool:
            talking = {pool.submit(self._talk, agent) for agent in self.agents}
            try:
                while talking:
                    done, talking = wait(talking, every_seconds, FIRST_EXCEPTION)
                    for talk in done:
                        talk.result()
                    watch(self.figures())
            except BaseException:
                self.close()  # requests under way are canceled, so that the pool can end
                raise

    def figures(self) -> Figures:
        """Return where things stand."""
        seconds = time.perf_counter() - self._started_seconds
        return Figures(self.engine.stats(), sum(map(self._plain_bytes, self.agents)), seconds)

    def report(self) -> AgentsReport:
        """Sum up; every agent has said everything."""
        figures = self.figures()
        stats = figures.stats
        token_bytes = stats.by_kind["nodes"] // max(1, stats.held_tokens)
        accounts = tuple(self._account(agent, token_bytes) for agent in self.agents)
        answers = [answer for account in accounts for answer in account.answers]
        conversation_tokens = sum(account.conversation_tokens for account in accounts)
        generated = sum(agent.generated_tokens for agent in self.agents)
        return AgentsReport(
            model_type=str(self.loaded.config.get("model_type")),
            agents=accounts,
            asked=len(answers),
            right=sum(answer.right for answer in answers),
            block_size=self.block_size,
            shared_tokens=self.shared_tokens,
            shared_bytes=self._held_tokens(self.agents[0], self.shared_tokens) * token_bytes,
            held_bytes=stats.by_kind["nodes"],
            plain_bytes=figures.plain_bytes,
            peak_bytes=mx.get_peak_memory(),
            limit_bytes=stats.limit_bytes,
            prompt_tokens=stats.prompt_tokens,
            hit_tokens=stats.hit_tokens,
            hit_rate=stats.hit_rate,
            prefilled_tokens=stats.prefilled_tokens,
            plain_prefilled_tokens=conversation_tokens - generated,
            generated_tokens=stats.generated_tokens,
            seconds=figures.seconds,
            tokens_per_second=_per_second(stats.generated_tokens, figures.seconds),
            stats=stats,
        )

    def close(self) -> None:
        """End the engine."""
        self.engine.close()

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- one agent, in a thread of its own

    def _talk(self, agent: Agent) -> None:
        """Say one line after the other, each when the last was answered."""
        for line in agent.lines:
            agent.messages.append(_said(line))
            answer = self._ask(agent, tuple(self._tokens(agent.messages)))
            agent.messages.append({"role": "assistant", "content": answer})
            if line.question is not None:
                agent.answers.append(judged(line.question, answer, shared=line.shared))

    def _ask(self, agent: Agent, prompt: tuple[int, ...]) -> str:
        """Submit an agent's conversation and return the answer."""
        handle = self.engine.submit(Request(prompt=prompt, max_tokens=ANSWER_TOKENS))
        (choice,) = handle.choices
        for _ in handle:
            if choice.tokens:  # the prompt has been read, then
                agent.tokens = len(prompt) + len(choice.tokens)
        assert choice.finish is not None
        if choice.finish.error is not None:
            raise choice.finish.error
        agent.conversation = (*prompt, *choice.tokens)
        agent.prompt_tokens += choice.finish.usage.prompt_tokens
        agent.hit_tokens += choice.finish.usage.cached_tokens
        agent.generated_tokens += len(choice.tokens)
        return choice.text.strip()

    def _account(self, agent: Agent, token_bytes: int) -> Account:
        held = self._held_tokens(agent, len(agent.conversation))
        return Account(
            agent=agent.number,
            answers=tuple(agent.answers),
            conversation_tokens=len(agent.conversation),
            prompt_tokens=agent.prompt_tokens,
            hit_tokens=agent.hit_tokens,
            hit_rate=agent.hit_tokens / max(1, agent.prompt_tokens),
            own_bytes=max(0, held - self.shared_tokens) * token_bytes,
            plain_bytes=self._plain_bytes(agent),
        )

    def _held_tokens(self, agent: Agent, first_tokens: int) -> int:
        """Count the cached first tokens of an agent's conversation."""
        return self.engine.explain(agent.conversation[:first_tokens]).held_tokens

    def _plain_bytes(self, agent: Agent) -> int:
        if not agent.tokens:
            return 0
        return memory.bytes_of_window(self.spec, config.MAX_KV_SIZE, capacity=agent.tokens)

    def _tokens(self, messages: Sequence[Message], *, answer: bool = True) -> list[int]:
        with self._tokenizing:  # a tokenizer is not safe to use from several threads
            return render(self.loaded.tokenizer, messages, answer=answer)


def write_scripts(
    seed: int, agents: int, prompt_tokens: int, length: Callable[[list[Message]], int]
) -> tuple[Message, list[list[AgentLine]]]:
    """Write the system prompt and every agent's lines; the same seed writes the same.

    Args:
        seed: any number.
        agents: how many.
        prompt_tokens: length of the system prompt, at most; it holds one fact in any case.
        length: counts the tokens of messages.

    Returns:
        The system prompt, as long as it may be, and the lines of each agent, in order.
    """
    most_facts = max(1, prompt_tokens // LEAST_TOKENS_A_FACT)
    facts = most_facts + agents * ROUNDS
    script = dialogue(seed, tokens=1 + facts * FACT_TOKENS, facts=facts, distractors=0.0)
    tellings = [script.messages[question.message]["content"] for question in script.questions]
    own_questions, tellings_of_own = script.questions[most_facts:], tellings[most_facts:]

    def system(count: int) -> Message:
        return {"role": "system", "content": "\n".join(tellings[:count])}

    fits, above = 1, most_facts + 1
    while fits + 1 < above:
        middle = (fits + above) // 2
        fits, above = (
            (middle, above) if length([system(middle)]) <= prompt_tokens else (fits, middle)
        )
    rng = Random(f"agents {seed}")
    scripts: list[list[AgentLine]] = [[] for _ in range(agents)]
    for index, (question, telling) in enumerate(zip(own_questions, tellings_of_own, strict=True)):
        shared = rng.choice(script.questions[:fits])
        scripts[index % agents] += [
            AgentLine(telling),
            AgentLine(shared.text, shared, shared=True),
            AgentLine(question.text, question),
        ]
    return system(fits), scripts


def judged(question: Question, text: str, *, shared: bool) -> AgentAnswer:
    """Compare an answer with the fact: right if it has the value in it, as a word."""
    value = question.fact.value
    right = re.search(rf"\b{re.escape(value)}\b", text, re.IGNORECASE) is not None
    return AgentAnswer(question.text, text, value, right, shared)


def common_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Count the first tokens that all prompts have in common.

    >>> common_tokens([[1, 2, 3, 4], [1, 2, 9], [1, 2, 3]])
    2
    """
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
    return sum(1 for _ in alike)


def _said(line: AgentLine) -> Message:
    return {"role": "user", "content": line.text}


def _per_second(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0
