"""Train a transformer on several GPUs: `torchrun --nproc-per-node 8 fsdp.py --mode fsdp2`."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset


class Block(nn.Module):
    def __init__(self, dim, heads, hidden):
        super().__init__()
        self.head_dim = dim // heads
        self.norm1, self.norm2 = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))
        self.w1, self.w3 = nn.Linear(dim, hidden, bias=False), nn.Linear(dim, hidden, bias=False)
        self.w2 = nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (w(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.wo(y)
        h = self.norm2(x)
        return x + self.w2(F.silu(self.w1(h)) * self.w3(h))


class Transformer(nn.Module):
    def __init__(self, vocab, dim, layers, heads, hidden):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Block(dim, heads, hidden) for _ in range(layers))
        self.norm = nn.RMSNorm(dim)
        self.output = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))

    @torch.no_grad()
    def init_weights(self):
        for module in self.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()


def parallel(args, device, world_size):
    sizes = (args.vocab, args.dim, args.layers, args.heads, args.hidden)
    if args.mode == "ddp":
        return DistributedDataParallel(Transformer(*sizes).to(device), device_ids=None if args.cpu else [device.index])
    if args.mode == "fsdp1":
        precision = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        return FullyShardedDataParallel(
            Transformer(*sizes), auto_wrap_policy=ModuleWrapPolicy({Block}), mixed_precision=precision,
            device_id=device, use_orig_params=True,
        )  # fmt: skip
    mesh = init_device_mesh(device.type, (world_size,), mesh_dim_names=(args.mode,))
    if args.mode == "tp":
        model = Transformer(*sizes).to(device)
        along = Shard(1)  # activations between blocks are shared out along the sequence
        plan = {name: ColwiseParallel(input_layouts=along) for name in ("wq", "wk", "wv", "w1", "w3")}
        plan |= {name: RowwiseParallel(output_layouts=along) for name in ("wo", "w2")}
        plan |= {name: SequenceParallel() for name in ("norm1", "norm2")}
        for layer in model.layers:
            parallelize_module(layer, mesh, plan)
        ends = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=along),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(input_layouts=along, output_layouts=Replicate()),
        }
        return parallelize_module(model, mesh, ends)
    with torch.device("meta"):
        model = Transformer(*sizes)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    model.init_weights()
    return model


def main(args):
    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    device = torch.device("cpu") if args.cpu else torch.device(f"cuda:{local_rank}")
    if not args.cpu:
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if args.cpu else "nccl")
    torch.manual_seed(0)
    model = parallel(args, device, world_size)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=3e-4, **({"foreach": False} if args.mode == "tp" else {"fused": True})
    )
    dataset = TensorDataset(torch.randint(0, args.vocab, (args.samples, args.length + 1)))
    shards = {"num_replicas": 1, "rank": 0} if args.mode == "tp" else {}
    sampler = DistributedSampler(dataset, **shards)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, num_workers=2, pin_memory=not args.cpu)
    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        for step, (tokens,) in enumerate(loader):
            tokens = tokens.to(device, non_blocking=True)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            norm = torch.zeros(())
            if args.mode == "fsdp1":
                norm = model.clip_grad_norm_(1.0)
            elif args.mode != "tp":
                norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            norm = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
            average = loss.detach().clone()
            dist.all_reduce(average)
            if rank == 0:
                memory = 0 if args.cpu else torch.cuda.max_memory_allocated() / 2**30
                print(f"step {step}: loss {average.item() / world_size:.4f}, norm {norm.item():.3f}, {memory:.2f} GiB")
    state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        torch.save(state, "fsdp.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--mode", default="fsdp2", choices=["fsdp2", "fsdp1", "ddp", "tp"])
    parser.add_argument("--dim", type=int, default=2048)
    parser.add_argument("--hidden", type=int, default=5632)
    parser.add_argument("--layers", type=int, default=22)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=2)
    parser.add_argument("--samples", type=int, default=256)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--cpu", action="store_true", help="train on the processor, by gloo")
    main(parser.parse_args())
