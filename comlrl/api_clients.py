"""One request to a model behind an HTTP API, in the OpenAI-compatible chat protocol or Anthropic's messages.

Both through their makers' client libraries, which retry time-outs, dropped connections, 408, 409, 429 and 5xx with
growing pauses (half a second, doubled up to eight; a Retry-After of up to two minutes is obeyed).
"""

import asyncio
import importlib.util
import math
import os
import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol
from urllib.parse import urlsplit

from comlrl.agents import Prompt
from comlrl.config import is_secret, nearest
from comlrl.generation import Sampling

API_FORMATS = {
    "openai": "openai",
    "openai_chat": "openai",
    "chat": "openai",
    "anthropic": "anthropic",
    "anthropic_messages": "anthropic",
    "messages": "anthropic",
}
API_KEYS = {"openai": "OPENAI_API_KEY", "anthropic": "ANTHROPIC_API_KEY"}
# Ends of a URL that the libraries write themselves; the published setting had whole URLs.
WRITTEN_BY_LIBRARY = {"openai": ("/chat/completions",), "anthropic": ("/messages", "/v1")}
Answer = tuple[str, bool]  # text, and whether it was cut off


@dataclass(frozen=True)
class ApiSettings:
    """Where and how to ask. Refuses what cannot work; asks nobody.

    url: base URL, for example https://api.openai.com/v1; none: the library's. form: openai or anthropic.
    key_env: name of the environment variable that holds the key. key_header, key_prefix: where the key goes, for
    servers that want it elsewhere than these protocols do ("api-key" and "", say). max_n: answers of one request at
    most; none: all (Anthropic's API gives one). timeout: seconds that nothing may come. retries: further attempts.
    extra_body: fields of each request, over those that are sent anyway; null leaves a field out. max_failures: share
    of the answers.
    """

    url: str | None
    form: str
    model: str
    key_env: str
    max_n: int | None = None
    timeout: float = 120.0
    retries: int = 5
    concurrency: int = 8
    headers: Mapping[str, str] = field(default_factory=dict)
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    max_failures: float = 0.1
    key_header: str | None = None
    key_prefix: str = ""

    def __post_init__(self) -> None:
        if self.form not in API_KEYS:
            near = nearest(self.form, API_FORMATS)
            raise ValueError(
                f"comparator_api_format={self.form!r}: must be openai or anthropic"
                + (f"; did you mean {near}?" if near else "")
            )
        self._check_url()
        if not self.model.strip():
            raise ValueError("comparator_api_model is empty: give the model's name at that API")
        for name, low in (("max_n", 1), ("retries", 0), ("concurrency", 1)):
            value = vars(self)[name]
            if value is not None and value < low:
                raise ValueError(f"comparator_api_{name}={value}: must be at least {low}")
        if not 0 < self.timeout < math.inf:
            raise ValueError(f"comparator_api_timeout={self.timeout}: must be above 0 seconds")
        for name, text in self.headers.items():
            # Settings are written to files and logs.
            if is_secret(name) or re.search(r"auth|key", name, re.I):
                raise ValueError(
                    f"comparator_api_headers: {name!r} looks like a secret; put the key into the environment variable "
                    f"{self.key_env} and name its header in comparator_api_key_header"
                )
            if text == "***":
                raise ValueError(
                    f"comparator_api_headers: {name!r} is '***', which files have in place of what may be secret; "
                    "give its value again"
                )
            if not isinstance(text, str) or not text.isascii() or not text.isprintable():
                raise ValueError(f"comparator_api_headers: {name!r} must be plain text on one line")
        for name in self.extra_body:
            if is_secret(name):
                raise ValueError(
                    f"comparator_api_extra_body: {name!r} looks like a secret; keys come from the environment only"
                )
            if name in ("messages", "stream", "n"):
                raise ValueError(f"comparator_api_extra_body: {name!r} is set by the comparator; leave it out")

    def _check_url(self) -> None:
        if self.url is None:
            return
        where = "comparator_api_url"
        try:
            parts = urlsplit(self.url)
            _ = parts.port  # ValueError for one that is no number
        except ValueError as error:
            raise ValueError(
                f"{where}={self.url!r} is no URL ({error}); for example https://api.openai.com/v1"
            ) from None
        if parts.username is not None or parts.password is not None:
            raise ValueError(f"{where} has a user or password in it; put a key into the variable {self.key_env}")
        if parts.query or parts.fragment:
            raise ValueError(
                f"{where} has a part after '?' or '#' in it, which may be a secret and cannot be kept; give the base "
                "URL only, for example https://api.openai.com/v1"
            )
        if parts.scheme not in ("http", "https") or not re.fullmatch(r"[\w.:-]+", parts.hostname or ""):
            raise ValueError(
                f"{where}={self.url!r}: must start with http:// or https:// and a host; for example "
                "https://api.openai.com/v1, or http://localhost:8000/v1"
            )

    @property
    def base_url(self) -> str | None:
        """As the library wants it."""
        url = self.url.rstrip("/") if self.url is not None else None
        for end in WRITTEN_BY_LIBRARY[self.form]:
            url = url.removesuffix(end) if url is not None else None
        return url

    @property
    def at_once(self) -> int | None:
        return 1 if self.form == "anthropic" else self.max_n


