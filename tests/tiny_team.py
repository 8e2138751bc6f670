"""A team small enough to enumerate: two agents of 600 weights, two or three tokens, one task of up to two turns.

The vocabulary is `a` (and `b`) and `<eos>`, which is also the pad token. The first turn's joint answer is
written into the second turn's prompts as a binary number with the digits `a` and `<eos>`, so that every history
has its own prompt.
"""

import functools
import itertools

import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from comlrl.signals import StopSignal
from comlrl.trainers import MAGRPOConfig, MAGRPOTrainer

EOS = "<eos>"


def build_tokenizer(letters):
    core = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(letters)}, merges=[]))
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token=EOS, pad_token=EOS)


def build_model(vocabulary, seed, layers=1, width=8):
    """Large weights make the answers depend on the prompt, and a small head keeps every
    answer likely; with seeds 2 and 9 and width 8 they have probabilities of 0.13 to 0.62."""
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=32,
        tie_word_embeddings=False,
        initializer_range=1.0,
        bos_token_id=None,
        eos_token_id=vocabulary - 1,
        pad_token_id=vocabulary - 1,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        model.lm_head.weight.mul_(0.4)
    return model


class Game:
    """The task: what can be said, the prompts of each history, and the rewards.

    `answers`: token ids of everything an agent can say; `texts`: the same, decoded. A history is None (first
    turn) or the pair of answer numbers of the first turn. `rewards[history][pair of answer numbers]`.
    """

    def __init__(self, letters, max_new_tokens, first_reward, second_reward):
        self.letters, self.max_new_tokens = letters, max_new_tokens
        self.vocabulary = len(letters) + 1
        eos = len(letters)
        self.answers = [
            ids
            for length in range(1, max_new_tokens + 1)
            for ids in itertools.product(range(self.vocabulary), repeat=length)
            if eos not in ids[:-1] and (length == max_new_tokens or ids[-1] == eos)
        ]
        self.texts = ["".join(letters[i] for i in ids if i != eos) for ids in self.answers]
        assert len(set(self.texts)) == len(self.texts)
        self.joints = list(itertools.product(range(len(self.answers)), repeat=2))
        self.rewards = {None: {now: first_reward(*now) for now in self.joints}}
        for past in self.joints:
            self.rewards[past] = {now: second_reward(past, now) for now in self.joints}
        self.history_of = {self.prompt(past, 0): past for past in self.rewards}

    def prompt(self, history, agent):
        if history is None:
            return self.letters[-1] * (1 + agent)
        number, width = self.joints.index(history), (len(self.joints) - 1).bit_length()
        return "a" * (1 + agent) + "".join(EOS if digit == "1" else "a" for digit in f"{number:0{width}b}")

    def formatter(self, agent):
        return lambda row, external_prompts=None: external_prompts or self.prompt(None, agent)

    def reward(self, prompts, first, second):
        table = self.rewards[self.history_of[prompts[0]]]
        return [table[self.texts.index(x), self.texts.index(y)] for x, y in zip(first, second)]

    def transition(self, agent_completions):
        history = tuple(self.texts.index(text) for text in agent_completions)
        return [self.prompt(history, agent) for agent in range(2)]

    def trainer(self, kind=MAGRPOTrainer, turns=2, **settings):
        trainer = kind(
            agents=[build_model(self.vocabulary, seed) for seed in (2, 9)],
            tokenizer=build_tokenizer(self.letters),
            reward_func=self.reward,
            formatters=[self.formatter(agent) for agent in range(2)],
            external_transition=self.transition if turns > 1 else None,
            args=MAGRPOConfig(
                num_turns=turns,
                max_new_tokens=self.max_new_tokens,
                dtype="float32",
                generation_batch_rows=10**6,
                rollout_buffer_size=10**6,
                micro_batch_tokens=10**5,
                **settings,
            ),
        )
        for agent in trainer.agents:  # the few prompts are encoded once: it would take half the time
            agent.encode = functools.cache(agent.encode)
        return trainer


class GradientTrainer(MAGRPOTrainer):
    """Keeps each minibatch's gradients, one flat tensor an agent, where the real one takes a step."""

    gradients_seen: list

    def gradient_of(self, roots):
        """The gradients of all minibatches of a buffer of trees: [minibatch][agent]."""
        self.buffer, self.gradients_seen = list(roots), []
        self.prepare(StopSignal())
        while self.chunks:
            self.take_step(StopSignal())
        return self.gradients_seen

    def apply(self, metrics, norms, useful, problem):
        assert not problem
        self.gradients_seen.append([flat_gradient(agent.model) for agent in self.agents])
        for engine in self.engines.values():
            engine.clear()

    def record_completions(self, roots):
        """Nothing is written."""


def flat_gradient(model):
    """Zeros where nothing came through; float64."""
    parts = [p.grad if p.grad is not None else torch.zeros_like(p) for p in model.parameters()]
    return torch.cat([part.flatten() for part in parts]).double()
