"""Train the embedded model `recall` and write its Hugging Face folder.

    PYTHONPATH=src python tools/train_recall.py --work DIR            # train, then write
    PYTHONPATH=src python tools/train_recall.py --work DIR --resume   # go on where it stopped

The model is an ordinary llama of two layers. A small model does not find some weights in minutes.
It gets them at initialization (`build_in`), and they are then trained like every other weight:

* Layer 0 has a head each for the last adjective, the last noun and the last attribute seen. The key
  says "I am one", and the fast RoPE frequencies say "and I am near".
* Layer 1 has two heads that compare these three words with the ones gathered at every value in the
  context, and copy that value. They use RoPE frequencies too slow to notice the distance.

The loss is on the assistant's tokens only, so layer 1 asks its queries only there: that makes 8,192
tokens of context cheap. Data come from `penstock_bench.recall`, seeded by the step. So a resumed
run sees the same data as an uninterrupted one.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from penstock.recall import MODEL_PATH
from penstock_bench.recall import (
    ADJECTIVES,
    ATTRIBUTES,
    END,
    NOUNS,
    ROLES,
    START,
    VALUES,
    Dialogue,
    Message,
    dialogue,
)
from recall_files import CONFIG, PAD, build_tokenizer, write_files

D = CONFIG["hidden_size"]
HEADS = CONFIG["num_attention_heads"]
KV_HEADS = CONFIG["num_key_value_heads"]
HEAD = CONFIG["head_dim"]


@dataclass(frozen=True, slots=True)
class Stage:
    """A stretch of the curriculum: rows of `tokens`, `queries` of them learned from a row."""

    tokens: int
    rows: int
    steps: int
    queries: int


CURRICULUM = (
    Stage(tokens=256, rows=16, steps=250, queries=64),
    Stage(tokens=1024, rows=8, steps=150, queries=192),
    Stage(tokens=4096, rows=2, steps=60, queries=384),
    Stage(tokens=8192, rows=1, steps=60, queries=512),
)
PEAK_RATE = 1e-3
WARMUP_STEPS = 40
HORIZON_STEPS = 800
COOLDOWN_STEPS = 100


# ------------------------------------------------------------------------------------- model


class Norm(nn.Module):
    """Divide by the root mean square, and scale."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (D,), self.weight, CONFIG["rms_norm_eps"])


