"""How fast a script trains, and against whom.

    python benchmark/speed.py profile ppo_torch            where the wall time of one run goes
    python benchmark/speed.py ranks ppo_torch              two ranks against one
    python benchmark/speed.py pair ppo_tf1 ppo_torch       two scripts side by side
    python benchmark/speed.py sb3 ppo_torch                against Stable-Baselines3's PPO, SAC, ...
    python benchmark/speed.py compile ppo_torch --epochs 50    a default run from a cold cache

A shared machine's speed drifts by the minute, so whatever is compared runs in turn, A B A B ...,
and the ratio of each pair is what counts; rates are in environment steps per second. Peers are no
requirement of the project: `pip install stable-baselines3==2.9.2` (and `sbx-rl==0.28.0`) first, or
point --peer-python to an interpreter that has them.
"""

import contextlib
import io
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Literal

import gymnasium as gym
import pandas as pd
import tyro

ROOT = Path(__file__).resolve().parents[1]
PATH = os.pathsep.join([os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)])

# What a peer runs: the same environment; PPO with its own defaults, off-policy algorithms with our
# networks, our fixed alpha and one update per step, so that both do the same work.
PEER = """
import sys, time, warnings
warnings.filterwarnings("ignore")
module, algo, env_id, steps, batch_size = sys.argv[1:]
import importlib
Algo = getattr(importlib.import_module(module), algo.upper())
off_policy = algo in ("ddpg", "td3", "sac")
kwargs = {}
if off_policy:
    kwargs |= dict(train_freq=1, gradient_steps=1, learning_starts=100, batch_size=int(batch_size))
    kwargs |= dict(policy_kwargs=dict(net_arch=[256, 256]))
if algo == "sac":
    kwargs |= dict(ent_coef=0.2)
if module == "stable_baselines3":
    kwargs["device"] = "cpu"
model = Algo("MlpPolicy", env_id, seed=0, **kwargs)
model.learn(1000 if off_policy else 2048)  # first updates, and compilation, are not counted
before, start = model.num_timesteps, time.perf_counter()
model.learn(int(steps), reset_num_timesteps=False)
print("rate", (model.num_timesteps - before) / (time.perf_counter() - start))
"""


@dataclass
class Args:
    what: tyro.conf.Positional[Literal["profile", "ranks", "pair", "sb3", "sbx", "compile"]]
    scripts: tyro.conf.Positional[tuple[str, ...]]  # one script, by name; two for pair
    env_id: str = "HalfCheetah-v4"  # environment
    epochs: int = 6  # epochs of 4000 steps per run; the first one warms up
    pairs: int = 3  # how often the two are run in turn
    batch_size: int = 100  # of off-policy algorithms
    peer_python: str = sys.executable  # interpreter that has the peers installed


def train(script, args, ranks=1, flags=(), data_dir=None, epochs=None):
    """Run a script and return its progress table and its wall time in seconds."""
    with tempfile.TemporaryDirectory() as temporary:
        command = ["mpirun", "-np", str(ranks)] if ranks > 1 else []
        command += [sys.executable, str(ROOT / "algos" / f"{script}.py"), "--env-id", args.env_id]
        command += ["--epochs", str(epochs or args.epochs), "--exp-name", "speed"]
        command += ["--data-dir", data_dir or temporary, *flags]
        if off_policy(script):
            command += ["--start-steps", "1000", "--num-test-episodes", "1"]
            command += ["--batch-size", str(args.batch_size)]
        start = time.perf_counter()
        env = {**os.environ, "PATH": PATH}
        subprocess.run(command, check=True, env=env, stdout=subprocess.DEVNULL)
        wall = time.perf_counter() - start
        table = Path(data_dir or temporary, "speed", "speed_s0", "progress.txt")
        return pd.read_csv(table, sep="\t"), wall


def off_policy(script):
    return script.split("_")[0] in ("ddpg", "td3", "sac")


def rate(table):
    """Environment steps per second after the first epoch, which includes compilation."""
    first, last = table.iloc[0], table.iloc[-1]
    return (last.TotalEnvInteracts - first.TotalEnvInteracts) / (last.Time - first.Time)


