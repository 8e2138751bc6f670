"""What saving, resuming and export have to know of a model that a run trains."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from comlrl.agents import Agent
from comlrl.engine import Engine


@dataclass
class TrainedModel:
    """An agent, a critic, or another model with an optimizer of its own.

    agent: the model, with its name (its folder in a checkpoint) and tokenizer. source: the name it was loaded from;
    None: it was given as an object. shapes: of all its weights. engine: None where this process does no work of it.
    place: its folder in what `save_model` and export write; "": its name.
    """

    agent: Agent
    source: str | None
    shapes: Mapping[str, torch.Size]
    engine: Engine | None
    place: str = ""

    @property
    def name(self) -> str:
        return self.agent.name

    @property
    def folder(self) -> str:
        return self.place or self.name
