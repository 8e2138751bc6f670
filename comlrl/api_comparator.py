"""A comparator behind an HTTP API: many requests at once, what fails is counted, what was answered is kept on disk.

Requests that fail for good, and answers that are malformed or empty, are counted; more than a declared share of them
ends the run. Answers are cached, so a run that is resumed, or started again, does not pay twice. The key is read from
the environment only, and is in no file, log or message.
"""

import asyncio
import hashlib
import json
from collections import Counter
from collections.abc import Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

from comlrl.agents import Agent, Prompt
from comlrl.api_clients import API_FORMATS, API_KEYS, CLIENTS, Answer, ApiFailure, ApiSettings, Client, Refused, api_key
from comlrl.comparators import Comparator, MakeRollouts
from comlrl.generation import Completion, Sampling
from comlrl.processes import World
from comlrl.rollouts import Node, Rollouts, TreeShape, joint_actions

# These will not get better by trying again, and concern every request.
FATAL = {
    401: "the key is not accepted",
    402: "the account has no funds",
    403: "no access",
    404: "no such URL or model (the base URL mostly ends in /v1)",
    405: "no such URL (the base URL mostly ends in /v1)",
}
# These may concern one prompt (too long, filtered), or a field that the model does not know.
UNACCEPTABLE = (400, 413, 422)
EMPTY = "empty answer"
EMPTY_AND_CUT = "empty answer, cut off at max_new_tokens (a model that thinks first needs more of them)"
FAILED = "failed"  # finish_reason of an answer that is not there


@dataclass(frozen=True)
class Ask:
    """`count` answers to a prompt. `key` names it among the run's requests: a sample of its own."""

    prompt: Prompt
    count: int
    key: str


class ApiCache:
    """Answers on disk, one JSON line a request; torn lines of a killed process are passed over. path None: no cache.

    Of several processes each writes a file of its own beside the first one's, and reads all of them.
    """

    def __init__(self, path: Path | None, rank: int = 0):
        self.path = None if path is None or rank == 0 else path.with_name(f"{path.name}.{rank}")
        self.answers: dict[str, list[Answer]] = {}
        if path is None:
            return
        self.path = self.path or path
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.open("a").close()
        except OSError as error:
            raise ValueError(f"comparator_api_cache={str(path)!r} cannot be written: {error}") from error
        for file in sorted([path, *path.parent.glob(f"{escape(path.name)}.*")]):
            for line in file.read_bytes().splitlines() if file.is_file() else ():
                self._take(line)

    def _take(self, line: bytes) -> None:
        try:
            record = json.loads(line)
            answers = [(text, cut) for text, cut in record["answers"]]
            if all(isinstance(text, str) for text, _ in answers):
                self.answers[record["key"]] = answers
        except (ValueError, KeyError, TypeError):
            return

    def put(self, key: str, answers: list[Answer]) -> None:
        self.answers[key] = answers
        if self.path is not None:
            # The first newline ends a line that a kill tore. One unbuffered write, so that runs can share a file.
            with self.path.open("ab", buffering=0) as stream:
                stream.write(f"\n{json.dumps({'key': key, 'answers': answers})}\n".encode())


