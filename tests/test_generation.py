"""Sampling: which tokens come out, with which probability, and where an answer ends."""

import math

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from comlrl.agents import Agent
from comlrl.generation import (
    Request,
    Sampling,
    choose_tokens,
    generate,
    left_pad,
    right_pad,
    sample_seed,
)
from comlrl.loading import load_references
from comlrl.logprobs import completion_logprobs

PROMPTS = [list(b"a long prompt, longer than others: "), list(b"hi"), list(b"middle"), list(b"mirror")]
CPU = torch.device("cpu")


def sharpen(agent, factor=8.0):
    """Fresh weights give nearly equal probabilities, whatever was read: make layers stronger and logits larger."""
    with torch.no_grad():
        for name, weight in agent.model.named_parameters():
            if ".layers." in name and weight.dim() == 2:
                weight.mul_(8.0)
            if name in ("model.norm.weight", "transformer.ln_f.weight"):
                weight.mul_(factor)
    agent.weights_changed()
    return agent


def ids_of(results):
    return [[completion.token_ids for completion in completions] for completions in results]


def naive_greedy(model, prompt, count, eos):
    """One sequence, one forward a token, no cache, no pads."""
    ids = list(prompt)
    while len(ids) < len(prompt) + count:
        ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        if ids[-1] in eos:
            break
    return ids[len(prompt) :]


# --- independence of the batch ---


@pytest.mark.parametrize("name", ["tiny", "gpt2"])
def test_what_a_sample_says_depends_on_its_prompt_and_seed_only(request, load_agent, name):
    agent = sharpen(load_agent(request.getfixturevalue(name)))
    agent.eos_ids = tuple(range(0, 256, 9))  # many rows end early, so rows leave the batch all the time
    requests = [Request(prompt, [11 + i, None, 500 + i]) for i, prompt in enumerate(PROMPTS)]
    sampling = Sampling(max_new_tokens=20)
    together = ids_of(generate(agent, requests, sampling))
    assert len({len(answer) for answers in together for answer in answers}) > 3
    for i, request_ in enumerate(requests):
        alone = [generate(agent, [Request(request_.prompt_ids, [s])], sampling)[0][0] for s in request_.seeds]
        assert [completion.token_ids for completion in alone] == together[i]
    for order in ([3, 1, 0, 2], [2, 3, 1, 0]):
        shuffled = ids_of(generate(agent, [requests[i] for i in order], sampling))
        assert shuffled == [together[i] for i in order]
    for max_rows in (1, 2, 3, 5, 100):
        assert ids_of(generate(agent, requests, sampling, max_rows)) == together
    again = [Request(r.prompt_ids, r.seeds[::-1]) for r in requests]
    assert ids_of(generate(agent, again, sampling)) == [answers[::-1] for answers in together]


def test_equal_seeds_give_equal_and_other_seeds_other_samples(load_agent, tiny):
    agent = load_agent(tiny)
    (answers,) = ids_of(generate(agent, [Request(PROMPTS[0], [0, 1, 2, 3, 2])], Sampling(max_new_tokens=16)))
    assert answers[2] == answers[4]
    assert len({tuple(answer) for answer in answers}) == 4
    longer = ids_of(generate(agent, [Request(PROMPTS[0], [0])], Sampling(max_new_tokens=24)))
    assert longer[0][0][:16] == answers[0]  # the limit does not change the stream


def test_seeds_of_samples_are_all_different():
    keys = [(7, "train", r, row, path, agent, k) for r in range(4) for row in range(10) for path in ((), (0,), (0, 1))
            for agent in range(3) for k in range(20)]  # fmt: skip
    seeds = {sample_seed(*key) for key in keys}
    assert len(seeds) == len(keys)
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sample_seed(1, 23) != sample_seed(12, 3)
    assert sample_seed(0, "train", 1) == 439_936_155_286_824_091  # the same on every machine and run


def test_no_requests_and_requests_without_seeds(load_agent, tiny):
    agent = load_agent(tiny)
    assert generate(agent, [], Sampling()) == []
    results = generate(agent, [Request(PROMPTS[0], []), Request(PROMPTS[1], [1])], Sampling(max_new_tokens=2))
    assert [len(completions) for completions in results] == [0, 1]


