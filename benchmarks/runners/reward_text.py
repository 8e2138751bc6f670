"""What the runners of several turns tell the agents between turns; in the published signature."""


def feedback(prompt, agent_completions, num_agents, prompt_history_per_agent=None, response_history_per_agent=None):
    lengths = ", ".join(str(len(text)) for text in agent_completions)
    return [f"{prompt}\nLengths so far: {lengths}. Try again:" for _ in range(num_agents)]
