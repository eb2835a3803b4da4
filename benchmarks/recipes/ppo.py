"""Reinforcement learning in the manner of CleanRL's PPO: rollouts of environments, and passes over each."""

import torch
from torch import nn
from torch.distributions import Categorical

envs, steps, iterations, passes, minibatch = 8, 16, 4, 2, 32
rate, gamma, lam, clip = 3e-3, 0.99, 0.95, 0.2
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
torch.manual_seed(1)


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 1))
        self.actor = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))

    def forward(self, state, action=None):
        choice = Categorical(logits=self.actor(state))
        action = choice.sample() if action is None else action
        return action, choice.log_prob(action), choice.entropy(), self.critic(state).squeeze(-1)


def move(state, action):
    """A cart that is to stay near the middle."""
    speed = state[:, 1] + 0.1 * (2 * action - 1)
    place = (state[:, 0] + 0.1 * speed).clamp(-1, 1)
    return torch.stack([place, speed * (place.abs() < 1)], dim=1), 1.0 - place.abs()


agent = Agent().to(device)
optimizer = torch.optim.Adam(agent.parameters(), lr=rate, eps=1e-5)
state = torch.zeros(envs, 2, device=device)
seen, values = torch.zeros(steps, envs, 2, device=device), torch.zeros(steps + 1, envs, device=device)
actions, logs, rewards = (torch.zeros(steps, envs, device=device) for _ in range(3))

for iteration in range(iterations):
    optimizer.param_groups[0]["lr"] = rate * (1 - iteration / iterations)
    with torch.no_grad():
        for t in range(steps):
            seen[t] = state
            actions[t], logs[t], _, values[t] = agent(state)
            state, rewards[t] = move(state, actions[t])
        values[steps] = agent(state)[3]
    advantages, last = torch.zeros_like(rewards), 0.0
    for t in reversed(range(steps)):
        last = rewards[t] + gamma * values[t + 1] - values[t] + gamma * lam * last
        advantages[t] = last
    returns = advantages + values[:steps]

    for _ in range(passes):
        for chosen in torch.randperm(envs * steps).split(minibatch):
            was, gain = logs.flatten()[chosen], advantages.flatten()[chosen]
            _, log, entropy, value = agent(seen.flatten(0, 1)[chosen], actions.flatten()[chosen])
            ratio = (log - was).exp()
            gain = (gain - gain.mean()) / (gain.std() + 1e-8)
            policy_loss = torch.max(-gain * ratio, -gain * ratio.clamp(1 - clip, 1 + clip)).mean()
            value_loss = 0.5 * (value - returns.flatten()[chosen]).square().mean()
            loss = policy_loss + 0.5 * value_loss - 0.01 * entropy.mean()
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
    print(f"iteration {iteration}: reward {rewards.mean():.3f}", flush=True)
