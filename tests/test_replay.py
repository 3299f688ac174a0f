"""Whole runs of all scripts against reference.py: every seed, action, column and parameter.

The flags make short runs that go through all there is: ends of all kinds, noise, steps in blocks,
delays, early stops, a buffer that wraps. None of an algorithm's has its default value, so that one
which is ignored shows; and what can be switched is tested on and off. Over so few steps rounding
moves nothing by more than 1e-5.
"""

import json
import re
import sys
from contextlib import suppress
from dataclasses import fields, replace
from unittest.mock import Mock

import conftest
import numpy as np
import pandas as pd
import pytest
import recorder
import reference
import torch
from conftest import (
    OFF_POLICY,
    ON_POLICY,
    ROOT,
    SCRIPTS,
    checkpoint,
    contents,
    load_script,
    mpi,
    run_dir,
    saved_model,
    slow,
)

from benchmark.test_policy import load_policy
from common import UsageError, mpi_pytorch

COMMON = {"env_id": "Recorder-v0", "epochs": 3, "seed": 40, "max_ep_len": 7, "gamma": 0.9}
COMMON |= {"save_freq": 1, "snapshots": True, "compile": False}
ON = {"steps_per_epoch": 33, "lam": 0.8, "vf_lr": 3e-3, "pi_lr": 5e-3, "train_v_iters": 7}
ON |= {"train_pi_iters": 25, "target_kl": 0.003, "clip_ratio": 0.05, "delta": 0.1}
ON |= {"damping_coeff": 0.02, "cg_iters": 3, "backtrack_iters": 2, "backtrack_coeff": 0.94}
OFF = {"steps_per_epoch": 33, "start_steps": 20, "update_after": 24, "update_every": 4}
OFF |= {"batch_size": 16, "replay_size": 50, "polyak": 0.8, "num_test_episodes": 3}
OFF |= {"pi_lr": 2e-3, "q_lr": 4e-3, "lr": 3e-3, "act_noise": 0.3, "target_noise": 1.3}
OFF |= {"noise_clip": 0.8, "policy_delay": 3}
ALL = {"norm_obs": True, "norm_rew": True, "minibatch_size": 20, "anneal_lr": True, "alpha": "auto"}
PLAIN = {"norm_obs": False, "norm_rew": False, "minibatch_size": 0, "alpha": 0.3, "algo": "npg"}
# No update in the first epoch; and steps that TRPO's line search would shorten.
PLAIN |= {"anneal_lr": False, "update_after": 40, "delta": 0.4}
# Not seen by test_one_rank: what all scripts leave to common/, and two that other runs here have.
ELSEWHERE = {"datestamp", "num_cpu", "resume", "overwrite", "device", "compile", "algo"}


def arguments(name, data_dir, ranks=1, **more):
    """`Args` of a script, from the flags above that it has. Steps are totals over the ranks."""
    module, family = load_script(name), ON if name in ON_POLICY else OFF
    flags = {**COMMON, **family, **ALL, "data_dir": str(data_dir), "exp_name": name}
    flags |= {"hidden_sizes": (8, 6) if ranks == 1 else (7,)}
    flags |= {"activation": "relu" if (ranks == 1) == (family is ON) else "tanh", **more}
    flags |= {"env_kwargs": {"mean": 2, "discrete": ranks > 1 and family is ON}}
    flags |= {"steps_per_epoch": ranks * family["steps_per_epoch"]}
    names = {field.name for field in fields(module.Args)}
    return module.train, module.Args(**{key: x for key, x in flags.items() if key in names})


def assert_same_events(found, wanted):
    """Resets with their seeds, and steps with their actions."""
    for i, (event, expected) in enumerate(zip(found, wanted, strict=True)):
        close = event == expected
        if event[0] == expected[0] == "step":
            close = np.allclose(event[1], expected[1], rtol=0, atol=1e-4)
        told = [f"a {kind} with {what}" for kind, what in (event, expected)]
        assert close, f"call {i} of the environment is {told[0]}, should be {told[1]}"


def column(name, stats):
    """What a column of the table has to hold."""
    kind = re.match("Average|Std|Max|Min|", name)[0]
    numbers = stats.get(name.removeprefix(kind), [])
    kinds = {"Average": np.mean, "Std": np.std, "Max": np.max, "Min": np.min, "": np.mean}
    return kinds[kind](numbers) if len(numbers) else np.nan


