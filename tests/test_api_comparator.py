"""The API comparator against a real HTTP server that fails in every way."""

import asyncio
import json
import os
import signal
import subprocess
import threading
import time

import comparator_program
import pytest
from api_server import KEY, ApiServer, Reply, chat, error, message
from processes import ENVIRONMENT, ROOT, torchrun

from comlrl.api_comparator import Api, ApiCache, ApiComparator, ApiRollouts, ApiSettings, Ask, api_key
from comlrl.centralized import Coordinator, TaggedCentralizedComparatorAdapter
from comlrl.comparators import check_failures, failed_answers, foreign_candidates
from comlrl.generation import Sampling
from comlrl.rewards import Rewards
from comlrl.rollouts import Team, TreeShape
from comlrl.signals import Abandoned, StopSignal

SAMPLING = Sampling(max_new_tokens=9, temperature=0.7, top_p=0.9, stop_strings=("END",))


@pytest.fixture
def serve():
    """serve(reply) -> a running server."""
    servers = []

    def start(reply):
        servers.append(ApiServer(reply))
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def settings_of(server, **changes):
    return ApiSettings(
        **{
            "url": server.url,
            "form": "openai",
            "model": "big",
            "key_env": "A_KEY",
            "timeout": 5.0,
            "retries": 2,
            **changes,
        }
    )


def api_of(server, path=None, **changes):
    return Api(settings_of(server, **changes), KEY, ApiCache(path))


def asks(*prompts, count=1):
    return [Ask(prompt, count, f"key {n}") for n, prompt in enumerate(prompts)]


# ---- the two protocols ----------------------------------------------------------------------------------------------


def test_chat_protocol(serve):
    server = serve(lambda n, body: chat("one", "two", reason="length" if n else "stop"))
    api = api_of(server, headers={"X-Team": "red"}, extra_body={"seed": 3, "top_p": None, "temperature": 0.5})
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert api.ask(asks("hello", count=2), SAMPLING) == [[("one", False), ("two", False)]]
    assert api.ask(asks(messages, count=2), SAMPLING) == [[("one", True), ("two", True)]]
    path, headers, body = server.seen[0]
    assert path == "/v1/chat/completions"
    assert headers["authorization"] == f"Bearer {KEY}"
    assert headers["x-team"] == "red"
    assert body == {  # extra fields go over the own ones, and null leaves one out
        "model": "big",
        "messages": [{"role": "user", "content": "hello"}],
        "n": 2,
        "max_tokens": 9,
        "temperature": 0.5,
        "stop": ["END"],
        "seed": 3,
    }
    assert server.bodies[1]["messages"] == messages
    assert api.counters == {"requests": 2, "cached": 0, "answers": 4, "failed": 0}


def test_messages_protocol(serve):
    server = serve(lambda n, body: message("on", "e", reason="max_tokens" if n else "end_turn"))
    api = api_of(server, form="anthropic")
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
    assert api.ask(asks(messages), SAMPLING) == [[("one", False)]]
    assert api.ask(asks("hello"), Sampling(max_new_tokens=60_000)) == [[("one", True)]]
    path, headers, body = server.seen[0]
    assert path == "/v1/messages"  # though the setting's URL ends in /v1 too
    assert headers["authorization"] == f"Bearer {KEY}"
    assert body == {
        "model": "big",
        "messages": [{"role": "user", "content": "hello"}],
        "system": "be brief",
        "max_tokens": 9,
        "temperature": 0.7,
        "top_p": 0.9,
        "stop_sequences": ["END"],
    }
    assert {"top_p", "top_k", "system", "stop_sequences"}.isdisjoint(server.bodies[1])


@pytest.mark.parametrize(
    ("form", "url", "base"),
    [
        ("openai", "https://api.openai.com/v1/chat/completions", "https://api.openai.com/v1"),
        ("openai", "http://localhost:8000/v1/", "http://localhost:8000/v1"),
        ("anthropic", "https://api.anthropic.com/v1/messages", "https://api.anthropic.com"),
        ("anthropic", "https://api.anthropic.com", "https://api.anthropic.com"),
        ("anthropic", None, None),
    ],
)
def test_whole_urls_work_as_base_urls_do(form, url, base):
    assert ApiSettings(url=url, form=form, model="m", key_env="K").base_url == base


