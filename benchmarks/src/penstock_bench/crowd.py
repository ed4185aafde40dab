"""Concurrent conversations on one engine: text, answers and costs.

system prompt   facts of a seeded dialogue, shared by all: prefilled once, cached once
agent 1         tells a fact, asks for a shared one, asks for its own; again
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
from penstock.models.template_renderer import TemplateRenderer
from penstock_bench.recall import Message, Question, dialogue

ROUNDS = 2
"""Rounds of an agent; each tells one fact and asks two questions."""
ANSWER_TOKENS = 32
FACT_TOKENS = 20
"""Tokens of a dialogue for each fact."""
LEAST_TOKENS_A_FACT = 6
"""Lower bound of the tokens of a sentence that tells a fact."""


@dataclass(frozen=True, slots=True)
class AgentLine:
    """Turn of an agent: a fact, or a question."""

    text: str
    question: Question | None = None
    shared: bool = False
    """Whether the fact is in the system prompt."""


@dataclass(frozen=True, slots=True)
class AgentAnswer:
    """Question, answer, and the right answer."""

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
    """Prompt tokens of all requests; each sends the conversation so far."""
    hit_tokens: int
    """Prompt tokens found in the cache."""
    hit_rate: float
    own_bytes: int
    """KV bytes of its conversation after the shared prefix."""
    plain_bytes: int
    """KV bytes that a separate cache would hold."""


@dataclass(frozen=True, slots=True)
class AgentsReport:
    """Totals of all agents, compared with separate caches."""

    model_type: str
    agents: tuple[Account, ...]
    asked: int
    right: int
    block_size: int
    shared_tokens: int
    """Whole blocks shared by all agents, in tokens."""
    shared_bytes: int
    held_bytes: int
    """Bytes of the cached KV of all agents."""
    plain_bytes: int
    """Bytes that separate caches would hold."""
    peak_bytes: int
    """Peak of MLX's allocated bytes since the engine was constructed, weights included."""
    limit_bytes: int
    prompt_tokens: int
    hit_tokens: int
    hit_rate: float
    prefilled_tokens: int
    plain_prefilled_tokens: int
    """Prompt tokens that separate caches, kept between turns, would have prefilled."""
    generated_tokens: int
    seconds: float
    tokens_per_second: float
    """Generated tokens per second of all agents."""
    stats: Stats

    def record(self) -> dict[str, object]:
        return asdict(self)


@dataclass(eq=False, slots=True)
class Agent:
    """State of one conversation."""

    number: int
    lines: list[AgentLine]
    messages: list[Message]
    answers: list[AgentAnswer] = field(default_factory=list)
    conversation: tuple[int, ...] = ()
    """Last answered prompt, and the answer."""
    tokens: int = 0
    """Prompt and generated tokens so far; a separate cache would hold these."""
    prompt_tokens: int = 0
    hit_tokens: int = 0
    generated_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Figures:
    """Snapshot of the engine while the agents talk."""

    stats: Stats
    plain_bytes: int
    seconds: float

    def line(self) -> str:
        """Format the figures in one line."""
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
    """Agents that talk concurrently, each in its own thread, like clients of a server.

    Args:
        loaded: a model whose chat template supports a system prompt.
        agents: number of agents.
        prompt_tokens: maximum length of the system prompt.
        seed: determines the facts of each agent.
        memory_limit: limit of the engine; None uses the machine's default.
        block_size: block size of the engine, in tokens.

    Raises:
        ModelError: the chat template is missing or refuses a system prompt, or the engine cannot
            run the model.
        SettingError: weights and buffers exceed the limit, or a setting is out of range.
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
        self._templates = TemplateRenderer()
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
        """Run all agents to the end; call `watch` periodically.

        Raises:
            PenstockError: a request failed; the engine is closed.
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
        """Return the current figures."""
        seconds = time.perf_counter() - self._started_seconds
        return Figures(self.engine.stats(), sum(map(self._plain_bytes, self.agents)), seconds)

    def report(self) -> AgentsReport:
        """Return the totals after all agents have finished."""
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
        """Close the engine and the processes that render prompts."""
        self.engine.close()
        self._templates.close()

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- one agent, in a thread of its own

    def _talk(self, agent: Agent) -> None:
        """Submit an agent's lines in order, each after the previous answer."""
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
        cached = self._held_tokens(agent, len(agent.conversation))
        return Account(
            agent=agent.number,
            answers=tuple(agent.answers),
            conversation_tokens=len(agent.conversation),
            prompt_tokens=agent.prompt_tokens,
            hit_tokens=agent.hit_tokens,
            hit_rate=agent.hit_tokens / max(1, agent.prompt_tokens),
            own_bytes=max(0, cached - self.shared_tokens) * token_bytes,
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
            return render(self.loaded.tokenizer, messages, answer=answer, renderer=self._templates)


def write_scripts(
    seed: int, agents: int, prompt_tokens: int, length: Callable[[list[Message]], int]
) -> tuple[Message, list[list[AgentLine]]]:
    """Write the system prompt and every agent's lines, determined by the seed.

    Args:
        seed: any number.
        agents: number of agents.
        prompt_tokens: maximum length of the system prompt; it has at least one fact.
        length: counts the tokens of messages.

    Returns:
        The system prompt, as long as allowed, and the lines of each agent, in order.
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
    """Judge an answer: right if it contains the value as a word."""
    value = question.fact.value
    right = re.search(rf"\b{re.escape(value)}\b", text, re.IGNORECASE) is not None
    return AgentAnswer(question.text, text, value, right, shared)


def common_tokens(prompts: Sequence[Sequence[int]]) -> int:
    """Return the length of the common prefix of all prompts.

    >>> common_tokens([[1, 2, 3, 4], [1, 2, 9], [1, 2, 3]])
    2
    """
    alike = takewhile(lambda column: len(set(column)) == 1, zip(*prompts, strict=False))
    return sum(1 for _ in alike)


def _said(line: AgentLine) -> Message:
    return {"role": "user", "content": line.text}


def _per_second(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0