def assert_same_run(directory, wanted, epochs=COMMON["epochs"]):
    """The table, and the policy after each epoch."""
    table = pd.read_csv(directory / "progress.txt", sep="\t").drop(columns="Time")
    assert len(table) == epochs
    for epoch, stats in enumerate(wanted.stats[:epochs]):
        assert {re.sub("^(Average|Std|Max|Min)", "", name) for name in table} >= stats.keys()
        expected = {name: column(name, stats) for name in table}
        assert dict(table.loc[epoch]) == pytest.approx(expected, rel=5e-5, abs=2e-5, nan_ok=True)
        with np.load(directory / f"policy_{epoch + 1}.npz") as policy:
            for i, x in enumerate(wanted.policies[epoch]):
                saved = policy[f"{('weight', 'bias')[i % 2]}_{i // 2}"]
                np.testing.assert_allclose(saved, x, rtol=0, atol=3e-5)


def assert_same_networks(name, args, directory, wanted):
    """tf1_save/ and torch_save/model.pt as the frameworks load them, and test_policy.py's policy
    for NumPy; all for observations that a policy can get, normalized or not."""
    discrete, rng = args.env_kwargs["discrete"], np.random.default_rng(0)
    obs, act = (rng.standard_normal((6, n)).astype(np.float32) for n in (3, 2))
    inputs = {"obs": obs} | ({} if name in ON_POLICY else {"act": act})
    tensors = [torch.as_tensor(x) for x in inputs.values()]
    if name.endswith("tf1"):
        got, again = (saved_model(directory, **inputs) for _ in range(2))
        if "sac" in name:  # a sample
            assert (got["pi"] != again["pi"]).all() and (np.abs(got.pop("pi")) < 1).all()
    else:
        module, space = load_script(name), recorder.Recorder(**args.env_kwargs).action_space
        sizes = args.hidden_sizes, args.activation, rng
        ac = module.actor_critic(3, space if name in ON_POLICY else 2, *sizes)
        path = directory / "torch_save" / "model.pt"
        ac.load_state_dict(torch.load(path, weights_only=True))
        with torch.no_grad():
            if name in ON_POLICY:
                values = ac.pi.net(tensors[0]), ac.v(tensors[0])[:, 0]
            else:
                noise = [torch.zeros(6, 2)] if "sac" in name else []
                pi, q = ac.pi(tensors[0], *noise), ac.q(*tensors)
                values = pi[0] if noise else pi, *([q] if "ddpg" in name else q)
        got = dict(zip(wanted.nets, values, strict=True))
    for key, net in wanted.nets.items():
        x = tensors if key.startswith("q") else tensors[:1]
        expected = net(*(t.double() for t in x)).detach()
        np.testing.assert_allclose(got[key], expected, rtol=0, atol=1e-4)
    get_action = load_policy(directory, deterministic=True)
    for o in obs:
        expected = wanted.act(o) - (-1 if discrete else 0)
        np.testing.assert_allclose(get_action(o), expected, rtol=0, atol=1e-3)


def crash():
    raise ArithmeticError("in the middle of an epoch")


COMPILED = [slow(name, True) for name in OFF_POLICY if name.endswith("torch")]


@pytest.mark.parametrize("name, compiled", [(name, False) for name in SCRIPTS] + COMPILED)
def test_one_rank(name, compiled, tmp_path, monkeypatch):
    """A run is that of the reference, also if it crashes in its second epoch and is resumed."""
    train, args = arguments(name, tmp_path, compile=True)
    unseen = {flag for flag, x in vars(args).items() if x == getattr(type(args)(), flag)}
    assert unseen <= ELSEWHERE, "if the script ignored these flags, nobody would see it"
    if not compiled:
        monkeypatch.setattr(mpi_pytorch, "compile", compile := Mock(wraps=lambda update, _: update))
    wanted, directory = reference.run(name.split("_")[0], args, 1), run_dir(tmp_path, name, 40)
    middle = (wanted.marks[0] + wanted.marks[1]) // 2
    monkeypatch.setitem(recorder.at_event, middle, crash)
    recorder.events.clear()
    with pytest.raises(ArithmeticError):
        train(args)
    assert_same_run(directory, wanted, 1)
    assert_same_events(recorder.events, wanted.events[0][:middle])
    recorder.at_event.clear()
    recorder.events.clear()
    with pytest.raises(UsageError, match="env_kwargs was"):
        train(replace(args, resume=True, env_kwargs=args.env_kwargs | {"mean": 3}))
    assert train(replace(args, resume=True))
    assert compiled or compile.called == (name in OFF_POLICY and name.endswith("torch"))
    assert_same_events(recorder.events, wanted.events[0][wanted.marks[0] :])
    assert_same_run(directory, wanted)
    assert_same_networks(name, args, directory, wanted)

    # Finished runs leave no replay buffer; to resume one changes nothing.
    assert not [key for key in checkpoint(directory) if key.startswith("buffer")]
    before = contents(directory)
    assert train(replace(args, resume=True)) and contents(directory) == before


