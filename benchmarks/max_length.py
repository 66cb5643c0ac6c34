"""The longest sequence that trains on 8 x A100-80GB, by the planner, for the paper's four models.

    python benchmarks/max_length.py [--models NAME ...] [--rows TEXT ...] [--quick] [--again]

Every row: FSDP2 on blocks and root over all GPUs, parameters and AdamW in fp32, compute in bf16,
one row of tokens (of each sp group; FSDP2 alone has one on each GPU). The step runs on tensors
without data in a fake group; 95% of the memory may be used. Rows "compiled" are partitioned by
AOTAutograd's min-cut (benchmarks/baselines/compiled.py). Results are kept in
benchmarks/max_length.json by model, row and versions, so that an interrupted run goes on; --again
measures anew. --quick: models of 4 layers, not kept. Prints a Markdown table for each model.
"""

from __future__ import annotations

import argparse
import json
import logging
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from baselines import BASELINES

from autosp_dtensor.cost import DEVICES
from autosp_dtensor.plan.configs import model_maker, presets
from autosp_dtensor.plan.measure import Setting, Step, fake_group
from autosp_dtensor.plan.search import find

GPUS, GPU = 8, "a100-80gb"
HOST = int(1.2 * 2**40)  # bytes of host memory of the machine
MODELS = ("llama-3.2-1b", "llama-3.2-3b", "llama-3.1-8b", "llama-2-13b")
KEPT = Path(__file__).with_suffix(".json")

# A row is one line: what differs from the setting that all have.
ROWS: dict[str, dict[str, Any]] = {
    **{
        name: {"scheme": each, "dp": 1 if each.splits else GPUS, "sp": GPUS if each.splits else 1}
        for name, each in BASELINES.items()
    },
    "autosp, sequence parallelism only": {"checkpoint": "none", "tile": "none"},
    'autosp + SAC ("sequence")': {"checkpoint": "sequence", "tile": "none"},
    'autosp + SAC ("auto")': {"checkpoint": "auto", "tile": "none"},
    'autosp + SAC ("sequence") + tiles': {"checkpoint": "sequence"},
    'autosp + SAC ("auto") + tiles': {"checkpoint": "auto"},
    'autosp + SAC ("auto") + tiles + offload': {"checkpoint": "auto", "host": HOST // GPUS},
}
TO = ("FSDP2", "Ulysses by hand, compiled")  # ratios


def versions() -> dict[str, str]:
    """What a result depends on, apart from the row."""
    here = Path(__file__).parent.parent

    def commit(path: str) -> str:
        command = ["git", "-C", str(here), "log", "-1", "--format=%h", "--", path]
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()

    return {
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "autosp": commit("autosp_dtensor"),
        "plan": commit("autosp_dtensor/plan"),
    }


def search(model: str, row: dict[str, Any], quick: bool, near: int = 0) -> Step:
    config = {**presets()[model], **({"num_hidden_layers": 4} if quick else {})}
    capacity = int(DEVICES[GPU].size * 0.95)
    general = {"dp": 1, "sp": GPUS, "budget": capacity, "device": DEVICES[GPU]}
    setting = Setting(model_maker(config)[1], **{**general, **row})

    def tell(step: Step, layers: int) -> None:
        of = f"{layers} layers" if layers else "whole"
        peak = f"{step.peak / 2**30:.1f} GiB"
        sys.stderr.write(f"    {step.length:>9,} tokens, {of}: {peak}, {step.seconds:.0f} s\n")

    def shallow(layers: int) -> Any:
        return model_maker({**config, "num_hidden_layers": layers})[1]

    with fake_group(GPUS):
        return find(setting, capacity, tell, shallow, config["num_hidden_layers"], near)


def is_fresh(known: Any, row: dict[str, Any], now: dict[str, str]) -> bool:
    """Whether a kept result is that of the code as it is. Of the package, baselines run only the
    planner."""
    if known is None:
        return False
    names = [name for name in now if name != "autosp" or "scheme" not in row]
    return all(known["versions"].get(name) == now[name] for name in names)


def kept_results() -> dict[str, Any]:
    return json.loads(KEPT.read_text()) if KEPT.exists() else {}


def table(model: str, found: dict[str, Any]) -> str:
    lines = [
        f"### {model}",
        "",
        "| | tokens | x FSDP2 | x compiled Ulysses | peak, GiB: what stands there |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for row in ROWS:
        if row not in found:
            continue
        each = found[row]
        ratios = [f"{each['length'] / found[to]['length']:.2f}" if to in found else "" for to in TO]
        kinds = sorted(each["kinds"].items(), key=lambda pair: -pair[1])
        parts = ", ".join(f"{k} {v / 2**30:.1f}" for k, v in kinds if v >= 2**30 // 2)
        said = f"{each['length']:,}" if each["fits"] else f"less than {each['length']:,}"
        lines.append(
            f"| {row} | {said} | {' | '.join(ratios)} | {each['peak'] / 2**30:.1f}: {parts} |"
        )
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(presets()))
    parser.add_argument("--rows", nargs="+", default=[""], help="rows whose name has one of these")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--again", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("autosp_dtensor").setLevel(logging.ERROR)
    ran_with = versions()
    for model in options.models:
        results = {} if options.quick else kept_results().get(model, {})
        for name, row in ROWS.items():
            known = results.get(name)
            fresh = is_fresh(known, row, ran_with)
            if (fresh and not options.again) or not any(text in name for text in options.rows):
                continue
            sys.stderr.write(f"{model}, {name}\n")
            started = time.perf_counter()
            step = search(model, row, options.quick, known["length"] if known else 0)
            found = {
                "length": step.length,
                "fits": step.peak <= DEVICES[GPU].size * 0.95,
                "peak": step.peak,
                "kinds": step.kinds,
                "note": step.note,
                "seconds": round(time.perf_counter() - started),
                "versions": ran_with,
            }
            results[name] = found
            if not options.quick:
                everything = kept_results()
                everything.setdefault(model, {})[name] = found
                KEPT.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
        print(table(model, results), flush=True)


if __name__ == "__main__":
    main()