def test_the_key_in_another_header(serve):
    server = serve(lambda n, body: chat("one"))
    api_of(server, key_header="api-key").ask(asks("hello"), SAMPLING)
    assert server.seen[0][1]["api-key"] == KEY
    api_of(server, key_header="Authorization", key_prefix="Token").ask(asks("hello"), SAMPLING)
    assert server.seen[1][1]["authorization"] == f"Token {KEY}"


# ---- what fails -----------------------------------------------------------------------------------------------------


def test_too_many_requests_waits_as_told(serve):
    server = serve(lambda n, body: error(429, "slow down", Retry_After="1") if n == 0 else chat("one"))
    api = api_of(server)
    assert api.ask(asks("hello"), SAMPLING) == [[("one", False)]]
    assert server.times[1] - server.times[0] >= 1.0
    assert api.counters["failed"] == 0


def test_server_errors_are_tried_again_with_growing_pauses(serve):
    server = serve(lambda n, body: error(503) if n < 2 else chat("one"))
    assert api_of(server).ask(asks("hello"), SAMPLING) == [[("one", False)]]
    first, second = (server.times[n + 1] - server.times[n] for n in (0, 1))
    assert first >= 0.37  # half a second, less up to a quarter
    assert second >= 0.75


BAD_BODIES = [
    b"<html>no JSON</html>",
    b'{"choices": [',
    b"\xff\xfe",
    b"",
    {"choices": None},
    {"choices": [{"message": None}]},
    {"choices": [{"message": {"content": 7}}]},
    {"choices": "one"},
    {},
    [],
    None,
    "one",
]


@pytest.mark.parametrize("form", ["openai", "anthropic"])
def test_malformed_answers_are_failures(serve, form):
    server = serve(lambda n, body: Reply(BAD_BODIES[n]))
    api = api_of(server, form=form, concurrency=1)
    assert api.ask(asks(*map(str, range(len(BAD_BODIES)))), SAMPLING) == [[None]] * len(BAD_BODIES)
    assert api.counters["failed"] == api.counters["answers"] == len(BAD_BODIES)
    assert sum(api.take_problems().values()) == len(BAD_BODIES)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (chat("", None, " \n"), "empty answer"),
        (chat("", "", "", reason="length"), "cut off at max_new_tokens"),
        (chat(), "no answer in the response"),
        (Reply(drop=True), "APIConnectionError"),
        (error(500, "broken"), "broken"),
        (error(429, "slow down"), "slow down"),
        (error(409, "locked"), "locked"),
        (Reply(chat("late").body, delay=2.0), "APITimeoutError"),
    ],
)
def test_a_failure_is_counted_and_the_others_are_kept(serve, reply, said):
    server = serve(lambda n, body: chat("a", "b", "c") if "good" in body["messages"][0]["content"] else reply)
    api = api_of(server, retries=1 if reply.status == 500 else 0, timeout=0.5)
    assert api.ask(asks("good", "bad", count=3), SAMPLING) == [
        [("a", False), ("b", False), ("c", False)],
        [None, None, None],
    ]
    assert api.counters["failed"] == 3
    (problem,) = api.take_problems()
    assert said in problem
    assert len(server.seen) == (3 if reply.status == 500 else 2)


def test_a_server_that_drips_ends_too(serve, monkeypatch):
    server = serve(lambda n, body: chat("one"))
    monkeypatch.setattr("asyncio.wait_for", lambda work, seconds, wait_for=asyncio.wait_for: wait_for(work, 0.0001))
    api = api_of(server)
    assert api.ask(asks("hello"), SAMPLING) == [[None]]
    assert "no whole answer within 375 seconds" in next(iter(api.problems))


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        (error(401, f"Incorrect API key: {KEY}"), r"the key is not accepted \(HTTP 401.*\*\*\*"),
        (error(402), "no funds"),
        (error(403), "no access"),
        (error(404), "ends in /v1"),
        (error(429, "insufficient_quota"), "no funds"),
    ],
)
def test_what_fails_for_every_request_ends_the_run_at_once(serve, reply, said):
    server = serve(lambda n, body: reply)
    with pytest.raises(ValueError, match=said) as caught:
        api_of(server, concurrency=2, retries=0).ask(asks(*"abcdef"), SAMPLING)
    assert "comparator_api_model='big'" in str(caught.value)
    assert KEY not in str(caught.value)
    assert caught.value.__cause__ is None
    assert len(server.seen) < 6


