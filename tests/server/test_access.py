"""API keys: access, salts and rate limits."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from patience import SOON
from server_processes import serving as process
from servers import Running, serving, wait_until

from penstock.config import ApiKey, digest_of
from penstock.server.access import Access, RateLimited, needs_admin

OPERATOR, ALICE, BOB, ROOT = "operator-key", "alice-key", "bob-key", "root-key"
PROMPT = "The amber falcon keeps the code 4821 and tells it to nobody at all. " * 8
FILE = f"""
[alice]
key = "{ALICE}"
[bob]
sha256 = "{digest_of(BOB.encode())}"
[root]
key = "{ROOT}"
admin = true
[few]
key = "few-key"
requests_per_minute = 2
[short]
key = "short-key"
tokens_per_minute = 100
"""


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("keys") / "keys.toml"
    file.touch(0o600)
    file.write_text(FILE)
    return file


@pytest.fixture(scope="module")
def running(keys: Path) -> Iterator[Running]:
    with serving(api_key=OPERATOR, keys=keys) as running:
        yield running


def ask(running: Running, key: str, prompt: str = "Hello!", **more: Any) -> httpx.Response:
    body = {"prompt": prompt, "max_tokens": 2, **more}
    headers = {"authorization": f"Bearer {key}"}
    return httpx.post(f"{running.url}/v1/completions", json=body, headers=headers, timeout=30)


def get(running: Running, key: str, path: str) -> httpx.Response:
    return httpx.get(f"{running.url}{path}", headers={"x-api-key": key}, timeout=30)


def test_only_listed_keys_are_accepted(running: Running) -> None:
    for key in (OPERATOR, ALICE, BOB, ROOT):
        assert ask(running, key).status_code == 200
        assert get(running, key, "/v1/models").status_code == 200
    for wrong in ("x", "alice", digest_of(ALICE.encode()), digest_of(BOB.encode()), ALICE[:-1]):
        refused = ask(running, wrong)
        assert refused.status_code == 401 and refused.headers["www-authenticate"] == "Bearer"


def cached(response: httpx.Response) -> int:
    return int(response.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def test_prefixes_are_shared_within_key_and_salt(running: Running) -> None:
    assert cached(ask(running, ALICE, PROMPT)) == 0
    assert cached(ask(running, ALICE, PROMPT)) > 0
    for other in (BOB, OPERATOR):
        assert cached(ask(running, other, PROMPT)) == 0
    # Nor with what a request calls its salt.
    for salt in ("alice", "alice\x1f", "\x1f"):
        assert cached(ask(running, OPERATOR, PROMPT, cache_salt=salt[:-1] or "x")) == 0
    assert cached(ask(running, ALICE, PROMPT, cache_salt="own")) == 0
    assert cached(ask(running, ALICE, PROMPT, cache_salt="own")) > 0
    explained = httpx.post(
        f"{running.url}/v1/cache/explain",
        json={"prompt": PROMPT + "x"},
        headers={"x-api-key": ALICE},
        timeout=30,
    )
    assert explained.json()["held_tokens"] > 0


def test_stored_responses_are_readable_only_with_their_key(running: Running) -> None:
    def api(key: str) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{running.url}/v1", api_key=key, max_retries=0)

    with api(ALICE) as alice, api(BOB) as bob:
        made = alice.responses.create(model="recall", input="Hello!", max_output_tokens=2)
        assert alice.responses.retrieve(made.id).id == made.id
        with pytest.raises(openai.NotFoundError):
            bob.responses.retrieve(made.id)
        with pytest.raises(openai.NotFoundError):
            bob.responses.delete(made.id)
        with pytest.raises(openai.APIStatusError):
            bob.responses.create(model="recall", input="And?", previous_response_id=made.id)


def test_shared_cache_routes_require_admin(running: Running) -> None:
    for path in ("/v1/cache/tree?text=1", "/v1/cache/stats", "/metrics", "/v1/sessions"):
        for key in (ALICE, "few-key"):
            refused = get(running, key, path)
            assert refused.status_code == 403 and refused.json()["error"]["code"] == "not_admin"
        for key in (ROOT, OPERATOR):
            assert get(running, key, path).status_code in (200, 400)  # without a folder: 400
    for path in ("/v1/cache", "//v1//cache/"):
        headers = {"x-api-key": ALICE}
        assert httpx.delete(f"{running.url}{path}", headers=headers).status_code == 403
    assert needs_admin("/v1/live") and not needs_admin("/v1/cached")


def test_request_limit_gives_429_in_api_format(running: Running) -> None:
    url = running.url
    assert [ask(running, "few-key").status_code for _ in range(2)] == [200, 200]
    refused = ask(running, "few-key")
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.json()["error"]["code"] == "rate_limit_exceeded"
    assert "few-key" not in refused.text and "the key few has used" in refused.text
    with openai.OpenAI(base_url=f"{url}/v1", api_key="few-key", max_retries=0) as api:
        with pytest.raises(openai.RateLimitError):
            api.completions.create(model="recall", prompt="Hello!")
        assert api.models.list().data  # which is counted by no limit
    with (
        anthropic.Anthropic(base_url=url, api_key="few-key", max_retries=0) as api,
        pytest.raises(anthropic.RateLimitError) as raised,
    ):
        api.messages.create(
            model="recall", max_tokens=2, messages=[{"role": "user", "content": "Hello!"}]
        )
    assert raised.value.body["error"]["type"] == "rate_limit_error"  # type: ignore[index]
    assert ask(running, ALICE).status_code == 200  # the others go on


def test_token_limit_counts_tokens_of_disconnected_clients(
    running: Running,
) -> None:
    first = ask(running, "short-key", "the amber falcon", max_tokens=8, ignore_eos=True)
    used = first.json()["usage"]["total_tokens"]
    body = {"prompt": PROMPT, "max_tokens": 4_000, "stream": True, "ignore_eos": True}
    headers = {"x-api-key": "short-key"}
    with httpx.stream(
        "POST", f"{running.url}/v1/completions", json=body, headers=headers, timeout=30
    ) as stream:
        assert stream.status_code == 200
        next(stream.iter_lines())

    def counted() -> float:
        text = get(running, ROOT, "/metrics").text
        (line,) = [one for one in text.splitlines() if 'tokens_total{key="short"}' in one]
        return float(line.rpartition(" ")[2])

    wait_until(lambda: counted() > used + 100)
    refused = ask(running, "short-key")
    assert refused.status_code == 429 and "tokens a minute" in refused.text
    assert int(refused.headers["retry-after"]) >= 1


def test_metrics_name_keys_without_secrets(running: Running) -> None:
    ask(running, ALICE)
    text = get(running, OPERATOR, "/metrics").text
    assert 'penstock_key_requests_total{key="alice"}' in text
    assert 'penstock_key_refused_total{key="few"}' in text
    for secret in (OPERATOR, ALICE, BOB, ROOT, digest_of(BOB.encode())):
        assert secret not in text


def test_waiting_requests_are_counted_per_key(running: Running) -> None:
    text = httpx.get(
        f"{running.url}/metrics", headers={"authorization": f"Bearer {OPERATOR}"}, timeout=30
    ).text
    assert 'penstock_key_waiting{key="alice"} 0.0' in text
    assert text.count("penstock_key_waiting{") == 5, "names of keys, and no addresses"


def limited(clock: list[float], **limits: int) -> tuple[Access, Any]:
    key = ApiKey(name="one", sha256=digest_of(b"secret"), **limits)
    access = Access(None, [key], clock=lambda: clock[0])
    client = access.client_of({"type": "http", "headers": [(b"x-api-key", b"secret")]})
    assert client is not None
    return access, client


def test_requests_above_rate_limit_get_retry_after() -> None:
    clock = [100.0]
    access, client = limited(clock, requests_per_minute=30)
    for _ in range(30):
        access.admit(client)
    with pytest.raises(RateLimited) as raised:
        access.admit(client)
    assert raised.value.headers == {"Retry-After": "2"}  # 30 a minute are one every 2 s
    clock[0] += 1.9
    with pytest.raises(RateLimited):
        access.admit(client)
    clock[0] += 0.2
    access.admit(client)
    clock[0] += 10_000  # what is not used does not add up
    for _ in range(30):
        access.admit(client)
    with pytest.raises(RateLimited):
        access.admit(client)


def test_exceeded_token_rate_delays_next_request() -> None:
    clock = [0.0]
    access, client = limited(clock, tokens_per_minute=60)
    access.admit(client)
    client.tokens = 160
    access.settle(client)  # 100 more than a minute's
    with pytest.raises(RateLimited) as raised:
        access.admit(client)
    assert raised.value.headers == {"Retry-After": "101"}
    clock[0] = 100.5
    with pytest.raises(RateLimited):
        access.admit(client)
    clock[0] = 101.0
    access.admit(client)


def test_reload_keeps_usage_and_applies_new_limits() -> None:
    clock = [0.0]
    access, client = limited(clock, requests_per_minute=4)
    for _ in range(4):
        access.admit(client)
    access.replace([client.key])
    with pytest.raises(RateLimited):
        access.admit(client)
    access.replace([client.key.model_copy(update={"requests_per_minute": 6})])
    access.admit(client)
    access.admit(client)
    with pytest.raises(RateLimited):
        access.admit(client)
    access.replace([])
    assert access.client_of({"type": "http", "headers": [(b"x-api-key", b"secret")]}) is None


def test_invalid_key_file_keeps_previous_keys(
    keys: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    file.write_text(f'[alice]\nkey = "{ALICE}"\n')
    with serving(keys=file) as running:
        assert ask(running, ALICE).status_code == 200
        file.write_text(f'[alice]\nkey = "{ALICE}\n')
        with caplog.at_level(logging.WARNING):
            running.service.access.reload()
        assert ask(running, ALICE).status_code == 200
        assert "keeping the previous keys" in caplog.text
        assert ALICE not in caplog.text and str(tmp_path) not in caplog.text
        file.write_text(f'[bob]\nkey = "{BOB}"\n')
        running.service.access.reload()
        assert ask(running, ALICE).status_code == 401
        assert ask(running, BOB).status_code == 200


@pytest.mark.slow
def test_sighup_reloads_keys(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.touch(0o600)
    file.write_text(f'[alice]\nkey = "{ALICE}"\n')

    def status(url: str, key: str) -> int:
        return httpx.get(f"{url}/v1/models", headers={"x-api-key": key}, timeout=30).status_code

    with process("--keys", str(file)) as made:
        assert (status(made.url, ALICE), status(made.url, BOB)) == (200, 401)
        file.write_text(f'[bob]\nkey = "{BOB}"\n')
        made.running.send_signal(signal.SIGHUP)
        wait_until(lambda: status(made.url, BOB) == 200)
        assert status(made.url, ALICE) == 401


def test_invalid_key_file_exits_before_model_load(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.touch()
    file.chmod(0o644)  # whatever the umask is
    file.write_text(f'[alice]\nkey = "{ALICE}"\n')
    done = subprocess.run(
        (sys.executable, "-m", "penstock", "serve", "--port", "0", "--keys", str(file)),
        capture_output=True,
        text=True,
        timeout=SOON,
        check=False,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1 and "chmod 600" in done.stderr and ALICE not in done.stderr
