"""Published names that users import from here; the code is elsewhere."""

from comlrl.value_head import ActorCriticOutput, CausalLMWithValueHead, ValueHead

__all__ = ["ActorCriticOutput", "CausalLMWithValueHead", "ValueHead"]
