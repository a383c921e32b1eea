"""Train a policy by PPO on many copies of a small environment, in one file."""

import argparse

import numpy as np
import torch
import torch.nn as nn
from torch.distributions import Categorical

parser = argparse.ArgumentParser()
parser.add_argument("--environments", type=int, default=256)
parser.add_argument("--steps", type=int, default=128, help="of each environment between updates")
parser.add_argument("--minibatches", type=int, default=4)
parser.add_argument("--epochs", type=int, default=4, help="over the steps of an update")
parser.add_argument("--updates", type=int, default=10)
parser.add_argument("--hidden", type=int, default=512)
parser.add_argument("--seed", type=int, default=1)
args = parser.parse_args()
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Poles:
    """Sticks that fall over; an action pushes each one left, right or not at all."""

    size, actions = 4, 3

    def __init__(self, count):
        self.random = np.random.default_rng(args.seed)
        self.state = self.random.normal(size=(count, self.size)).astype(np.float32)

    def step(self, action):
        self.state += 0.02 * np.roll(self.state, 1, axis=1)
        self.state[:, 0] += 0.1 * (action - 1)
        fallen = (np.abs(self.state[:, 0]) > 3) | (self.random.random(len(action)) < 0.01)
        self.state[fallen] = self.random.normal(size=(fallen.sum(), self.size))
        return self.state.copy(), 1.0 - np.abs(self.state[:, 0]), fallen


class Agent(nn.Module):
    def __init__(self):
        super().__init__()
        self.critic = self.network(1, 1.0)
        self.actor = self.network(Poles.actions, 0.01)

    def network(self, outputs, gain):
        layers = [nn.Linear(Poles.size, args.hidden), nn.Linear(args.hidden, args.hidden)]
        head = nn.Linear(args.hidden, outputs)
        for layer, its_gain in ((layers[0], 2**0.5), (layers[1], 2**0.5), (head, gain)):
            nn.init.orthogonal_(layer.weight, its_gain)
            nn.init.zeros_(layer.bias)
        return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), head)

    def act(self, x, action=None):
        policy = Categorical(logits=self.actor(x))
        action = policy.sample() if action is None else action
        return action, policy.log_prob(action), policy.entropy(), self.critic(x).flatten()


torch.manual_seed(args.seed)
agent = Agent().to(device)
optimizer = torch.optim.Adam(agent.parameters(), lr=2.5e-4, eps=1e-5)
environment = Poles(args.environments)
shape = (args.steps, args.environments)
states = torch.zeros(*shape, Poles.size, device=device)
actions, log_probs, rewards, ends, values = (torch.zeros(shape, device=device) for _ in range(5))
state = torch.tensor(environment.state, device=device)

for update in range(args.updates):
    optimizer.param_groups[0]["lr"] = 2.5e-4 * (1 - update / args.updates)
    for step in range(args.steps):
        states[step] = state
        with torch.no_grad():
            actions[step], log_probs[step], _, values[step] = agent.act(state)
        found, reward, ended = environment.step(actions[step].cpu().numpy())
        state, ends[step] = torch.tensor(found).to(device), torch.tensor(ended).to(device)
        rewards[step] = torch.tensor(reward).to(device)

    with torch.no_grad():
        following, advantages, last = agent.act(state)[3], torch.zeros_like(rewards), 0
        for step in reversed(range(args.steps)):
            goes_on = 1 - ends[step]
            error = rewards[step] + 0.99 * following * goes_on - values[step]
            advantages[step] = last = error + 0.99 * 0.95 * goes_on * last
            following = values[step]
        returns = advantages + values

    flat = [each.flatten(0, 1) for each in (states, actions, log_probs, advantages, returns, values)]
    clipped, order = [], np.arange(shape[0] * shape[1])
    for _ in range(args.epochs):
        np.random.shuffle(order)
        for chosen in np.array_split(order, args.minibatches):
            x, action, old, advantage, wanted, before = (each[chosen] for each in flat)
            _, new, entropy, value = agent.act(x, action.long())
            ratio = (new - old).exp()
            with torch.no_grad():
                divergence = (ratio - 1 - (new - old)).mean()
                clipped.append(((ratio - 1).abs() > 0.2).float().mean().item())
            advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
            of_policy = torch.max(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2)).mean()
            near = before + (value - before).clamp(-0.2, 0.2)
            of_value = torch.max((value - wanted) ** 2, (near - wanted) ** 2).mean() / 2
            loss = of_policy - 0.01 * entropy.mean() + 0.5 * of_value
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(agent.parameters(), 0.5)
            optimizer.step()
        if divergence > 2:
            break
    explained = 1 - np.var((returns - values).cpu().numpy()) / np.var(returns.cpu().numpy())
    print(f"{update}: loss {loss.item():.3f}, clipped {np.mean(clipped):.2f}, variance explained {explained:.2f}")