# --- the distribution ---


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_frequencies_are_softmax_of_logits_over_temperature(temperature):
    logits = torch.tensor([2.0, -1.0, 0.0, 1.0, 0.5, -3.0, 1.5])
    count = 40_000
    uniform = torch.rand(count, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    greedy = torch.zeros(count, dtype=torch.bool)
    tokens, logprobs, mass = choose_tokens(logits.repeat(count, 1), uniform, greedy, Sampling(temperature=temperature))
    probabilities = torch.softmax(logits.double() / temperature, dim=0)
    found = torch.bincount(tokens, minlength=7)
    z = (found - count * probabilities) / (count * probabilities * (1 - probabilities)).sqrt()
    assert z.abs().max() < 4
    torch.testing.assert_close(logprobs, probabilities.log().float()[tokens])
    assert mass.sub(1).abs().max() < 1e-6


def test_first_tokens_of_many_seeds_follow_the_model(load_agent, tiny):
    agent = sharpen(load_agent(tiny), 6.0)
    count = 8000
    seeds = [sample_seed("frequencies", k) for k in range(count)]
    sampling = Sampling(max_new_tokens=1, temperature=0.7)
    (completions,) = generate(agent, [Request(PROMPTS[0], seeds)], sampling, max_rows=count)
    found = torch.bincount(torch.tensor([c.token_ids[0] for c in completions]), minlength=258)
    expected = count * torch.softmax(agent.model(torch.tensor([PROMPTS[0]])).logits[0, -1] / 0.7, dim=0)
    often = expected > 5
    assert often.sum() > 20
    chi_square = ((found - expected)[often] ** 2 / expected[often]).sum().item()
    degrees = int(often.sum())
    assert abs(chi_square - degrees) < 4 * math.sqrt(2 * degrees)


def test_consecutive_tokens_of_one_seed_are_independent_draws(load_agent, tiny):
    """All logits 0 give every token probability 1/258: pairs of halves must be equally frequent."""
    agent = sharpen(load_agent(tiny), 0.0)
    agent.eos_ids = ()
    seeds = [sample_seed("pairs", k) for k in range(400)]
    (completions,) = generate(agent, [Request([65], seeds)], Sampling(max_new_tokens=11), max_rows=400)
    tokens = torch.tensor([c.token_ids for c in completions])
    upper = (tokens >= 129).long()
    pairs = torch.bincount((2 * upper[:, :-1] + upper[:, 1:]).flatten(), minlength=4)
    assert (pairs - 1000).abs().max() < 4 * math.sqrt(4000 * 0.25 * 0.75)
    repeats = (tokens[:, 1:] == tokens[:, :-1]).sum().item()
    assert abs(repeats - 4000 / 258) < 4 * math.sqrt(4000 / 258)


def test_without_top_k_the_whole_vocabulary_is_sampled(load_agent, tiny):
    """`top_k: None` once meant 50."""
    agent = load_agent(tiny)
    seeds = list(range(1500))
    (completions,) = generate(agent, [Request(PROMPTS[0], seeds)], Sampling(max_new_tokens=1), max_rows=1500)
    assert len({completion.token_ids[0] for completion in completions}) > 200
    (few,) = generate(agent, [Request(PROMPTS[0], seeds)], Sampling(max_new_tokens=1, top_k=3), max_rows=1500)
    logits = agent.model(torch.tensor([PROMPTS[0]])).logits[0, -1]
    assert {completion.token_ids[0] for completion in few} == set(logits.topk(3).indices.tolist())


# --- top_p and top_k ---


def plain_kept(logits, temperature, top_p, top_k):
    """The tokens that stay: in falling order until their sum reaches top_p, at most top_k, at least one."""
    probabilities = torch.softmax(logits.double() / temperature, dim=0).tolist()
    order = sorted(range(len(probabilities)), key=lambda token: -probabilities[token])
    kept, total = [], 0.0
    for token in order:
        if kept and (total >= top_p or (top_k is not None and len(kept) == top_k)):
            break
        kept.append(token)
        total += probabilities[token]
    return {token: probabilities[token] for token in kept}


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize(
    ("top_p", "top_k"), [(0.9, None), (0.5, None), (1e-9, None), (1.0, 3), (1.0, 1), (0.8, 4), (0.99, 500)]
)
def test_top_p_and_top_k_equal_the_plain_reference(top_p, top_k, temperature):
    generator = torch.Generator().manual_seed(1)
    uniform = (torch.arange(2000, dtype=torch.float64) + 0.5) / 2000  # every part of the distribution
    sampling = Sampling(temperature=temperature, top_p=top_p, top_k=top_k)
    for row in 2 * torch.randn(5, 12, generator=generator):
        kept = plain_kept(row, temperature, top_p, top_k)
        mass = sum(kept.values())
        greedy = torch.zeros(2000, dtype=torch.bool)
        tokens, logprobs, kept_mass = choose_tokens(row.repeat(2000, 1), uniform, greedy, sampling)
        found = torch.bincount(tokens, minlength=12) / 2000
        for token in range(12):
            assert found[token].item() == pytest.approx(kept.get(token, 0.0) / mass, abs=1.01 / 2000)
        assert kept_mass.max().item() == pytest.approx(mass, rel=1e-6)
        # Reported log-probs are those of the whole distribution, which is what the learner computes.
        torch.testing.assert_close(logprobs, torch.log_softmax(row / temperature, dim=0)[tokens])


def test_extreme_uniforms_stay_inside_the_distribution():
    logits = torch.tensor([[-200.0, 0.0, 1.0, -200.0]]).repeat(2, 1)
    uniform = torch.tensor([0.0, 1 - 2**-53], dtype=torch.float64)
    tokens, logprobs, _ = choose_tokens(logits, uniform, torch.zeros(2, dtype=torch.bool), Sampling())
    assert tokens[1] == 2
    assert logprobs[1] > -1
    tokens, _, _ = choose_tokens(logits, uniform, torch.zeros(2, dtype=torch.bool), Sampling(top_k=2))
    assert tokens.tolist() == [1, 2]


def test_kept_mass_of_a_completion_is_the_mean_over_its_tokens(load_agent, tiny):
    agent = sharpen(load_agent(tiny), 6.0)
    sampling = Sampling(max_new_tokens=6, temperature=0.8, top_p=0.6)
    ((sampled, greedy),) = generate(agent, [Request(PROMPTS[0], [5, None])], sampling)
    logits = agent.model(torch.tensor([PROMPTS[0] + sampled.token_ids])).logits[0]
    masses = []
    for t, token in enumerate(sampled.token_ids):
        kept = plain_kept(logits[len(PROMPTS[0]) + t - 1], 0.8, 0.6, None)
        assert token in kept
        masses.append(sum(kept.values()))
    assert sampled.kept_mass == pytest.approx(sum(masses) / len(masses), rel=1e-4)
    assert 0.6 <= sampled.kept_mass < 1
    assert greedy.kept_mass == 1
    assert Sampling().truncated is False
    assert sampling.truncated


# --- greedy, log-probs ---


@pytest.mark.parametrize("name", ["tiny", "gpt2"])
def test_greedy_equals_transformers_generate(request, load_agent, name):
    agent = sharpen(load_agent(request.getfixturevalue(name)), 3.0)
    sampling = Sampling(max_new_tokens=24, temperature=0.3, top_p=0.5)
    results = generate(agent, [Request(prompt, [None]) for prompt in PROMPTS], sampling)
    for prompt, (completion,) in zip(PROMPTS, results):
        output = agent.model.generate(
            torch.tensor([prompt]),
            do_sample=False,
            max_new_tokens=24,
            attention_mask=torch.ones(1, len(prompt)),
        )
        assert completion.token_ids == output[0, len(prompt) :].tolist()


@pytest.mark.parametrize("name", ["tiny", "gpt2"])
def test_reported_logprobs_equal_the_learner_s(request, load_agent, name):
    agent = sharpen(load_agent(request.getfixturevalue(name)), 3.0)
    agent.eos_ids = tuple(range(0, 256, 16))
    requests = [Request(prompt, [i, i + 10, None]) for i, prompt in enumerate(PROMPTS)]
    results = generate(agent, requests, Sampling(max_new_tokens=20, temperature=0.6))
    completions = [completion for group in results for completion in group]
    index = torch.tensor([i for i, group in enumerate(results) for _ in group])
    expected, _ = completion_logprobs(
        agent.model,
        *left_pad(PROMPTS, agent.pad_id, CPU),
        *right_pad([c.token_ids for c in completions], agent.pad_id, CPU),
        index,
        temperature=0.6,
    )
    for row, completion in zip(expected, completions):
        assert len(completion.logprobs) == len(completion.token_ids)
        reported = torch.tensor(completion.logprobs)
        torch.testing.assert_close(reported, row[: len(reported)], rtol=1e-5, atol=1e-5)


# --- where an answer ends ---


def greedy_answer(agent, prompt, count):
    ((completion,),) = generate(agent, [Request(prompt, [None])], Sampling(max_new_tokens=count))
    return completion


def test_any_of_several_eos_ids_ends_an_answer_and_is_kept(load_agent, tiny):
    """What ends it is in the token ids, not in the text."""
    agent = sharpen(load_agent(tiny))
    free = greedy_answer(agent, PROMPTS[0], 30).token_ids
    first = {token: free.index(token) for token in free}
    token, place = next((token, place) for token, place in first.items() if place >= 3)
    agent.eos_ids = (*agent.eos_ids, token)
    answer = greedy_answer(agent, PROMPTS[0], 30)
    assert answer.token_ids == free[: place + 1]
    assert answer.finish_reason == "eos"
    assert not answer.truncated
    assert answer.text == agent.decode(free[:place])
    assert len(answer.logprobs) == place + 1


def test_eos_id_zero_ends_an_answer(tiny):
    model = AutoModelForCausalLM.from_pretrained(tiny)
    model.generation_config.eos_token_id = 0
    agent = sharpen(Agent(model, AutoTokenizer.from_pretrained(tiny), "agent_0"), 0.0)  # all logits equal
    answer = greedy_answer(agent, PROMPTS[0], 5)  # of equal logits the first, id 0, is the maximum
    assert (answer.token_ids, answer.finish_reason, answer.text) == ([0], "eos", "")


def test_a_prompt_that_holds_eos_with_pad_equal_eos(load_agent, tiny):
    """Answers were cut out of the prompt at its first pad id."""
    agent = sharpen(load_agent(tiny))
    agent.tokenizer.pad_token = agent.tokenizer.eos_token
    agent.pad_id = eos = agent.tokenizer.eos_token_id
    prompts = [agent.encode(text) for text in ("sys<eos>user asks<eos>", "<eos>", "a<eos><eos>b")]
    assert all(eos in prompt for prompt in prompts)
    results = generate(agent, [Request(prompt, [None]) for prompt in prompts], Sampling(max_new_tokens=12))
    for prompt, (completion,) in zip(prompts, results):
        assert completion.token_ids == naive_greedy(agent.model, prompt, 12, agent.eos_ids)
        body = [token for token in completion.token_ids if token != eos]
        assert completion.text == agent.decode(body)


def test_an_answer_at_the_limit_says_length(load_agent, tiny):
    agent = load_agent(tiny)
    agent.eos_ids = ()
    answer = greedy_answer(agent, PROMPTS[0], 7)
    assert (len(answer.token_ids), answer.finish_reason, answer.truncated) == (7, "length", True)
    assert answer.text == agent.decode(answer.token_ids)


def test_eos_as_the_last_allowed_token_is_an_end_not_a_truncation(load_agent, tiny):
    agent = sharpen(load_agent(tiny))
    free = greedy_answer(agent, PROMPTS[0], 4).token_ids
    assert free[3] not in free[:3]
    agent.eos_ids = (free[3],)
    assert greedy_answer(agent, PROMPTS[0], 4).finish_reason == "eos"


class Scripted(torch.nn.Module):
    """Stands behind a real model's head: makes it say `script`, whatever it read."""

    def __init__(self, head, script):
        super().__init__()
        self.head, self.script = head, iter(script)

    def forward(self, hidden):
        logits = self.head(hidden)
        return logits + 1000 * torch.nn.functional.one_hot(torch.tensor(next(self.script)), logits.shape[-1])


def say(load_agent, tiny, text, **sampling):
    agent = load_agent(tiny)
    script = [*agent.encode(text), agent.tokenizer.eos_token_id]
    agent.model.lm_head = Scripted(agent.model.lm_head, script)
    ((completion,),) = generate(agent, [Request(PROMPTS[1], [None])], Sampling(**sampling))
    return completion, script


def test_a_stop_string_ends_the_answer_and_is_cut_from_the_text_only(load_agent, tiny):
    answer, script = say(load_agent, tiny, "one STOP two", stop_strings=("STOP",))
    assert answer.finish_reason == "stop"
    assert answer.text == "one "
    assert answer.token_ids == script[: len("one STOP")]  # as sampled: what is trained
    assert len(answer.logprobs) == len(answer.token_ids)
    assert not answer.truncated


@pytest.mark.parametrize(
    ("text", "stops", "expected", "reason"),
    [
        ("ab\n\ncd", ("\n\n",), "ab", "stop"),
        ("abcd", ("x", "cd", "bc"), "a", "stop"),  # the first to be complete
        ("ab é 漢 z", ("漢",), "ab é ", "stop"),  # three tokens, one character
        ("STOP", ("STOP",), "", "stop"),
        ("long before " * 9 + "🙂🙂 after", ("x", "🙂🙂"), "long before " * 9, "stop"),  # only the last tokens are read
        ("no stop here", ("STOP",), "no stop here", "eos"),
        ("aSTO", ("STOP",), "aSTO", "eos"),
    ],
)
def test_stop_strings(load_agent, tiny, text, stops, expected, reason):
    answer, _ = say(load_agent, tiny, text, stop_strings=stops)
    assert (answer.text, answer.finish_reason) == (expected, reason)


def test_a_stop_string_of_one_sample_leaves_the_others_alone(load_agent, tiny):
    agent = sharpen(load_agent(tiny), 3.0)
    requests = [Request(prompt, [1, 2]) for prompt in PROMPTS]
    free = generate(agent, requests, Sampling(max_new_tokens=16))
    stop = next(c.text[5] for group in free for c in group if c.text[5:6].isalnum())
    stopped = generate(agent, requests, Sampling(max_new_tokens=16, stop_strings=(stop,)))
    reasons = set()
    for a, b in zip((c for group in free for c in group), (c for group in stopped for c in group)):
        assert a.token_ids[: len(b.token_ids)] == b.token_ids
        assert b.text == a.text.split(stop)[0]
        assert (b.finish_reason == "stop") == (stop in a.text)
        reasons.add(b.finish_reason)
    assert "stop" in reasons
    assert len(reasons) > 1


# --- precision and failures ---


def test_in_fp32_the_trained_model_itself_samples(load_agent, tiny):
    agent = load_agent(tiny)
    assert agent.sampler is agent.model


def test_the_bf16_sampling_copy_follows_the_weights(load_agent, tiny):
    agent = sharpen(load_agent(tiny, compute_dtype=torch.bfloat16))
    request = [Request(PROMPTS[0], [None, 1, 2])]
    before = ids_of(generate(agent, request, Sampling(max_new_tokens=8)))
    with torch.no_grad():
        agent.model.model.norm.weight.mul_(-1.0)
    assert ids_of(generate(agent, request, Sampling(max_new_tokens=8))) == before  # not refreshed yet
    agent.weights_changed()
    after = ids_of(generate(agent, request, Sampling(max_new_tokens=8)))
    assert after != before
    for (name, weight), twin in zip(agent.model.named_parameters(), agent.sampler.parameters(), strict=True):
        assert torch.equal(weight.bfloat16(), twin), name
    fresh = Agent(agent.model, agent.tokenizer, "fresh", compute_dtype=torch.bfloat16)
    assert ids_of(generate(fresh, request, Sampling(max_new_tokens=8))) == after


def test_bf16_sampling_stays_close_to_the_learner_far_into_the_context(load_agent, tiny):
    """Rotary frequencies in bf16 would turn far positions by radians."""
    agent = load_agent(tiny, compute_dtype=torch.bfloat16)
    sharpen(agent, 8.0)
    (reference,) = load_references([agent], None).values()
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(256, (1, 1500), generator=generator)
    exact = agent.model(prompt).logits[0, -200:].log_softmax(-1)
    for copy in (agent.sampler, reference):
        rounded = copy(prompt).logits[0, -200:].float().log_softmax(-1)
        gap = (exact - rounded).abs().mean()
        assert gap < 0.03


def test_errors_keep_their_type(load_agent, tiny):
    """An out-of-memory error was re-raised as a ValueError."""
    agent = load_agent(tiny)

    def out_of_memory(module, inputs):
        raise torch.OutOfMemoryError("no memory")

    agent.model.lm_head.register_forward_pre_hook(out_of_memory)
    with pytest.raises(torch.OutOfMemoryError, match=r"^no memory$"):
        generate(agent, [Request(PROMPTS[0], [1])], Sampling(max_new_tokens=2))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_logits_that_are_not_finite_are_loud(load_agent, tiny, value):
    agent = load_agent(tiny)
    with torch.no_grad():
        agent.model.model.norm.weight[0] = value
    for seed in (None, 1):
        with pytest.raises(FloatingPointError, match=r"agent_0: the model's logits are not finite"):
            generate(agent, [Request(PROMPTS[0], [seed])], Sampling(max_new_tokens=2))