def test_unacceptable_requests(serve):
    """One prompt may be too long; but if none is accepted, the settings are wrong."""
    server = serve(lambda n, body: error(400, "too long") if "bad" in str(body) else chat("one"))
    api = api_of(server, concurrency=2)
    api.ask(asks("good"), SAMPLING)
    assert api.ask(asks("bad", "bad", "good", "bad"), SAMPLING) == [[None], [None], [("one", False)], [None]]
    with pytest.raises(ValueError, match=r"comparator_api_extra_body.*HTTP 400.*too long"):
        api_of(server, concurrency=2).ask(asks("bad", "bad", "bad", "bad"), SAMPLING)


def test_a_server_that_gives_one_answer_a_request(serve):
    server = serve(lambda n, body: chat(str(n)))
    assert api_of(server).ask(asks("hello", count=3), SAMPLING) == [[("0", False), ("1", False), ("2", False)]]
    assert [body["n"] for body in server.bodies] == [3, 2, 1]


def test_half_a_character(serve, load_agent, tiny):
    server = serve(lambda n, body: Reply(b'{"choices": [{"message": {"content": "a\\ud83d"}}]}'))
    ((answer,),) = api_of(server).ask(asks("hello"), SAMPLING)
    assert answer == ("a?", False)
    load_agent(tiny).encode(answer[0])


def test_more_answers_than_wanted(serve):
    server = serve(lambda n, body: chat("a", "b", "c"))
    assert api_of(server).ask(asks("hello", count=2), SAMPLING) == [[("a", False), ("b", False)]]


def test_requests_run_at_the_same_time_but_not_too_many(serve):
    server = serve(lambda n, body: Reply(chat("one").body, delay=0.1))
    api_of(server, concurrency=3).ask(asks(*"abcdefghi"), SAMPLING)
    assert server.most_busy == 3


def test_check_before_anything_is_sampled(serve, tmp_path):
    good = serve(lambda n, body: chat(""))
    api_of(good).check()
    assert len(good.seen) == 1
    for reply, said in [
        (error(401), "key is not accepted"),
        (error(400, "no such field"), "no such field"),
        (Reply(b"<html>"), "malformed"),
        (error(500), "InternalServerError|HTTP 500"),
    ]:
        with pytest.raises(ValueError, match=said):
            api_of(serve(lambda n, body, reply=reply: reply), retries=0).check()
    gone = serve(lambda n, body: chat("one"))
    gone.shutdown()
    gone.server_close()
    with pytest.raises(ValueError, match=r"comparator_api_url.*Connection error"):
        api_of(gone, retries=0).check()
    # With answers in the cache a run may go on without the server.
    cached = ApiCache(tmp_path / "cache.jsonl")
    cached.put("key", [("one", False)])
    Api(settings_of(gone), KEY, cached).check()


def test_in_a_notebook(serve):
    server = serve(lambda n, body: chat("one"))

    async def cell():
        return api_of(server).ask(asks("hello"), SAMPLING)

    assert asyncio.run(cell()) == [[("one", False)]]


def test_a_signal_abandons_requests_that_wait(serve):
    server = serve(lambda n, body: Reply(chat("one").body, delay=5.0))
    timer = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM))
    started = time.monotonic()
    timer.start()
    with StopSignal() as stop, pytest.raises(Abandoned), stop.abandonable():
        api_of(server, timeout=30).ask(asks("a", "b"), SAMPLING)
    assert time.monotonic() - started < 3


# ---- the cache ------------------------------------------------------------------------------------------------------


def test_cached_answers_are_not_asked_for_again(serve, tmp_path):
    path = tmp_path / "folder" / "cache.jsonl"
    server = serve(lambda n, body: chat(f"é {n}"))
    wanted = asks("a", "b")
    first = api_of(server, path).ask(wanted, SAMPLING)
    again = api_of(server, path)
    assert again.ask(wanted, SAMPLING) == first
    assert again.counters == {"requests": 0, "cached": 2, "answers": 2, "failed": 0}
    assert len(server.seen) == 2
    # Another sample, model, length or extra field is another request.
    again.ask([Ask("a", 1, "another key")], SAMPLING)
    again.ask(wanted[:1], Sampling(max_new_tokens=8))
    api_of(server, path, model="small").ask(wanted[:1], SAMPLING)
    api_of(server, path, extra_body={"seed": 1}).ask(wanted[:1], SAMPLING)
    assert len(server.seen) == 6
    assert KEY not in path.read_text()