class Attention(nn.Module):
    """Causal attention with RoPE and grouped key/value heads."""

    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(D, HEADS * HEAD, bias=False)
        self.k_proj = nn.Linear(D, KV_HEADS * HEAD, bias=False)
        self.v_proj = nn.Linear(D, KV_HEADS * HEAD, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD, D, bias=False)

    def matrices(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return the weights of query, key, value and output, to be written in place."""
        projections = (self.q_proj, self.k_proj, self.v_proj, self.o_proj)
        q, k, v, o = (projection.weight.data for projection in projections)
        return q, k, v, o

    def forward(self, x: Tensor, places: Tensor, at: Tensor | None) -> Tensor:
        """Attend causally. x: (B, T, D); places: (B, T) RoPE positions; at: (B, P) or all."""
        rows, length, _ = x.shape
        k = rotate(self.k_proj(x).view(rows, length, KV_HEADS, HEAD), places).transpose(1, 2)
        v = self.v_proj(x).view(rows, length, KV_HEADS, HEAD).transpose(1, 2)
        asking = x if at is None else pick(x, at)
        asking_places = places if at is None else places.gather(1, at)
        q = self.q_proj(asking).view(rows, -1, HEADS, HEAD)
        q = rotate(q, asking_places).transpose(1, 2)
        k, v = (a.repeat_interleave(HEADS // KV_HEADS, dim=1) for a in (k, v))
        if at is None:
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            seen = torch.arange(length, device=x.device) <= at[:, None, :, None]
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen)
        return self.o_proj(out.transpose(1, 2).reshape(rows, -1, HEADS * HEAD))


class Mlp(nn.Module):
    """The gated feed-forward half of a block."""

    def __init__(self) -> None:
        super().__init__()
        inner = CONFIG["intermediate_size"]
        self.gate_proj = nn.Linear(D, inner, bias=False)
        self.up_proj = nn.Linear(D, inner, bias=False)
        self.down_proj = nn.Linear(inner, D, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Attention, then the feed-forward half, each on the normed stream and added to it."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attn = Attention()
        self.mlp = Mlp()
        self.input_layernorm = Norm()
        self.post_attention_layernorm = Norm()

    def forward(self, x: Tensor, places: Tensor, at: Tensor | None = None) -> Tensor:
        attended = self.self_attn(self.input_layernorm(x), places, at)
        x = attended + (x if at is None else pick(x, at))
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """A llama with the names Hugging Face gives its weights."""

    def __init__(self, vocab_size: int) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocab_size, D)
        self.layers = nn.ModuleList(Block() for _ in range(CONFIG["num_hidden_layers"]))
        self.norm = Norm()

    def forward(self, tokens: Tensor, places: Tensor, at: Tensor) -> Tensor:
        """Return the logits at the positions `at`. tokens, places: (B, T); at: (B, P)."""
        x = self.embed_tokens(tokens)
        for block in self.layers[:-1]:
            x = block(x, places)
        x = self.layers[-1](x, places, at)
        return F.linear(self.norm(x), self.embed_tokens.weight)


def pick(x: Tensor, at: Tensor) -> Tensor:
    """Take the positions `at` (B, P) of x (B, T, D)."""
    return x.gather(1, at[..., None].expand(-1, -1, x.shape[-1]))


def rotate(x: Tensor, places: Tensor) -> Tensor:
    """Apply RoPE, halves convention. x: (B, T, H, HEAD); places: (B, T)."""
    half = HEAD // 2
    rates = CONFIG["rope_theta"] ** (
        -torch.arange(half, device=x.device, dtype=torch.float64) / half
    )
    angles = (places[..., None].double() * rates)[:, :, None, :]
    cos, sin = angles.cos().float(), angles.sin().float()
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


# ---------------------------------------------------------------------- what is built in at first

IDENTITY = 56
CONST, ADJECTIVE, NOUN, ATTRIBUTE, FIRST, SECOND, ASSISTANT, HALF = range(IDENTITY, 64)
GATHERED = (slice(64, 128), slice(128, 192), slice(192, 256))

# RoPE pair -> share of the score for being near. The shares solve a linear programme: a word 2
# to 13 positions back must lead every place 13 and more further back, up to 32,768, by as much
# as possible (0.19 of the sum). Three or four pairs alone come round again every few thousand.
NEAR = {2: 0.04, 3: 0.19, 4: 0.13, 5: 0.13, 6: 0.13, 7: 0.11, 8: 0.06, 9: 0.06, 10: 0.06, 11: 0.09}
SLOW = tuple(range(12, 32))
"""RoPE pairs that hardly turn within the context: the dimensions for matching."""
CODES = (15, 15, 7)
"""Dimensions in which a matching head tells adjectives, nouns and attributes apart."""


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """Return the id of a token that must be in the vocabulary."""
    found: int | None = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def token_classes(tokenizer: Tokenizer) -> dict[int, list[int]]:
    """Say which tokens name or fill facts: class -> token ids."""

    def ids(words: tuple[str, ...]) -> list[int]:
        return [token_id(tokenizer, word) for word in words]

    def worded(words: tuple[str, ...]) -> list[int]:
        return ids(tuple(f"Ġ{form}" for w in words for form in (w, w.capitalize())))

    pairs = tuple(f"{n:02}" for n in range(100))
    values = tuple(w for words in VALUES.values() for w in words)
    return {
        ADJECTIVE: worded(ADJECTIVES),
        NOUN: worded(NOUNS),
        ATTRIBUTE: worded(ATTRIBUTES),
        FIRST: worded(values) + ids(tuple(f"Ġ{p}" for p in pairs)),
        SECOND: ids(pairs),
        ASSISTANT: ids((ROLES["assistant"],)),
        HALF: ids(tuple(f"Ġ{p}" for p in pairs)),
    }


def case_pairs(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Return the key words' token ids, and those of the same words with a capital."""
    words = (*ADJECTIVES, *NOUNS)
    lower = [token_id(tokenizer, f"Ġ{w}") for w in words]
    return lower, [token_id(tokenizer, f"Ġ{w.capitalize()}") for w in words]


def spread(count: int, dims: int) -> Tensor:
    """Find `count` directions in `dims` dimensions, far from each other. Returns (count, dims)."""
    directions = torch.randn(count, dims, requires_grad=True)
    optimizer = torch.optim.Adam([directions], lr=0.05)
    for _ in range(300):
        units = F.normalize(directions, dim=-1)
        cosines = units @ units.T - 2 * torch.eye(count)
        loss = (20 * cosines).logsumexp(dim=(0, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return F.normalize(directions.detach(), dim=-1)


def build_in(model: Llama, tokenizer: Tokenizer) -> None:
    """Give the model its gathering and matching heads; all else starts small and random."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if weight.dim() == 2:
                small = "down_proj" in name or "o_proj" in name
                nn.init.normal_(weight, std=0.01 if small else 0.03)
    embed(model.embed_tokens.weight.data, tokenizer)
    gather, match = (block.self_attn for block in model.layers)
    build_gather(gather)
    build_match(match)


def embed(embedding: Tensor, tokenizer: Tokenizer) -> None:
    """Fill in the tokens' identity, and marks for the classes the built-in heads look for.

    An adjective, noun or attribute is identified by two codes, one for each matching head.
    """
    embedding.zero_()
    embedding[:, :IDENTITY] = F.normalize(torch.randn(embedding.shape[0], IDENTITY), dim=-1)
    for words, dims in zip((ADJECTIVES, NOUNS, ATTRIBUTES), CODES, strict=True):
        ids = [token_id(tokenizer, f"Ġ{word}") for word in words]
        capital_ids = [token_id(tokenizer, f"Ġ{word.capitalize()}") for word in words]
        codes = torch.cat([spread(len(words), dims), spread(len(words), dims)], dim=-1)
        embedding[ids, :IDENTITY] = F.pad(codes, (0, IDENTITY - 2 * dims)) * 2**-0.5
        embedding[capital_ids] = embedding[ids]
    embedding[:, CONST] = 1
    for mark, ids in token_classes(tokenizer).items():
        embedding[ids, mark] = 1


# A normed embedding is about 10 in each marked coordinate, so weights of w in query and key make
# a score of 12 w^2; in layer 1, where the gathered words are added, it is 6.5, and about 5 w^2.


def build_near(attention: Attention, head: int, score: float) -> None:
    """Let a head prefer near tokens, by up to `score` in layer 0."""
    query, key = head * HEAD, head * KV_HEADS // HEADS * HEAD
    for pair, share in NEAR.items():
        attention.q_proj.weight.data[query + pair, CONST] = (share / 12) ** 0.5 * score / 9
        attention.k_proj.weight.data[key + pair, CONST] = (share / 12) ** 0.5 * 9


def build_gather(attention: Attention) -> None:
    """Copy the last adjective, noun and attribute into a part each of the stream."""
    q, k, v, o = attention.matrices()
    for kv in range(KV_HEADS):
        v[kv * HEAD : (kv + 1) * HEAD, :HEAD] = torch.eye(HEAD)
    for head, (mark, span) in enumerate(zip((ADJECTIVE, NOUN, ATTRIBUTE), GATHERED, strict=True)):
        query, key, pair = head * HEAD, head // 2 * HEAD, SLOW[8 + head]
        build_near(attention, head, score=80.0)
        q[query + pair, CONST] = 2.3
        k[key + pair, mark] = 2.3
        o[span, query : query + IDENTITY] += 0.1 * torch.eye(HEAD)[:, :IDENTITY]
    build_near(attention, head=3, score=20.0)


def build_match(attention: Attention) -> None:
    """Compare gathered words with those at each value, and copy the value that fits."""
    q, k, v, o = attention.matrices()
    for kv in range(KV_HEADS):
        v[kv * HEAD : (kv + 1) * HEAD, :HEAD] = torch.eye(HEAD)
        query, key = 2 * kv * HEAD, kv * HEAD
        free = [*SLOW, *(pair + HEAD // 2 for pair in SLOW)][::-1]
        for dims, span in zip(CODES, GATHERED, strict=True):
            for i in range(dims):
                dim, source = free.pop(), span.start + kv * dims + i
                q[query + dim, source] = k[key + dim, source] = 3.6
        for asks, has in ((ASSISTANT, FIRST), (HALF, SECOND)):
            dim = free.pop()
            q[query + dim, asks] = k[key + dim, has] = 3.0
        o[:IDENTITY, query : query + IDENTITY] += 0.4 * torch.eye(IDENTITY)
        build_near(attention, head=2 * kv + 1, score=30.0)


# -------------------------------------------------------------------------------------- data

ANSWERS = frozenset(
    [f"{word}." for words in VALUES.values() for word in words]
    + [f"{number}." for number in range(1000, 10000)]
)
"""Words that the assistant says only to a question about a fact in the dialogue."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of rendered dialogue, and where in them to learn."""

    tokens: Tensor  # (B, T)
    places: Tensor  # (B, T) RoPE positions
    at: Tensor  # (B, P) positions whose next token is the assistant's
    targets: Tensor  # (B, P)
    weights: Tensor  # (B, P) 0 where P is padding
    answers: Tensor  # (B, P) which answer to a question a position belongs to, else -1


class Rows:
    """Makes batches; the same seed and step give the same batch."""

    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.seed = seed
        self.pad = token_id(tokenizer, PAD)
        self.end = token_id(tokenizer, END)
        self.assistant = token_id(tokenizer, ROLES["assistant"])
        self.capital = dict(zip(*case_pairs(tokenizer), strict=True))

    def batch(self, stage: Stage, step: int) -> Batch:
        rng = Random(f"rows {self.seed} {step}")
        rows = [self.row(rng, stage) for _ in range(stage.rows)]
        return Batch(*(torch.tensor(column) for column in zip(*rows, strict=True)))

    def row(self, rng: Random, stage: Stage) -> tuple[Sequence[float], ...]:
        """Make one row: tokens, places, and the positions, targets, weights and answers."""
        told = dialogue(
            rng.getrandbits(48),
            tokens=stage.tokens,
            facts=0,
            distractors=rng.uniform(0.15, 0.6),
            quiz=rng.uniform(0.15, 0.4),
            strangers=0.15,
        )
        tokens = self.encode(told.messages)
        if rng.random() < 0.5:
            tokens = [self.capital.get(t, t) if rng.random() < 0.05 else t for t in tokens]
        learned = self.learned(tokens, told)
        if len(learned) > stage.queries:
            # Answers to questions first; of the small talk a random part.
            rng.shuffle(learned)
            learned.sort(key=lambda item: item[1] < 0)
            learned = learned[: stage.queries]
        missing = stage.queries - len(learned)
        at = [position for position, _ in learned]
        fill = [self.pad] * (stage.tokens - len(tokens))
        places = self.places(rng, stage.tokens)
        weights = [1.0 if answer >= 0 else 0.5 for _, answer in learned]
        return (
            tokens + fill,
            places,
            at + [0] * missing,
            [tokens[i + 1] for i in at] + [self.pad] * missing,
            weights + [0.0] * missing,
            [answer for _, answer in learned] + [-1] * missing,
        )

    def encode(self, messages: tuple[Message, ...]) -> list[int]:
        """Render and encode as the chat template does."""
        text = START + "".join(f"{ROLES[m['role']]} {m['content']}{END}" for m in messages)
        ids: list[int] = self.tokenizer.encode(text).ids
        return ids

    def learned(self, tokens: list[int], told: Dialogue) -> list[tuple[int, int]]:
        """List the positions whose next token is the assistant's, with the answer's number."""
        replies = [m["content"] for m in told.messages if m["role"] == "assistant"]
        positions, reply, inside = [], -1, False
        for i, token in enumerate(tokens):
            if token == self.assistant:
                inside, reply = True, reply + 1
            inside = inside and token != self.end
            if inside:
                positions.append((i, reply if replies[reply] in ANSWERS else -1))
        return positions

    @staticmethod
    def places(rng: Random, length: int) -> list[int]:
        """Return the positions, with a gap as a rotated window leaves it in every second row."""
        room = CONFIG["max_position_embeddings"] - length
        gap_at, gap = rng.randrange(length), 0
        if rng.random() < 0.5:
            gap = int(room * rng.random() ** 2)
        return [i + (gap if i >= gap_at else 0) for i in range(length)]


# ---------------------------------------------------------------------------------- training


def batch_loss(model: Llama, batch: Batch) -> tuple[Tensor, float]:
    """Return the loss, and the share of answers to questions right in every token."""
    logits = model(batch.tokens, batch.places, batch.at)
    losses = F.cross_entropy(logits.flatten(0, 1), batch.targets.flatten(), reduction="none")
    weights = batch.weights.flatten()
    right = (logits.argmax(-1) == batch.targets).tolist()
    answers: dict[tuple[int, int], bool] = {}
    for row, numbers in enumerate(batch.answers.tolist()):
        for column, number in enumerate(numbers):
            if number >= 0:
                answers[row, number] = answers.get((row, number), True) and right[row][column]
    share = sum(answers.values()) / max(1, len(answers))
    return (losses * weights).sum() / weights.sum(), share


def stage_of(step: int) -> Stage:
    """Return the stage that `step` belongs to."""
    for stage in CURRICULUM:
        if step < stage.steps:
            return stage
        step -= stage.steps
    raise ValueError(f"step {step} is past the curriculum")


def rate(step: int, steps: int) -> float:
    """Return the learning rate: a warm-up, a slow cosine, and a straight line to zero."""
    cosine = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / HORIZON_STEPS)).item())
    warm, cool = (step + 1) / WARMUP_STEPS, (steps - step) / COOLDOWN_STEPS
    return PEAK_RATE * min(1.0, warm, cool) * (0.05 + 0.95 * cosine)


