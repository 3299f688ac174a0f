"""How fast a script trains, and how that compares.

    python benchmark/speed.py ranks ppo_torch               two ranks against one
    python benchmark/speed.py pair ppo_tf1 ppo_torch        two scripts side by side
    python benchmark/speed.py gpu sac_torch                 --device cuda against the CPU
    python benchmark/speed.py sb3 ppo_torch                 against Stable-Baselines3's PPO
    python benchmark/speed.py sbx sac_torch --batch-size 256    against SBX's (JAX)
    python benchmark/speed.py table                         all rows of benchmark/results/speed.md
    python benchmark/speed.py table "sb3 ppo_torch --pairs 5"   this row of it

A shared machine's speed drifts by the minute, so whatever is compared runs in turn, A B A B ...,
and the ratio of each pair is what counts; rates are in environment steps per second. Peers run as
they come. They are no requirement of the project: `pip install stable-baselines3==2.9.2` (and
`sbx-rl==0.28.0`), in an environment of their own, and point --peer-python to its interpreter.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Literal

import pandas as pd
from pydantic.dataclasses import dataclass
from tyro.conf import Positional

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "benchmark" / "results" / "speed.md"  # its tables are made here, its text is not
sys.path.insert(0, str(ROOT))
from common import UsageError
from common.args import PosInt, parse_args
from common.cpu import name as cpu_name

PEERS = {"sb3": "stable_baselines3", "sbx": "sbx"}

# What a peer runs: the same environment; PPO with its own defaults, off-policy algorithms with our
# networks, our fixed alpha and one update per step, so that both do the same work.
PEER = """
import importlib, json, sys, time, warnings
warnings.filterwarnings("ignore")
module, algo, env_id, steps, warm_up, kwargs, switched_by = sys.argv[1:]
if switched_by:
    sys.path.insert(0, switched_by)
    import torch
    from common.cpu import tune_torch
    tune_torch()
Algo = getattr(importlib.import_module(module), algo.upper())
model = Algo("MlpPolicy", env_id, seed=0, **json.loads(kwargs))
model.learn(int(warm_up))  # first updates, and compilation, are not counted
before, start = model.num_timesteps, time.perf_counter()
model.learn(int(steps), reset_num_timesteps=False)
print("rate", (model.num_timesteps - before) / (time.perf_counter() - start))
"""

OFF_POLICY = {"train_freq": 1, "gradient_steps": 1, "learning_starts": 100}
OFF_POLICY |= {"policy_kwargs": {"net_arch": [256, 256]}}

# Columns of the page. An earlier version of this program measured the last two.
HEADER = ["speed.py", "first", "second", "ratio", "range", "ms/step", "env", "products"]
DIGITS = {"first": 0, "second": 0, "ratio": 2, "ms/step": 3, "env": 3, "products": 3}


@dataclass
class Args:
    what: Positional[Literal["ranks", "pair", "gpu", "sb3", "sbx", "table"]]
    scripts: Positional[tuple[str, ...]] = ()  # one script, by name; two for pair; rows of table
    env_id: str = "HalfCheetah-v4"  # environment
    epochs: PosInt = 6  # epochs of 4000 steps per run; the first one warms up
    pairs: PosInt = 3  # how often the two are run in turn
    batch_size: PosInt = 100  # of off-policy algorithms
    peer_python: str = sys.executable  # interpreter that has the peers installed
    peer_switched: bool = False  # give the peer this project's settings of MKL and glibc
    out: str = str(PAGE)  # of table; its numbers are in a CSV file beside it


def rate(script, args, ranks=1, device=None):
    """A script's environment steps per second, without the first epoch, which may compile."""
    with tempfile.TemporaryDirectory() as data_dir:
        command = [sys.executable, str(ROOT / "algos" / f"{script}.py"), "--env-id", args.env_id]
        command += ["--epochs", str(args.epochs), "--exp-name", "speed", "--data-dir", data_dir]
        command += ["--num-cpu", str(ranks), *(["--device", device] if device else [])]
        if off_policy(script):
            command += ["--start-steps", "1000", "--num-test-episodes", "1"]
            command += ["--batch-size", str(args.batch_size)]
        if subprocess.run(command, stdout=subprocess.DEVNULL).returncode:
            raise UsageError(f"{script}.py failed")  # and has said why
        table = pd.read_csv(Path(data_dir, "speed", "speed_s0", "progress.txt"), sep="\t")
    steps, seconds = (table[key].iloc[-1] - table[key][0] for key in ("TotalEnvInteracts", "Time"))
    return steps / seconds