def test_a_killed_run_leaves_a_cache_that_can_be_read(serve, tmp_path):
    path = tmp_path / "cache.jsonl"
    server = serve(lambda n, body: chat(str(n)))
    first = api_of(server, path, concurrency=1).ask(asks("a", "b", "c"), SAMPLING)
    whole = path.read_bytes()
    junk = b'\n[1]\n7\n{"key": "k"}\n{"key": "k", "answers": [[1, false]]}\n\xff\xfe\n{"key": [], "answers": []}\n'
    path.write_bytes(junk + whole[: len(whole) - 20])  # torn in the middle of its last line
    api = api_of(server, path)
    assert api.ask(asks("a", "b", "c"), SAMPLING)[:2] == first[:2]
    assert api.counters["cached"] == 2
    assert api_of(server, path).ask(asks("a", "b", "c"), SAMPLING)[:2] == first[:2]
    assert len(ApiCache(path).answers) == 3  # the line after the torn one is whole


def test_failures_are_not_cached(serve, tmp_path):
    path = tmp_path / "cache.jsonl"
    server = serve(lambda n, body: error(500) if n == 0 else chat("one"))
    assert api_of(server, path, retries=0).ask(asks("a"), SAMPLING) == [[None]]
    assert api_of(server, path, retries=0).ask(asks("a"), SAMPLING) == [[("one", False)]]


def test_every_process_writes_a_file_of_its_own_and_reads_all(tmp_path):
    path = tmp_path / "cache[1].jsonl"
    for rank in range(3):
        ApiCache(path, rank).put(f"key {rank}", [(f"answer {rank}", rank == 1)])
    assert sorted(p.name for p in tmp_path.iterdir()) == ["cache[1].jsonl", "cache[1].jsonl.1", "cache[1].jsonl.2"]
    assert ApiCache(path, 7).answers == {f"key {rank}": [(f"answer {rank}", rank == 1)] for rank in range(3)}


def test_a_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "folder", tmp_path / "file" / "cache.jsonl"):
        with pytest.raises(ValueError, match=r"comparator_api_cache=.*cannot be written"):
            ApiCache(path)


# ---- settings and the key -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"form": "opanai"}, "comparator_api_format='opanai'.*did you mean openai"),
        ({"form": "generic"}, "must be openai or anthropic"),
        ({"url": "api.openai.com/v1"}, "must start with http"),
        ({"url": "localhost:8000"}, "must start with http"),
        ({"url": ""}, "must start with http"),
        ({"url": "http://"}, "must start with http"),
        ({"url": "http://my host/v1"}, "must start with http"),
        ({"url": "http://host:99999/v1"}, "is no URL"),
        ({"url": "http://host:port/v1"}, "is no URL"),
        ({"url": "https://[::1/v1"}, "is no URL"),
        ({"url": "https://me:hidden@host/v1"}, "user or password"),
        ({"url": "https://host/v1?key=hidden"}, "after '\\?'"),
        ({"model": " "}, "comparator_api_model is empty"),
        ({"max_n": 0}, "comparator_api_max_n=0"),
        ({"retries": -1}, "comparator_api_retries=-1"),
        ({"concurrency": 0}, "comparator_api_concurrency=0"),
        ({"timeout": 0}, "comparator_api_timeout=0"),
        ({"timeout": float("nan")}, "comparator_api_timeout=nan"),
        ({"headers": {"Authorization": "hidden"}}, "'Authorization' looks like a secret"),
        ({"headers": {"Ocp-Apim-Subscription-Key": "hidden"}}, "looks like a secret"),
        ({"headers": {"X-Team": "a\nb: c"}}, "'X-Team' must be plain text"),
        ({"headers": {"X-Team": "***"}}, "'X-Team' is .*give its value again"),
        ({"headers": {"X-Team": 7}}, "'X-Team' must be plain text"),
        ({"extra_body": {"api_key": "hidden"}}, "'api_key' looks like a secret"),
        ({"extra_body": {"stream": True}}, "'stream' is set by the comparator"),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, said):
    with pytest.raises(ValueError, match=said) as caught:
        ApiSettings(**{"url": "https://host/v1", "form": "openai", "model": "m", "key_env": "A_KEY", **changes})
    assert "hidden" not in str(caught.value)


