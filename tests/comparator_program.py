"""What test_api_comparator.py and test_comparators.py start in several processes: `program.py mode folder [url]`."""

import json
import sys
from pathlib import Path

import torch
from api_server import KEY
from safetensors.torch import save_file
from tiny_team import build_model, build_tokenizer

from comlrl.agents import Agent
from comlrl.api_comparator import ApiComparator, ApiRollouts, ApiSettings
from comlrl.comparators import CopyComparator, comparator_placement
from comlrl.generation import Sampling
from comlrl.optimizers import OptimizerSettings
from comlrl.placement import Placement
from comlrl.processes import World, run_script
from comlrl.rewards import Rewards
from comlrl.rollouts import Rollouts, Team, TreeShape
from comlrl.zero import ZeroEngine, read_config

ROWS = [(n, {"prompt": text}) for n, text in enumerate(("ab", "ba", "bb", "aa", "b"))]
SHAPE = TreeShape(num_generations=3)
SAMPLING = Sampling(max_new_tokens=4)
judged: list[tuple[str, str]] = []  # the joint answers that this process scored


def score(first, second):
    judged.extend(zip(first, second))
    return [float(x.count("a") - y.count("a")) for x, y in zip(first, second)]


def report(mode, folder, url=""):
    """What this process saw: of all answers, and of its own share."""
    judged.clear()
    world = World(deepspeed=mode == "zero3")
    spec = {"agents": [[0], [1]], "comparators": [[1], [0]]} if mode == "own groups" else None
    placement = Placement(world, spec, {"agents": 2})
    homes = placement.of("agents")
    agents = [Agent(build_model(3, seed), build_tokenizer(("a", "b")), f"agent_{i}") for i, seed in enumerate((2, 9))]

    def rollouts(kind, team, where):
        formatters = [lambda row: row["prompt"]] * 2
        return kind(team, Rewards([score], 2), formatters, None, Team(2), prompt_limits=[20] * 2, placement=where)

    if mode == "api":
        settings = ApiSettings(url=url, form="openai", model="big", key_env="K", retries=0, timeout=20)
        comparator = ApiComparator(lambda team: rollouts(ApiRollouts, team, placement), agents, settings, KEY)
        comparator.cache_path = folder / "cache.jsonl"
    else:
        files = [folder / f"{agent.name}.safetensors" for agent in agents]
        for agent, group, file in zip(agents, homes, files):
            if group.leader:
                save_file({name: t.detach().clone() for name, t in agent.model.state_dict().items()}, file)
            if not group.member:
                agent.unload()
        world.exchange(None)
        engines = []
        if mode == "zero3":
            config = read_config({"zero_optimization": {"stage": 3}})
            for agent, group in zip(agents, homes):
                agent.make_sampler()
                engines.append(ZeroEngine(agent.trained, OptimizerSettings(1e-3), None, group, config))
            assert all(parameter.numel() == 0 for parameter in agents[0].model.parameters())  # divided
        where = comparator_placement(world, spec, [group.ranks for group in homes])
        groups = where.of("agents")
        history = (lambda iteration: files) if mode == "own groups" else None
        places = [torch.device("cpu")] * 2
        comparator = CopyComparator(
            lambda team: rollouts(Rollouts, team, where), agents, places, history, groups=groups
        )
    comparator.open(0)
    roots, _ = comparator.expand(ROWS, SHAPE, SAMPLING, (0, "comparator", 0))
    seen = {
        "texts": [[[c.text for c in said] for said in root.completions] for root in roots],
        "rewards": [root.rewards for root in roots],
        "judged": list(judged),
        "loads": comparator.loads,
        "incidents": comparator.incidents,
        "counters": comparator.api.counters if isinstance(comparator, ApiComparator) else {},
    }
    if mode != "api":
        again, _ = rollouts(Rollouts, agents, placement).expand(ROWS, SHAPE, SAMPLING, (0, "comparator", 0))
        seen["policy"] = [root.rewards for root in again]
    world.exchange(None)
    return world.rank, seen


def main():
    rank, seen = report(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
    Path(sys.argv[2], f"report_{rank}.json").write_text(json.dumps(seen))


if __name__ == "__main__":
    run_script(main)