def in_turn(names, runs, pairs):
    """Run two things in turn and print their rates and the ratio of each pair."""
    rates = []
    for i in range(pairs):
        rates.append([run() for run in runs])
        a, b = rates[-1]
        print(f"  pair {i + 1}: {a:8.0f} {b:8.0f}   ratio {a / b:.2f}", flush=True)
    ratios = [a / b for a, b in rates]
    spread = f"{min(ratios):.2f} to {max(ratios):.2f}"
    print(f"{names[0]} / {names[1]}: median {median(ratios):.2f}, {spread}")
    return [median(column) for column in zip(*rates, strict=True)]


def matmul_floor(algo, args):
    """Milliseconds that the matrix products of one update take by themselves: no loop is faster.

    Of one update per environment step, with 256x256 networks; TD3's policy counts every other step.
    """
    import torch

    with warnings.catch_warnings(action="ignore"):  # that there is a newer version
        env = gym.make(args.env_id)
    o, a, B = env.observation_space.shape[0], env.action_space.shape[0], args.batch_size
    pi = [(o, 256), (256, 256), (256, 2 * a if algo == "sac" else a)]
    q = [(o + a, 256), (256, 256), (256, 1)] * (1 if algo == "ddpg" else 2)
    first_q = q if algo == "sac" else q[:3]  # whose value the policy climbs

    def products(layers, forward=True, weights=False, inputs=()):
        shapes = [(B, i, o) for i, o in layers] if forward else []
        shapes += [(i, B, o) for i, o in layers] if weights else []
        return shapes + [(B, o, i) for i, o in inputs]

    inner = [layer for layer in q if layer[0] == 256]
    q_step = products(pi) + products(q) + products(q, weights=True, inputs=inner)
    pi_step = products(pi, weights=True, inputs=pi[1:]) + products(first_q, inputs=first_q)

    def milliseconds(shapes):
        pairs = [(torch.randn(m, k), torch.randn(k, n)) for m, k, n in shapes]
        times = []
        for _ in range(50):
            start = time.perf_counter()
            for x, y in pairs:
                x @ y
            times.append(time.perf_counter() - start)
        return 1000 * median(times)

    return milliseconds(q_step) + milliseconds(pi_step) / (2 if algo == "td3" else 1)


def print_floor(names, rates, args):
    """The floor beside what each of them takes for an environment step with its update."""
    floor = matmul_floor(names[0].split("_")[0], args)
    for name, rate in zip(names, rates, strict=True):
        print(f"  {name}: {1000 / rate:.2f} ms a step, {1000 / rate / floor:.2f} times", end=" ")
        print(f"the matrix products of its update alone, {floor:.2f} ms")


def peer_rate(module, script, args):
    """A peer's rate, in a process of its own."""
    algo = script.split("_")[0]
    steps = 3000 if off_policy(script) else 20000
    command = [args.peer_python, "-c", PEER, module, algo, args.env_id, str(steps)]
    command += [str(args.batch_size)]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return float(re.search(r"^rate (.+)$", out, re.MULTILINE)[1])


class Stopwatch:
    """Wall time by part of a program. A part that calls another one is not charged for it."""

    def __init__(self):
        self.spent, self.inner = {}, [0.0]

    def wrap(self, part, function):
        """`function`, its time added to `part`."""

        def call(*args, **kwargs):
            start = time.perf_counter()
            self.inner.append(0.0)
            result = function(*args, **kwargs)
            total = time.perf_counter() - start
            self.spent[part] = self.spent.get(part, 0.0) + total - self.inner.pop()
            self.inner[-1] += total
            return result

        return call