class Api:
    """Asks many requests at once. counters: requests sent, requests answered by the cache, answers wanted, and answers
    that failed."""

    def __init__(self, settings: ApiSettings, key: str, cache: ApiCache):
        self.settings, self.key, self.cache = settings, key, cache
        self.counters = {"requests": 0, "cached": 0, "answers": 0, "failed": 0}
        self.problems: Counter[str] = Counter()  # since they were last taken
        self.answered = False  # whether the server gave any answer so far
        self.unacceptable = 0  # requests that it did not accept before

    def check(self) -> None:
        """One small request. ValueError if the server cannot be asked: before hours of sampling."""
        if self.cache.answers:
            return
        probe = Ask("Say yes.", 1, "probe")
        try:
            run(self._with_client([probe], Sampling(max_new_tokens=16), self._probe))
        except Refused as error:
            raise self._refusal(error.status, str(error)) from None
        except ApiFailure as error:
            raise ValueError(f"{self._where()}: {self._hidden(str(error))}") from None

    def ask(self, asks: Sequence[Ask], sampling: Sampling) -> list[list[Answer | None]]:
        """The answers of each request, or None for one that failed.

        Raises ValueError where every request would fail: a key, URL or model that is not accepted.
        """
        return run(self._with_client(asks, sampling, self._ask))

    def take_problems(self) -> Counter[str]:
        taken, self.problems = self.problems, Counter()
        return taken

    async def _with_client(self, asks: Sequence[Ask], sampling: Sampling, work: Any) -> list[Any]:
        client = CLIENTS[self.settings.form](self.settings, self.key)
        gate = asyncio.Semaphore(self.settings.concurrency)
        try:
            return list(await asyncio.gather(*(work(client, gate, ask, sampling) for ask in asks)))
        finally:
            await client.close()

    async def _probe(self, client: Client, gate: asyncio.Semaphore, ask: Ask, sampling: Sampling) -> None:
        await client.ask(ask.prompt, ask.count, sampling)

    async def _ask(self, client: Client, gate: asyncio.Semaphore, ask: Ask, sampling: Sampling) -> list[Answer | None]:
        key = self.cache_key(ask, sampling)
        answers = self.cache.answers.get(key)
        if answers is not None:
            self.counters["cached"] += 1
        else:
            async with gate:
                answers = await self._collect(client, ask, sampling)
            if len(answers) == ask.count:
                self.cache.put(key, answers)
        good: list[Answer | None] = [answer for answer in answers[: ask.count] if answer[0].strip()]
        missing = ask.count - len(good)
        self.counters["answers"] += ask.count
        self.counters["failed"] += missing
        for text, cut in answers[: ask.count]:
            if not text.strip():
                self.problems[EMPTY_AND_CUT if cut else EMPTY] += 1
        return [*good, *[None] * missing]

    async def _collect(self, client: Client, ask: Ask, sampling: Sampling) -> list[Answer]:
        """Some servers give fewer answers than a request wants: ask again for the others."""
        answers: list[Answer] = []
        while len(answers) < ask.count:
            more = await self._send(client, ask.prompt, ask.count - len(answers), sampling)
            if not more:
                break
            answers += more
        return answers[: ask.count]

    async def _send(self, client: Client, prompt: Prompt, count: int, sampling: Sampling) -> list[Answer]:
        self.counters["requests"] += 1
        try:
            answers = await client.ask(prompt, count, sampling)
            self.answered = True
            if not answers:
                self.problems["no answer in the response"] += 1
            return answers
        except Refused as error:
            text = str(error)
            if error.status in FATAL or "insufficient_quota" in text:
                raise self._refusal(error.status, text) from None
            if error.status in UNACCEPTABLE and not self.answered:
                self.unacceptable += 1
                if self.unacceptable >= self.settings.concurrency:
                    raise self._refusal(error.status, text) from None
            self.problems[f"HTTP {error.status}: {self._hidden(text):.200}"] += 1
        except ApiFailure as error:
            self.problems[f"{self._hidden(str(error)):.200}"] += 1
        return []

    def _where(self) -> str:
        return f"comparator_api_url={self.settings.url!r}, comparator_api_model={self.settings.model!r}"

    def _refusal(self, status: int, text: str) -> ValueError:
        said = "the account has no funds" if "insufficient_quota" in text else FATAL.get(status)
        if said is None and status in UNACCEPTABLE:
            said = (
                "requests are not accepted (comparator_api_extra_body sets fields, and leaves out those that are null; "
                "comparator_api_max_n_per_request=1 asks for one answer a request)"
            )
        return ValueError(f"{self._where()}: {said or 'no answer'} (HTTP {status}: {self._hidden(text):.300})")

    def _hidden(self, text: str) -> str:
        """Without the key, which some servers say again. A short one is none, but a word that may stand in the text."""
        return text.replace(self.key, "***") if len(self.key) >= 8 else text

    def cache_key(self, ask: Ask, sampling: Sampling) -> str:
        settings = self.settings
        parts: list[Any] = [settings.base_url, settings.form, settings.model, dict(settings.extra_body)]
        parts += [ask.prompt, ask.count, ask.key]
        parts += [sampling.max_new_tokens, sampling.temperature, sampling.top_p, list(sampling.stop_strings)]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode("utf-8", "backslashreplace")).hexdigest()


