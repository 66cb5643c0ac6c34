"""Train a small Llama on sequences split over ranks: dp x sp with FSDP2, checkpoint and resume.

    python examples/train_llama.py                               # 4 CPU ranks, dp 2 x sp 2
    torchrun --nproc-per-node 8 examples/train_llama.py --sp 4   # 8 GPUs, dp 2 x sp 4

The model is transformers' own and goes on seeing whole sequences; the lines marked `autosp` are all
that a single-device loop with FSDP2 gains. At the end the run checks itself: its first losses
against one process, and a resumed run against going on.
"""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

import autosp_dtensor as autosp
from text import BOS, EOS, VOCAB_SIZE, read_rows

# A GPU for each rank, or none is used: 4 ranks on a laptop's one GPU are CPU ranks.
GPU = torch.cuda.device_count() >= int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
DEVICE = "cuda" if GPU else "cpu"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A small Llama on split sequences")
    add = parser.add_argument
    add("--steps", type=int, default=30, help="optimizer steps to train")
    add("--seq-len", type=_positive, default=2048, help="tokens in a row")
    add("--batch", type=_positive, default=1, help="rows a data-parallel replica takes per step")
    add("--dp", type=_positive, default=None, help="replicas (default: 2, or what the ranks allow)")
    add("--sp", type=_positive, default=2, help="ranks that share one sequence")
    add("--layers", type=_positive, default=4)
    add("--width", type=_positive, default=128)
    add("--lr", type=float, default=2e-3)
    add("--data", type=Path, default=None, help="a file or folder (default: Python's own library)")
    add("--ckpt", type=Path, default=Path("checkpoints/llama"), help="where state is saved")
    add("--resume", action="store_true", help="start from the state in --ckpt")
    add("--check", type=int, default=4, help="steps repeated in one process; 0: no checks")
    return parser.parse_args()


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def start_ranks(args: argparse.Namespace) -> None:
    """Become torchrun with dp x sp ranks of this same command, where nobody has started ranks."""
    ranks = (args.dp or 2) * args.sp
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # or torchrun says at length that it sets this
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    os.execv(sys.executable, [sys.executable, *torchrun, __file__, *sys.argv[1:]])


def build_model(args: argparse.Namespace, seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=args.width,
        intermediate_size=3 * args.width,
        num_hidden_layers=args.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=args.seq_len,
        bos_token_id=BOS,
        eos_token_id=EOS,
        use_cache=False,
    )
    return LlamaForCausalLM(config).to(DEVICE)


def split(model: LlamaForCausalLM, mesh: DeviceMesh) -> LlamaForCausalLM:
    model = autosp.parallelize(model, mesh)  # autosp
    ranks = autosp.fsdp_mesh(mesh)  # autosp: parameters are sharded over dp and sp together
    for block in model.model.layers:
        fully_shard(block, mesh=ranks)
    return fully_shard(model, mesh=ranks)


class Trainer:
    """A model, its optimizer, and the step they have reached."""

    def __init__(self, model: nn.Module, lr: float) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
        self.step = 0

    def train(self, batches: Sequence[Tensor]) -> Tensor:
        """One optimizer step on the mean loss of these batches."""
        total = torch.zeros((), device=DEVICE)
        for ids in batches:
            loss = self.model(input_ids=ids, labels=ids).loss / len(batches)
            loss.backward()
            total += loss.detach()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        return total

    def save(self, folder: Path) -> None:
        # A run keeps one checkpoint, its last.
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        dcp.save(self._state(), checkpoint_id=folder)

    def load(self, folder: Path) -> None:
        state = self._state()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        self.step = state["step"]

    def _state(self) -> dict:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer, "step": self.step}