def off_policy(script):
    return script.split("_")[0] in ("ddpg", "td3", "sac")


def peer_rate(module, script, args):
    """A peer's rate, in a process of its own."""
    algo = script.split("_")[0]
    steps, warm_up, kwargs = "20000", "2048", {}
    if off_policy(script):
        steps, warm_up, kwargs = "3000", "1000", {**OFF_POLICY, "batch_size": args.batch_size}
    kwargs |= {"ent_coef": 0.2} if algo == "sac" else {}
    kwargs |= {"device": "cpu"} if module == "stable_baselines3" else {}
    command = [args.peer_python, "-c", PEER, module, algo, args.env_id, steps, warm_up]
    command += [json.dumps(kwargs), str(ROOT) if args.peer_switched else ""]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        why = (result.stderr.strip().splitlines() or [f"exit code {result.returncode}"])[-1]
        raise UsageError(f"{module} does not run in {args.peer_python}: {why}")
    return float(re.search(r"^rate (.+)$", result.stdout, re.MULTILINE)[1])


def measure(args):
    """Measure what one command line asks for, pair by pair: {column of HEADER: value}."""
    if len(args.scripts) != (2 if args.what == "pair" else 1):
        raise UsageError("pair takes two scripts, all others take one")
    if args.epochs == 1:
        raise UsageError("--epochs must be at least 2: the first one warms up")
    script, other = args.scripts[0], args.scripts[-1]  # the same, but for a pair
    rates = []
    for i in range(args.pairs):
        device = "cuda" if args.what == "gpu" else None
        first = rate(script, args, ranks=2 if args.what == "ranks" else 1, device=device)
        peer = PEERS.get(args.what)
        second = peer_rate(peer, script, args) if peer else rate(other, args)
        rates.append((first, second))
        print(f"  pair {i + 1}: {first:8.0f} {second:8.0f}", flush=True)
    ratios = [a / b for a, b in rates]
    first, second = (median(column) for column in zip(*rates, strict=True))
    row = {"first": first, "second": second, "ratio": median(ratios)}
    return row | {"range": f"{min(ratios):.2f} to {max(ratios):.2f}", "ms/step": 1000 / first}


def shown(row):
    """The row's cells as text."""
    cells = {k: row[k] for k in HEADER if not pd.isna(row.get(k))}
    return {k: f"{v:.{DIGITS[k]}f}" if k in DIGITS else v for k, v in cells.items()}


def page(table):
    """The page with all rows: its text, and one table per CPU."""
    lines = [PAGE.read_text().partition("\n## ")[0]]
    for cpu, rows in table.groupby("cpu"):
        lines += [f"## {cpu}\n", f"| {' | '.join(HEADER)} |", "|---" * len(HEADER) + "|"]
        for cells in map(shown, rows.sort_values("speed.py").to_dict("records")):
            lines.append(f"| {' | '.join(cells.get(key, '') for key in HEADER)} |")
        lines.append("")
    return "\n".join(lines)


def write_table(args, cpu):
    """Measure the rows that were given, or all that there are, and write the page.

    What was measured before, here or on another CPU, stays: it is in a CSV file beside the page.
    """
    numbers = Path(args.out).with_suffix(".csv")
    table = pd.read_csv(numbers) if numbers.exists() else pd.DataFrame(columns=["speed.py", "cpu"])
    for line in args.scripts or sorted(set(table["speed.py"])):
        print(line, flush=True)
        try:
            asked = parse_args(Args, line.split())
            row = measure(replace(asked, peer_python=args.peer_python))
        except SystemExit:  # parse_args has said why
            continue
        except UsageError as e:
            print(e, file=sys.stderr)
            continue
        table = pd.concat([pd.DataFrame([{"speed.py": line, "cpu": cpu, **row}]), table])
        table = table.drop_duplicates(["speed.py", "cpu"])
        table.to_csv(numbers, index=False, float_format="%.5g")
        Path(args.out).write_text(page(table))


def main():
    try:
        args = parse_args(Args)
        cpu = f"{os.cpu_count()} cores of {cpu_name()}"
        print(f"{' '.join(sys.argv[1:])}, on {cpu}", flush=True)
        if args.what == "table":
            write_table(args, cpu)
        else:
            print(*(f"{key}: {x}" for key, x in shown(measure(args)).items()), sep="\n")
    except (UsageError, OSError) as e:
        print(f"speed.py: error: {e}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