def profile(script, args):
    """Shares of wall time in the parts of a run after its first epoch, measured in this process."""
    sys.path[:0] = [str(ROOT), str(ROOT / "algos")]
    module, watch, marks = import_module(script), Stopwatch(), {}
    make_env, start_run = module.make_env, module.start_run

    def timed_env(*env_args):
        env = make_env(*env_args)
        env.step = watch.wrap("env.step", env.step)
        env.reset = watch.wrap("env.reset", env.reset)
        return env

    def timed_run(*run_args):
        logger = start_run(*run_args)
        progress, log_tabular, close = logger.progress, logger.log_tabular, logger.close

        def timed_progress(steps, epoch):
            if epoch == 1:  # the first epoch warms up
                watch.spent.clear()
                marks["start"] = time.perf_counter()
            yield from progress(steps, epoch)
            marks["steps done"] = time.perf_counter()

        def timed_tabular(key, *columns, **options):
            if key == "Epoch" and not off_policy(script):  # the update is all before the first log
                seconds = time.perf_counter() - marks["steps done"]
                watch.spent["update"] = watch.spent.get("update", 0.0) + seconds
            return log_tabular(key, *columns, **options)

        def timed_close(**options):
            marks["end"] = time.perf_counter()
            return close(**options)

        logger.progress, logger.close = timed_progress, timed_close
        logger.log_tabular = watch.wrap("logging", timed_tabular)
        logger.dump_tabular = watch.wrap("logging", logger.dump_tabular)
        logger.save_state = watch.wrap("saving", logger.save_state)
        return logger

    module.make_env, module.start_run = timed_env, timed_run
    module.get_action = watch.wrap("acting", module.get_action)
    if off_policy(script) and hasattr(module, "mpi_compile"):
        compile_ = module.mpi_compile
        module.mpi_compile = lambda *a, **k: watch.wrap("update", compile_(*a, **k))
    with tempfile.TemporaryDirectory() as data_dir, contextlib.redirect_stdout(io.StringIO()):
        flags = {"env_id": args.env_id, "epochs": args.epochs + 1, "data_dir": data_dir}
        module.train(module.Args(**flags))
    wall = marks["end"] - marks["start"]
    watch.spent["rest of the loop"] = wall - sum(watch.spent.values())
    print(f"{args.epochs} epochs at {args.epochs * 4000 / wall:.0f} environment steps per second")
    for name, seconds in sorted(watch.spent.items(), key=lambda item: -item[1]):
        print(f"  {name:18} {100 * seconds / wall:5.1f} %")
    others = wall - watch.spent["env.step"] - watch.spent.get("update", 0.0)
    print(f"  all but env.step and update {100 * others / wall:.1f} %")


def cold_compile(script, args):
    """Wall time of a whole default run, compiled from an empty cache against eager."""
    for ranks in (1, 4):
        for i in range(args.pairs):
            with tempfile.TemporaryDirectory() as cache:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = cache
                _, compiled = train(script, args, ranks, ["--compile"])
            _, eager = train(script, args, ranks, ["--no-compile"])
            ratio = compiled / eager
            pair = f"compiled {compiled:.0f} s, eager {eager:.0f} s, ratio {ratio:.2f}"
            print(f"  {ranks} ranks, pair {i + 1}: {pair}", flush=True)


if __name__ == "__main__":
    args = tyro.cli(Args, description=__doc__)
    script = args.scripts[0]
    shutil.which("mpirun", path=PATH) or sys.exit("speed.py needs mpirun on PATH")
    batch = f", batch size {args.batch_size}" if off_policy(script) else ""
    print(f"{args.what} {' '.join(args.scripts)}, {args.env_id}{batch}, {os.cpu_count()} cores")
    if args.what == "profile":
        profile(script, args)
    elif args.what == "compile":
        cold_compile(script, args)
    elif args.what == "ranks":
        runs = [lambda n=n: rate(train(script, args, n)[0]) for n in (2, 1)]
        in_turn(["2 ranks", "1 rank"], runs, args.pairs)
    elif args.what == "pair":
        names = args.scripts
        runs = [lambda name=name: rate(train(name, args)[0]) for name in names]
        rates = in_turn(names, runs, args.pairs)
    else:
        module = {"sb3": "stable_baselines3", "sbx": "sbx"}[args.what]
        runs = [lambda: rate(train(script, args)[0]), lambda: peer_rate(module, script, args)]
        names = [script, args.what]
        rates = in_turn(names, runs, args.pairs)
    if args.what in ("pair", "sb3", "sbx") and off_policy(script):
        print_floor(names, rates, args)
