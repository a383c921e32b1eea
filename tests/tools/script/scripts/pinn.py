"""Solve Burgers' equation by a network whose derivatives are held to it, by L-BFGS (a physics-informed network)."""

import argparse
from itertools import pairwise

import torch
import torch.nn as nn

parser = argparse.ArgumentParser()
parser.add_argument("--points", type=int, default=20000)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--layers", type=int, default=6)
parser.add_argument("--history", type=int, default=50)
parser.add_argument("--steps", type=int, default=20, help="of twenty iterations")
args = parser.parse_args()
device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(0)

widths = [2, *[args.width] * args.layers]
hidden = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.Tanh())]
model = nn.Sequential(*hidden, nn.Linear(args.width, 1)).to(device)
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=20, history_size=args.history)
x = (2 * torch.rand(args.points, 1) - 1).to(device).requires_grad_()
t = torch.rand(args.points, 1).to(device).requires_grad_()
begin = torch.linspace(-1, 1, args.points // 10, device=device)[:, None]


def derivative(of, by):
    return torch.autograd.grad(of, by, torch.ones_like(of), create_graph=True)[0]


def closure():
    optimizer.zero_grad()
    u = model(torch.cat([x, t], dim=1))
    u_x = derivative(u, x)
    equation = derivative(u, t) + u * u_x - 0.01 / torch.pi * derivative(u_x, x)
    at_begin = model(torch.cat([begin, torch.zeros_like(begin)], dim=1)) + torch.sin(torch.pi * begin)
    loss = equation.square().mean() + at_begin.square().mean()
    loss.backward()
    return loss


for step in range(args.steps):
    loss = optimizer.step(closure)
    print(f"{step}: loss {loss.item():.5f}")
    if loss < 1e-6:
        break