def test_the_key_comes_from_the_environment(monkeypatch):
    settings = ApiSettings(url="https://host/v1", form="openai", model="m", key_env="A_KEY")
    with pytest.raises(ValueError, match=r"comparator_api_key_env='A_KEY'.*not set"):
        api_key(settings)
    monkeypatch.setenv("A_KEY", "")
    with pytest.raises(ValueError, match="not set"):
        api_key(settings)
    monkeypatch.setenv("A_KEY", f" {KEY}\n")
    assert api_key(settings) == KEY
    for bad in ("sk-\x00hidden", "sk-hiddén", "sk\nhidden"):
        monkeypatch.setattr(os, "environ", {"A_KEY": bad})
        with pytest.raises(ValueError, match="cannot be a key") as caught:
            api_key(settings)
        assert "hidd" not in str(caught.value)


@pytest.mark.parametrize("pasted", [KEY, "gsk_abcdefABCDEF123456", "0123abc", ""])
def test_a_key_pasted_in_place_of_its_variable_is_not_shown(pasted):
    settings = ApiSettings(url="https://host/v1", form="openai", model="m", key_env=pasted)
    with pytest.raises(ValueError, match="must be the name of an environment variable") as caught:
        api_key(settings)
    assert not pasted or pasted not in str(caught.value)


# ---- rollouts -------------------------------------------------------------------------------------------------------


def score(first, second):
    return [float(len(x) - len(y)) for x, y in zip(first, second)]


def comparator_of(server, agents, team=None, turns=1, **changes):
    def make(team_agents):
        rewards = Rewards([score], 2)
        formatters = [lambda row: f"0 {row['prompt']}", lambda row: f"1 {row['prompt']}"]
        feedback = (lambda agent_completions: agent_completions) if turns > 1 else None
        limits = [10**9] * len(team_agents)
        return ApiRollouts(team_agents, rewards, formatters, feedback, team or Team(2), prompt_limits=limits)

    return ApiComparator(make, agents, settings_of(server, **changes), KEY)


ROWS = [(4, {"prompt": "x"}), (5, {"prompt": "y"})]


def test_rollouts_of_an_api(serve, load_agent, tiny):
    """Two agents: each is asked its own prompt; a joint answer with a failed part is not there."""

    def reply(n, body):
        prompt = body["messages"][0]["content"]
        if prompt == "Say yes.":
            return chat("yes")
        return chat("", "bb", "cc") if prompt == "1 x" else chat("a", "bbbb", "ccccc", reason="length")

    agents = [load_agent(tiny), load_agent(tiny)]
    comparator = comparator_of(serve(reply), agents)
    comparator.open(0)
    roots, stats = comparator.expand(ROWS, TreeShape(num_generations=3), SAMPLING, (0, "comparator", 0))
    assert [root.prompts for root in roots] == [["0 x", "1 x"], ["0 y", "1 y"]]
    assert roots[0].joint_actions == [(0, 0), (1, 1)]  # the good answers of a request come first
    assert roots[0].rewards == [-1.0, 2.0]
    assert roots[1].joint_actions == [(0, 0), (1, 1), (2, 2)]
    assert stats.env_steps == 5
    assert failed_answers(roots, stats) == (1, 12)
    assert comparator.incidents == ["big: 1 x empty answer"]
    check_failures(1, 12, 0.1)
    with pytest.raises(RuntimeError, match=r"failed 1 of 12 answers.*comparator_max_failures=0.05: big: 1 x empty"):
        check_failures(1, 12, 0.05, comparator.incidents)
    kept = foreign_candidates(
        roots[1], agents, same_tokens=False, by_role=False, use_return=True, keep_truncated=True, source="api"
    )
    eos = agents[0].tokenizer.eos_token_id
    assert [c.answer.texts for c in kept] == [["a", "a"], ["bbbb", "bbbb"], ["ccccc", "ccccc"]]
    assert all(c.answer.truncated and eos not in ids for c in kept for ids in c.answer.token_ids)
    comparator.close()


def test_several_turns_of_an_api(serve, load_agent, tiny):
    server = serve(lambda n, body: chat(*[f"{i} {body['messages'][0]['content']}" for i in range(body["n"])]))
    comparator = comparator_of(server, [load_agent(tiny), load_agent(tiny)], turns=2)
    comparator.open(0)
    shape = TreeShape(num_turns=2, num_generations=2)
    roots, _ = comparator.expand(ROWS[:1], shape, SAMPLING, (0, "comparator", 0))
    assert [child.prompts for child in roots[0].children] == [["0 0 0 x", "1 0 1 x"], ["0 1 0 x", "1 1 1 x"]]
    assert roots[0].children[0].responses[1] == ["1 0 0 0 x", "1 1 0 1 x"]