def write_model(model: Llama, tokenizer: Tokenizer, folder: Path) -> None:
    """Write the folder that mlx-lm loads."""
    write_files(folder, tokenizer)
    weights = {f"model.{name}": w.detach().clone() for name, w in model.named_parameters()}
    path = folder / "model.safetensors"
    save_file(weights, path, metadata={"format": "pt"})
    path.chmod(0o644)


def train(work: Path, out: Path, seed: int, resume: bool, checkpoint_steps: int) -> None:
    """Run the curriculum, keeping a checkpoint in `work`, and write the model to `out`."""
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    model = Llama(tokenizer.get_vocab_size())
    build_in(model, tokenizer)
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.98), weight_decay=0.0)
    steps = sum(stage.steps for stage in CURRICULUM)
    checkpoint, step, seconds = work / "checkpoint.pt", 0, 0.0
    if resume:
        saved = torch.load(checkpoint, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step, seconds = saved["step"], saved["seconds"]
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters, step {step} of {steps}")

    rows = Rows(tokenizer, seed)
    work.mkdir(parents=True, exist_ok=True)
    began = time.monotonic() - seconds
    while step < steps:
        stage = stage_of(step)
        for group in optimizer.param_groups:
            group["lr"] = rate(step, steps)
        loss, share = batch_loss(model, rows.batch(stage, step))
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 20 == 0 or step == steps - 1:
            seconds = time.monotonic() - began
            report = {"step": step, "tokens": stage.tokens, "loss": round(loss.item(), 4)}
            print(
                json.dumps(report | {"exact": round(share, 4), "seconds": round(seconds)}),
                flush=True,
            )
        step += 1
        if step % checkpoint_steps == 0 or step == steps:
            seconds = time.monotonic() - began
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save(state | {"step": step, "seconds": seconds}, checkpoint)
            write_model(model, tokenizer, work / "model")
    write_model(model, tokenizer, out)


def main() -> None:
    """Parse the flags and train."""
    parser = argparse.ArgumentParser(description="Train the embedded model and write its folder.")
    parser.add_argument("--work", type=Path, required=True, help="folder for checkpoints")
    parser.add_argument("--out", type=Path, default=MODEL_PATH, help="folder of the model")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint")
    parser.add_argument("--checkpoint-steps", type=int, default=100)
    args = parser.parse_args()
    train(args.work, args.out, args.seed, args.resume, args.checkpoint_steps)


if __name__ == "__main__":
    main()