def api_key(settings: ApiSettings) -> str:
    """From the environment, and checks that the library is there. ValueError says what is missing, never a key."""
    if importlib.util.find_spec(settings.form) is None:
        raise ValueError(
            f"comparator_api_format={settings.form!r} needs the package {settings.form}; run: "
            "pip install -r requirements.txt"
        )
    name = settings.key_env
    if not re.fullmatch(r"[A-Z_][A-Z0-9_]*", name):
        raise ValueError(
            "comparator_api_key_env must be the name of an environment variable in capitals, such as "
            f"{API_KEYS[settings.form]}; its value is not shown, since it may be the key itself"
        )
    key = os.environ.get(name, "").strip()
    if not key:
        raise ValueError(
            f"comparator_api_key_env={name!r}: this environment variable is not set; put the API key there (it is "
            f"never read from a config). For a server without keys: export {name}=none"
        )
    if not key.isascii() or not key.isprintable():
        raise ValueError(f"comparator_api_key_env={name!r}: what this variable holds cannot be a key: no plain text")
    return key


class ApiFailure(Exception):
    """An answer that cannot be had."""


class Refused(ApiFailure):
    """The server said no. status: of HTTP."""

    def __init__(self, status: int, text: str):
        super().__init__(text)
        self.status = status


class Client(Protocol):
    """`ask`: up to `count` answers to a prompt in one request. Raises ApiFailure."""

    async def ask(self, prompt: Prompt, count: int, sampling: Sampling) -> list[Answer]: ...

    async def close(self) -> None: ...


class OpenAIClient:
    def __init__(self, settings: ApiSettings, key: str):
        import openai  # only where it is used

        self.settings, self.package = settings, openai
        self.client = openai.AsyncOpenAI(api_key=key, base_url=settings.base_url, **client_options(settings, key))
        self.create = self.client.chat.completions.with_raw_response.create

    async def ask(self, prompt: Prompt, count: int, sampling: Sampling) -> list[Answer]:
        body: dict[str, Any] = {
            "model": self.settings.model,
            "messages": as_messages(prompt),
            "n": count,
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "stop": list(sampling.stop_strings) or None,
        }
        data = await request(self.create, self.package, body, ("model", "messages"), self.settings)
        return chat_answers(data)

    async def close(self) -> None:
        await self.client.close()


class AnthropicClient:
    def __init__(self, settings: ApiSettings, key: str):
        import anthropic  # only where it is used

        self.settings, self.package = settings, anthropic
        self.client = anthropic.AsyncAnthropic(api_key=key, base_url=settings.base_url, **client_options(settings, key))
        self.create = self.client.messages.with_raw_response.create

    async def ask(self, prompt: Prompt, count: int, sampling: Sampling) -> list[Answer]:
        messages = as_messages(prompt)
        body: dict[str, Any] = {
            "model": self.settings.model,
            "messages": [message for message in messages if message["role"] != "system"],
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p if sampling.top_p < 1 else None,
            "top_k": sampling.top_k,
            "system": "\n".join(message["content"] for message in messages if message["role"] == "system") or None,
            "stop_sequences": list(sampling.stop_strings) or None,
        }
        required = ("model", "messages", "max_tokens")
        return message_answers(await request(self.create, self.package, body, required, self.settings))

    async def close(self) -> None:
        await self.client.close()


CLIENTS: dict[str, Callable[[ApiSettings, str], Client]] = {"openai": OpenAIClient, "anthropic": AnthropicClient}


def client_options(settings: ApiSettings, key: str) -> dict[str, Any]:
    headers = dict(settings.headers)
    if settings.key_header is not None:
        headers[settings.key_header] = f"{settings.key_prefix} {key}".strip()
    return {"timeout": settings.timeout, "max_retries": settings.retries, "default_headers": headers}


async def request(
    create: Callable[..., Awaitable[Any]],
    library: Any,
    body: Mapping[str, Any],
    required: tuple[str, ...],
    settings: ApiSettings,
) -> Any:
    """The answer's JSON. required: fields that `create` wants as arguments; the others go past its types."""
    fields = {key: value for key, value in {**body, **settings.extra_body}.items() if value is not None}
    named = {key: fields.pop(key, body[key]) for key in required}
    # The library's retries and pauses have an end, but a server that sends a byte now and then has none.
    longest = (settings.retries + 1) * (settings.timeout + 120)
    try:
        response = await asyncio.wait_for(create(**named, extra_body=fields, timeout=settings.timeout), longest)
        return response.http_response.json()
    except asyncio.TimeoutError:
        raise ApiFailure(f"no whole answer within {longest:.0f} seconds") from None
    except library.APIStatusError as error:
        raise Refused(error.status_code, str(error)) from None
    except library.APIError as error:
        raise ApiFailure(f"{type(error).__name__}: {error}") from None
    except ValueError as error:  # of a body that is no JSON, or no UTF-8
        raise ApiFailure(f"malformed answer: {error}") from None


def chat_answers(data: Any) -> list[Answer]:
    """Of a chat completion. An answer without text is an empty one."""
    try:
        return [
            (_text(choice["message"]["content"]), choice.get("finish_reason") == "length") for choice in data["choices"]
        ]
    except (KeyError, TypeError, AttributeError):
        raise ApiFailure(f"malformed answer: {str(data)!r:.100}") from None


def message_answers(data: Any) -> list[Answer]:
    """Of an Anthropic message: its text parts, one answer."""
    try:
        parts = [_text(part["text"]) for part in data["content"] if part["type"] == "text"]
        return [("".join(parts), data.get("stop_reason") == "max_tokens")]
    except (KeyError, TypeError, AttributeError):
        raise ApiFailure(f"malformed answer: {str(data)!r:.100}") from None


def _text(content: Any) -> str:
    if content is None:
        return ""
    if not isinstance(content, str):
        raise TypeError(content)
    # JSON can say half a surrogate pair, such as of an emoji that was cut off; no tokenizer takes it.
    return content.encode("utf-8", "replace").decode()


def as_messages(prompt: Prompt) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
