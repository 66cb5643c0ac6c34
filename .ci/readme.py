"""Run what the README shows, so that it cannot go stale.

    python .ci/readme.py README.md [--elsewhere "make test" ...]

- A ```bash block is run as a script in the repository's root. Anything after the word, as in
  ```bash no-run, takes a block out; so does another language (```text).
- A ```python block that starts with `# run: N ranks` is run by torchrun on N CPU ranks.
- A line given by --elsewhere is left out of the bash blocks: CI runs that command itself.

Exits with 1 at the first block that fails, or if nothing at all was run.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
FENCE = re.compile(
    r"^(?P<ticks>`{3,})(?P<info>[^`\n]*)\n(?P<body>.*?)^(?P=ticks)`*[ \t]*$", re.M | re.S
)
RANKS = re.compile(r"# run: (\d+) ranks?\b")


class Block(NamedTuple):
    line: int
    info: str
    body: str


def blocks(text: str) -> Iterator[Block]:
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        yield Block(line, match["info"].strip(), match["body"])


def command(block: Block, elsewhere: set[str], folder: Path) -> list[str] | None:
    """The command that runs a block; None for one that is only to be read."""
    if block.info == "bash":
        lines = [line for line in block.body.splitlines() if uncommented(line) not in elsewhere]
        if not any(uncommented(line) for line in lines):
            return None
        return ["bash", "-euo", "pipefail", "-c", "\n".join(lines)]
    ranks = RANKS.match(block.body)
    if block.info == "python" and ranks:
        script = folder / f"readme_line_{block.line}.py"
        script.write_text(block.body)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return [*torchrun, f"--nproc-per-node={ranks[1]}", str(script)]
    return None


def uncommented(line: str) -> str:
    return re.sub(r"(^|\s)#.*", "", line).strip()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("document", type=Path)
    parser.add_argument("--elsewhere", action="append", default=[])
    args = parser.parse_args()

    # CPU ranks everywhere, one thread each: the blocks must give the same on every machine.
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    ran = 0
    with tempfile.TemporaryDirectory() as folder:
        for block in blocks(args.document.read_text()):
            where = f"{args.document}:{block.line} ({block.info or 'no language'})"
            run = command(block, set(args.elsewhere), Path(folder))
            if run is None:
                print(f"--- {where}: not run", flush=True)
                continue
            print(f"--- {where}", flush=True)
            started = time.monotonic()
            code = subprocess.run(run, cwd=ROOT, env=env, stdin=subprocess.DEVNULL).returncode
            print(f"--- {where}: {time.monotonic() - started:.0f} s, exit {code}", flush=True)
            if code:
                raise SystemExit(f"{where} failed")
            ran += 1
    if not ran:
        raise SystemExit(f"{args.document}: no block was run")


if __name__ == "__main__":
    main()
