"""Tiny actor-critic teams: the games of `tiny_team` with critics of 600 weights."""

import functools

from tiny_team import Game, build_model, build_tokenizer

from comlrl.trainers import IACConfig, MAACTrainer

GAME = Game("a", 2, lambda x, y: 0.5 * x - y, lambda past, now: past[0] * now[0] - 0.7 * past[1] * now[1] + 0.3)


def play(kind=MAACTrainer, turns=2, game=GAME, critics=None, callback=None, agents=None, **settings):
    """A trainer on a game of `turns` turns; critics default to one tiny model each (none: heads on the agents)."""
    separate = settings.get("use_separate_critic", True)
    if critics is None and separate:
        critics = [build_model(258, 20 + i) for i in range(2 if kind.config_class is IACConfig else 1)]
    config = kind.config_class(
        num_turns=turns,
        **{
            "num_generations": 2,
            "max_new_tokens": game.max_new_tokens,
            "dtype": "float32",
            "rollout_buffer_size": 6,
            "eval_interval": 0,
            "agent_learning_rate": 1e-2,
            "num_train_epochs": 1,
            "checkpoint_interval": None,
            **settings,
        },
    )
    trainer = kind(
        agents=agents or [build_model(game.vocabulary, seed) for seed in (2, 9)],
        tokenizer=build_tokenizer(game.letters),
        critics=critics,
        critic_tokenizer=byte_tokenizer() if critics is not None else None,
        reward_func=game.reward,
        formatters=[game.formatter(agent) for agent in range(2)],
        external_transition=game.transition if turns > 1 else None,
        train_dataset=[{"prompt": "x"}] * 4,
        metrics_callback=callback,
        args=config,
    )
    trainer.verbose = False
    return trainer


@functools.cache
def byte_tokenizer():
    """Reads any text; its ids are no agent's."""
    from transformers import AutoTokenizer

    from comlrl import embedded

    return AutoTokenizer.from_pretrained(embedded.folder("tiny"))