SWITCHED = [name for name in SCRIPTS if name[:3] not in ("ddp", "td3")]


@pytest.mark.parametrize("name", SWITCHED)
def test_with_flags_off(name, tmp_path):
    """What the other runs have on is off; one epoch is over before the first update of SAC."""
    train, args = arguments(name, tmp_path, **PLAIN)
    wanted = reference.run(name.split("_")[0], args, 1)
    recorder.events.clear()
    assert train(args)
    assert_same_events(recorder.events, wanted.events[0])
    assert_same_run(run_dir(tmp_path, name, 40), wanted)


def mutants(name):
    """[(what, source), ...] of a script in which one use of a flag has the flag's default, or one
    part of what is saved is left out; and of one in which nothing is changed."""
    text, defaults = (ROOT / "algos" / f"{name}.py").read_text(), vars(load_script(name).Args())
    flags, start = "|".join(defaults.keys() - ELSEWHERE), text.index("# Resume:")
    flags = re.finditer(rf"(?<!_size, )\bargs\.({flags})\b", text)  # a limit of --minibatch-size
    uses = [(m, repr(defaults[m[1]])) for m in flags]
    parts = re.compile(r'("\w+": [^,}]+|\b\w+=\w+)(, )?')
    uses += [(m, "") for m in parts.finditer(text, start, text.index("# Main loop:"))]
    changed = [(m[0], text[: m.start()] + new + text[m.end() :]) for m, new in uses]
    return [*changed, ("nothing", text)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS[::-1])  # the one that takes longest is not the last
def test_no_use_of_a_flag_and_no_part_of_the_state_can_be_missing(name, tmp_path, monkeypatch):
    """Each in turn makes one of the two tests above fail; a script without a change does not."""
    missing, survived, known, run = mutants(name), [], {}, reference.run

    def run_once(algo, args, ranks):
        key = str(replace(args, data_dir=""))
        known[key] = known.get(key) or run(algo, args, ranks)
        return known[key]

    (tmp_path / "algos").mkdir()
    monkeypatch.setattr(conftest, "ROOT", tmp_path)
    monkeypatch.setattr(reference, "run", run_once)
    for i, (what, text) in enumerate(missing):
        (tmp_path / "algos" / f"{name}.py").write_text(text)
        with monkeypatch.context() as patch, suppress(Exception, pytest.fail.Exception):
            patch.setattr(sys, "dont_write_bytecode", True)  # it could pass for the next change's
            test_one_rank(name, False, tmp_path / str(i), patch)
            if name in SWITCHED:
                test_with_flags_off(name, tmp_path / f"{i} off")
            survived.append(f"{i}: {what}")
    assert i > 20 and survived == [f"{i}: nothing"] and 1 <= len(known) <= 2


RANKS = """
import json
from pathlib import Path
import recorder
from test_replay import arguments
from common import mpi_pytorch
from common.mpi import proc_id
mpi_pytorch.compile = None  # no script is to call it
for name in sys.argv[1:]:
    recorder.events.clear()
    train, args = arguments(name, Path.cwd(), 2)
    assert train(args)
    Path(f"{name}_{proc_id()}.json").write_text(json.dumps(recorder.events))
"""


@pytest.mark.parametrize(
    "which", ["torch", "tf1", slow("vpg_torch"), slow("ppo_torch"), slow("trpo_torch")]
)
def test_two_ranks(which, tmp_path):
    """Each with an environment and random numbers of its own; all statistics over both."""
    names = [name for name in SCRIPTS if name.endswith(which)]
    assert "the ranks have different" not in mpi(tmp_path, RANKS, 2, *names, cwd=tmp_path).stdout
    for name in names:
        _, args = arguments(name, tmp_path, 2)
        wanted = reference.run(name.split("_")[0], args, 2)
        for rank in (0, 1):
            found = json.loads((tmp_path / f"{name}_{rank}.json").read_text())
            assert_same_events(found, wanted.events[rank])
        assert_same_run(run_dir(tmp_path, name, 40), wanted)
        assert_same_networks(name, args, run_dir(tmp_path, name, 40), wanted)