def run(work: Coroutine[Any, Any, list[Any]]) -> list[Any]:
    """To its end, also in a notebook, whose thread already runs a loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(asyncio.run, work).result()


class ApiRollouts(Rollouts):
    """Rollouts whose answers come from the API. A joint answer of which a part failed is not there.

    The processes divide the requests, and each of them gets all answers.
    """

    api: Api
    incidents: list[str]

    def _generate(self, level: list[Node], shape: TreeShape, sampling: Sampling, seed_key: tuple) -> None:
        asks: list[Ask] = []
        places: list[tuple[Node, int]] = []  # node and agent of each request
        for node in level:
            count = shape.generations(node.turn)
            most = self.api.settings.at_once or count
            for agent in range(len(self.agents)):
                for start in range(0, count, most):
                    key = repr((*seed_key, node.row_id, node.path, agent, start))
                    asks.append(Ask(node.prompts[agent], min(most, count - start), key))
                    places.append((node, agent))
        self._check_same_tree(level)
        answers = self._answers(asks, sampling)
        for node in level:
            node.completions = [[] for _ in self.agents]
        for (node, agent), some in zip(places, answers, strict=True):
            node.completions[agent] += [as_completion(answer) for answer in some]
        for node in level:
            node.joint_actions = [
                action
                for action in joint_actions(len(node.completions[0]), len(self.agents), shape.joint_mode)
                if all(node.completions[agent][k].finish_reason != FAILED for agent, k in enumerate(action))
            ]

    def _answers(self, asks: Sequence[Ask], sampling: Sampling) -> list[list[Answer | None]]:
        mine = range(self.world.rank, len(asks), self.world.size)

        def work() -> tuple[dict[int, list[Answer | None]], dict[str, int], Counter[str]]:
            before = dict(self.api.counters)
            found = dict(zip(mine, self.api.ask([asks[place] for place in mine], sampling), strict=True))
            counted = {key: value - before[key] for key, value in self.api.counters.items()}
            self.api.counters = before
            return found, counted, self.api.take_problems()

        results: dict[int, list[Answer | None]] = {}
        problems: Counter[str] = Counter()
        for found, counted, told in self.world.together(work):
            results |= found
            problems += told
            for name, count in counted.items():
                self.api.counters[name] += count
        self.incidents += [f"{self.api.settings.model}: {count} x {said}" for said, count in problems.most_common()]
        return [results[place] for place in range(len(asks))]


def as_completion(answer: Answer | None) -> Completion:
    if answer is None:
        return Completion([], "", [], FAILED)
    return Completion([], answer[0], [], "length" if answer[1] else "stop")


class ApiComparator(Comparator):
    """policy: the agents that the answers are for; their tokenizers only measure prompts here."""

    name = "api"

    def __init__(self, make_rollouts: MakeRollouts, policy: Sequence[Agent], settings: ApiSettings, key: str):
        super().__init__(make_rollouts)
        self.policy, self.settings, self.key = policy, settings, key
        self.cache_path: Path | None = None
        self.api: Api | None = None

    def agents(self, iteration: int) -> Sequence[Agent]:
        return self.policy

    def open(self, iteration: int) -> None:
        """The first time also asks the server whether it can be asked."""
        super().open(iteration)
        assert isinstance(self.rollouts, ApiRollouts)
        if self.api is None:
            self.api = open_api(self.settings, self.key, self.cache_path, self.rollouts.world)
        self.rollouts.api, self.rollouts.incidents = self.api, self.incidents


def open_api(settings: ApiSettings, key: str, cache_path: Path | None, world: World) -> Api:
    """Checked in one process. All have to call."""

    def opened() -> Api:
        api = Api(settings, key, ApiCache(cache_path, world.rank))
        if world.is_main:
            api.check()
        return api

    if world.alone:
        return opened()
    found: list[Api] = []
    world.together(lambda: found.append(opened()))
    return found[0]


__all__ = [
    "API_FORMATS",
    "API_KEYS",
    "Api",
    "ApiCache",
    "ApiComparator",
    "ApiFailure",
    "ApiRollouts",
    "ApiSettings",
    "Ask",
    "api_key",
]