def test_untagged_answers_of_an_api_coordinator(serve, load_agent, tiny):
    """They give no pair, and count as failed."""

    def reply(n, body):
        return chat(
            *["no sections", "<agent_0>abc</agent_0><agent_1>d</agent_1>", "<agent_1>zz</agent_1>"][: body["n"]]
        )

    team = Coordinator(TaggedCentralizedComparatorAdapter(), 2, "skip")
    agents = [load_agent(tiny), load_agent(tiny)]
    comparator = comparator_of(serve(reply), agents[:1], team=team)
    comparator.open(0)
    roots, stats = comparator.expand(ROWS[:1], TreeShape(num_generations=3), SAMPLING, (0, "comparator", 0))
    assert roots[0].rewards == [None, 2.0, -2.0]
    assert failed_answers(roots, stats) == (1, 3)
    kept = foreign_candidates(
        roots[0], agents, same_tokens=False, by_role=True, use_return=True, keep_truncated=False, source="api"
    )
    assert [c.answer.texts for c in kept] == [["abc", "d"], ["", "zz"]]
    # To say nothing is to end at once, so that an empty answer has a log-prob.
    assert kept[1].answer.token_ids[0] == [agents[0].tokenizer.eos_token_id]


def test_the_same_run_again_pays_nothing(serve, load_agent, tiny, tmp_path):
    server = serve(lambda n, body: chat(*map(str, range(body["n"]))))
    for _ in range(2):
        comparator = comparator_of(server, [load_agent(tiny)] * 2, max_n=2)
        comparator.cache_path = tmp_path / "cache.jsonl"
        comparator.open(0)
        roots, _ = comparator.expand(ROWS, TreeShape(num_generations=3), SAMPLING, (0, "comparator", 0))
        assert roots[0].completions[0][2].text == "0"
    assert len(server.seen) == 1 + 2 * 2 * 2  # the first question, then two requests an agent and row
    assert KEY not in (tmp_path / "cache.jsonl").read_text()


# ---- several processes ----------------------------------------------------------------------------------------------


def in_two_processes(folder, url):
    command = [*torchrun(2), str(ROOT / "tests" / "comparator_program.py"), "api", str(folder), url]
    environment = {**ENVIRONMENT, "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    return done, [json.loads(path.read_text()) for path in sorted(folder.glob("report_*.json"))]


def echo(n, body):
    """The same to the same prompt, whoever asks; every third answer is empty."""
    prompt = body["messages"][0]["content"]
    return chat(*["" if prompt == "bb" and i == 1 else f"{prompt} {i}" for i in range(body["n"])])


@pytest.mark.full
def test_processes_ask_and_judge_each_answer_once(serve, tmp_path):
    server = serve(echo)
    (tmp_path / "alone").mkdir()
    _, alone = comparator_program.report("api", tmp_path / "alone", server.url)
    assert len(server.seen) == 1 + 10  # one question whether it is there, then 5 rows for 2 agents
    done, together = in_two_processes(tmp_path, server.url)
    assert done.returncode == 0, done.stderr[-3000:]
    assert len(server.seen) == 2 * 11
    shares = [report.pop("judged") for report in together]
    assert all(shares)
    assert sorted(map(tuple, shares[0] + shares[1])) == sorted(alone.pop("judged"))
    assert together == [alone, alone]
    assert alone["incidents"] == ["big: 2 x empty answer"]
    assert alone["counters"] == {"requests": 10, "cached": 0, "answers": 30, "failed": 2}
    # What two wrote, one finds.
    _, again = comparator_program.report("api", tmp_path, server.url)
    assert again["texts"] == alone["texts"]
    assert again["counters"]["cached"] == 10
    assert len(server.seen) == 2 * 11


@pytest.mark.full
def test_an_error_in_one_process_ends_all(serve, tmp_path):
    server = serve(lambda n, body: error(402) if body["messages"][0]["content"] == "ba" else echo(n, body))
    started = time.monotonic()
    done, reports = in_two_processes(tmp_path, server.url)
    assert done.returncode != 0
    assert reports == []
    assert "the account has no funds (HTTP 402" in done.stderr
    assert KEY not in done.stderr + done.stdout
    assert time.monotonic() - started < 250