class Text:
    """The rows of the text, dealt out step by step, so that a resumed run goes on where it was."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.rows = read_rows(args.data, args.seq_len)
        self.batch = args.batch

    def batches(self, replicas: int, replica: int, first_step: int) -> Iterator[Tensor]:
        """int64[batch, seq_len] for one replica, without end; rows are shuffled anew each epoch."""
        sampler = DistributedSampler(self.rows, replicas, replica, drop_last=True)
        loader = DataLoader(self.rows, self.batch, sampler=sampler, drop_last=True)
        if len(loader) == 0:
            raise SystemExit(f"{len(self.rows)} rows of text are too few for one step")
        epoch, skipped = divmod(first_step, len(loader))
        while True:
            sampler.set_epoch(epoch)
            for index, rows in enumerate(loader):
                if index >= skipped:
                    yield rows.to(DEVICE, torch.int64)
            epoch, skipped = epoch + 1, 0


def run(trainer: Trainer, text: Text, mesh: DeviceMesh, steps: int, title: str) -> list[float]:
    """Train on split sequences; gives the loss of each step, the mean over replicas."""
    replicas, replica = autosp.data_shard(mesh)  # autosp: an sp group reads the same rows
    batches = text.batches(replicas, replica, trainer.step)
    losses = []
    bar = tqdm(range(steps), title, disable=dist.get_rank() != 0, unit="step")
    for _ in bar:
        started = time.perf_counter()
        ids = next(batches)
        loss = trainer.train([ids])
        dist.all_reduce(loss, group=mesh.get_group("dp"))
        losses.append(loss.item() / replicas)
        speed = replicas * ids.numel() / (time.perf_counter() - started)
        bar.set_postfix_str(f"loss {losses[-1]:.4f}, {speed:,.0f} tokens/s", refresh=False)
    return losses


def run_in_one_process(trainer: Trainer, text: Text, replicas: int, steps: int) -> list[float]:
    """The same training on whole sequences, without autosp and without ranks."""
    shards = [text.batches(replicas, replica, 0) for replica in range(replicas)]
    return [trainer.train([next(shard) for shard in shards]).item() for _ in range(steps)]


def same(losses: dict[str, list[float]]) -> bool:
    """Print two named rows of losses, and tell if they differ by no more than rounding."""
    for name, row in losses.items():
        print(f"{name:>20}  " + "  ".join(f"{value:.6f}" for value in row))
    worst = max(abs(a - b) / abs(b) for a, b in zip(*losses.values(), strict=True))
    print(f"{'largest difference':>20}  {worst:.1e} of the loss", flush=True)
    return worst < 1e-4  # not for NaN


def main() -> None:
    args = parse_args()
    if "RANK" not in os.environ:
        start_ranks(args)
    if GPU:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    else:
        torch.set_num_threads(1)  # ranks share the cores of one machine
    dist.init_process_group("nccl" if GPU else "gloo")
    dp = args.dp or dist.get_world_size() // args.sp
    mesh = init_device_mesh(DEVICE, (dp, args.sp), mesh_dim_names=("dp", "sp"))
    rank_zero = dist.get_rank() == 0

    text = Text(args)
    trainer = Trainer(split(build_model(args, seed=0), mesh), args.lr)
    if args.resume:
        trainer.load(args.ckpt)
    first_step = trainer.step
    losses = run(trainer, text, mesh, args.steps, f"dp {dp} x sp {args.sp}")
    trainer.save(args.ckpt)

    passed = True
    if args.check:
        went_on = run(trainer, text, mesh, args.check, "going on")
        fresh = Trainer(split(build_model(args, seed=1), mesh), args.lr)
        fresh.load(args.ckpt)
        resumed = run(fresh, text, mesh, args.check, "resumed")
        if rank_zero:
            passed &= same({"resumed": resumed, "went on": went_on})
    if args.check and first_step == 0 and rank_zero:
        plain = Trainer(build_model(args, seed=0), args.lr)
        first = losses[: args.check]
        alone = run_in_one_process(plain, text, dp, len(first))
        passed &= same({f"dp {dp} x sp {args.sp}": first, "one process": alone})
    dist.barrier()  # ranks wait for rank 0
    dist.destroy_process_group()
    if not passed:
        raise SystemExit("the losses differ")


if __name__ == "__main__":
    main()
