"""The logger and its run directory: who may write there, and whether others can read it."""

import errno
import re
import shutil
import subprocess
import sys
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from conftest import (
    OFF_POLICY,
    ROOT,
    Args,
    contents,
    load_script,
    mpi,
    read_status,
    run_dir,
    saved_model,
)
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from common import UsageError, files, run
from common.files import read_json, setup_logger_kwargs
from common.logger import EpochLogger


def one_epoch(logger, epoch, returns):
    for r in returns:
        logger.store(EpRet=r, EpLen=10)
    logger.log_tabular("Epoch", epoch)
    logger.log_tabular("EpRet", with_min_and_max=True)
    logger.log_tabular("EpLen", average_only=True)
    logger.log_tabular("TotalEnvInteracts", 100 * (epoch + 1))
    logger.log_tabular("LossPi", np.float32(0.25))
    logger.log_tabular("Time", logger.time())
    logger.dump_tabular()


class Part:
    """A part of a run's state: one array."""

    def __init__(self, w):
        self.w = w

    def state_dict(self):
        return {"a/w": self.w}

    def load_state_dict(self, arrays):
        self.w = arrays["a/w"]


def save(logger):
    weights = [(np.ones((2, 3)), np.zeros(3))]
    logger.save_state({}, {"weights": weights, "activation": "tanh"})


def start(tmp_path, **kwargs):
    return run.start(Args(data_dir=str(tmp_path), **kwargs), "algos/some_script.py")


def test_directories(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    kwargs = {"output_dir": "d/name/name_s7", "exp_name": "name"}
    assert setup_logger_kwargs("name", 7, "d") == kwargs
    assert setup_logger_kwargs("name", data_dir="d")["output_dir"] == "d/name"
    assert setup_logger_kwargs("~", data_dir="~/d")["output_dir"] == f"{tmp_path}/d/~"
    stamped = setup_logger_kwargs("name", 7, "d", datestamp=True)["output_dir"]
    date, time = r"\d{4}-\d\d-\d\d", r"\d\d-\d\d-\d\d"
    assert pd.Series([stamped]).str.fullmatch(rf"d/{date}_name/{date}_{time}-name_s7").all()
    logger = start(tmp_path, env_id="my_package:sub/Env-v0")
    name = "some_script_my_package_sub_Env-v0"
    assert logger.output_dir == tmp_path / name / f"{name}_s3"
    logger.close()


def test_files_of_a_run(tmp_path, capsys):
    logger = start(tmp_path, exp_name="run")
    assert read_status(logger.output_dir)["status"] == "running"
    one_epoch(logger, 0, [1.0, 3.0])
    one_epoch(logger, 1, [])
    save(logger)
    assert logger.close()

    table = pd.read_csv(logger.output_dir / "progress.txt", sep="\t")
    columns = "Epoch AverageEpRet StdEpRet MaxEpRet MinEpRet EpLen TotalEnvInteracts LossPi Time"
    assert list(table) == columns.split()
    assert list(table.loc[0])[:8] == [0, 2.0, 1.0, 3.0, 1.0, 10.0, 100, 0.25]
    assert np.isnan(table.AverageEpRet[1]) and table.TotalEnvInteracts[1] == 200

    config = read_json(logger.output_dir / "config.json")
    assert config["exp_name"] == "run" and config["lr"] == 0.1 and config["ranks"] == 1
    assert config["script"] == "some_script.py" and config["versions"]["numpy"] == np.__version__
    status = {"status": "finished", "epoch": 2, "epochs": 2, "error": None}
    assert read_status(logger.output_dir) == status
    with np.load(logger.output_dir / "policy.npz", allow_pickle=False) as policy:
        assert policy["weight_0"].shape == (2, 3) and str(policy["activation"]) == "tanh"
        assert int(policy["epoch"]) == 2
    out = capsys.readouterr().out
    assert re.search(r"^\| +AverageEpRet \| +2 \|$", out, re.MULTILINE)
    assert "\x1b" not in out  # no terminal, no colours


def test_tensorboard_reads_the_events(tmp_path):
    logger = start(tmp_path)
    one_epoch(logger, 0, [1.0])
    save(logger)
    one_epoch(logger, 1, [5.0])  # no checkpoint after this row: a resumed run makes it again
    logger.release()
    logger = start(tmp_path, resume=True)
    assert logger.load_state({}) == logger.epoch == 1
    one_epoch(logger, 1, [7.0])
    logger.close()
    events = EventAccumulator(str(logger.output_dir)).Reload()
    tags = {"charts/episodic_return", "charts/episodic_length", "charts/SPS", "losses/LossPi"}
    assert tags <= set(events.Tags()["scalars"])
    scalars = [(e.step, e.value) for e in events.Scalars("charts/episodic_return")]
    assert scalars == [(100, 1.0), (200, 7.0)]


def test_no_framework_is_imported():
    """Not by common/ either, nor by what shows a policy: both take seconds."""
    code = "import sys, common.run, benchmark.test_policy\n"
    code += "assert not {'torch', 'tensorflow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_columns_are_the_same_in_every_row(tmp_path):
    logger = EpochLogger(tmp_path / "a")
    logger.log_tabular("A", 1)
    logger.dump_tabular()
    logger.log_tabular("B", 1)
    with pytest.raises(KeyError, match=r"columns \['A', 'B'\] are not in every row"):
        logger.dump_tabular()


def test_statistics_over_ranks(tmp_path):
    source = """
import numpy as np
from common.logger import EpochLogger
from common.mpi import proc_id
logger = EpochLogger("run")
if proc_id() == 0:  # rank 1 finished no episode in this epoch
    logger.store(EpRet=2.0)
    logger.store(EpRet=4.0)
logger.store(VVals=np.full(10, float(proc_id())))
logger.log_tabular("EpRet", with_min_and_max=True)
logger.log_tabular("VVals", average_only=True)
logger.log_tabular("Nothing")
logger.dump_tabular()
"""
    mpi(tmp_path, source, 2, cwd=tmp_path)
    text = (tmp_path / "run" / "progress.txt").read_text().split("\n")
    assert text[0].split("\t")[:4] == ["AverageEpRet", "StdEpRet", "MaxEpRet", "MinEpRet"]
    assert text[1].split("\t") == ["3.0", "1.0", "4.0", "2.0", "0.5", "nan", "nan"]


def epochs(logger, n):
    """Add epochs to a run, each with a checkpoint."""
    for _ in range(n):
        one_epoch(logger, logger.epoch, [1.0])
        save(logger)


def test_a_run_is_never_written_over(tmp_path):
    logger = start(tmp_path)
    epochs(logger, 2)
    logger.close()
    (logger.output_dir / "notes.md").write_text("mine")
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="holds a run: --resume continues it, --overwrite repl"):
        start(tmp_path)
    resumed = start(tmp_path, resume=True)
    assert resumed.finished and resumed.close()  # a no-op
    with pytest.raises(UsageError, match="2 epochs are done, --epochs is 1"):
        start(tmp_path, resume=True, epochs=1)
    with pytest.raises(UsageError, match="exclude each other"):
        start(tmp_path, resume=True, overwrite=True)
    assert before == contents(tmp_path)
    start(tmp_path, overwrite=True).close()
    names = {path.name for path in logger.output_dir.iterdir()}
    assert names == {".lock", "config.json", "status.json", "notes.md"}


def test_a_directory_that_cannot_be_locked_or_is_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoint").symlink_to(tmp_path / "scratch")
    files.claim(tmp_path / "run", False, True).close()  # --overwrite takes the link away
    assert not (tmp_path / "run/checkpoint").exists() and (tmp_path / "scratch").exists()
    no_flock = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(files.fcntl, "flock", no_flock)
    with pytest.raises(UsageError, match=r"cannot lock .*run: No locks available"):
        files.claim(tmp_path / "run", False, False)


def test_what_may_change_on_resume(tmp_path, capsys):
    """Not the arguments; versions and threads with a warning; epochs, if there are checkpoints."""
    logger = start(tmp_path)
    epochs(logger, 2)
    logger.close()
    with pytest.raises(UsageError, match=r"cannot resume .*: lr was 0.1, is 0.2"):
        start(tmp_path, resume=True, lr=0.2)
    path = logger.output_dir / "config.json"
    text = path.read_text().replace(f'"numpy": "{np.__version__}"', '"numpy": "1.0"')
    path.write_text(re.sub('"threads": .', '"threads": 9', text))
    logger = start(tmp_path, resume=True, epochs=3)
    assert logger.load_state({}) == 2 and not logger.finished
    said = rf"numpy {np.__version__}; the run began with 1.0\s.*threads \d+; the run began with 9\s"
    assert re.search(said, capsys.readouterr().out)
    epochs(logger, 1)
    assert logger.close(clear=True)
    with pytest.raises(UsageError, match=r"cannot resume .*3 epochs are done, and their checkp"):
        start(tmp_path, resume=True, epochs=4)
    assert start(tmp_path, resume=True, epochs=3).finished


def test_annealing_fixes_the_number_of_epochs(tmp_path):
    start(tmp_path, anneal_lr=True).close()
    with pytest.raises(UsageError, match=r"cannot resume .*: epochs was 2, is 3"):
        start(tmp_path, anneal_lr=True, resume=True, epochs=3)


def test_resume_drops_rows_without_checkpoint(tmp_path):
    logger = start(tmp_path, epochs=9)
    one_epoch(logger, 0, [1.0])
    save(logger)
    one_epoch(logger, 1, [2.0])
    before = logger.output_path.read_text()
    logger.output_path.write_text(before + "2\t3.0\t")  # killed in the middle of a row
    logger.release()
    logger = start(tmp_path, epochs=9, resume=True)
    assert logger.load_state({}) == 1
    assert logger.output_path.read_text() == "".join(before.splitlines(keepends=True)[:2])
    one_epoch(logger, 1, [2.0])
    logger.close()
    assert pd.read_csv(logger.output_path, sep="\t").Epoch.tolist() == [0, 1]


@pytest.mark.parametrize("status", [None, "failed"])
def test_ended_before_the_first_save(tmp_path, status):
    """Killed before it could write a status, or failed after an epoch: it starts anew."""
    logger = start(tmp_path)
    if status:
        one_epoch(logger, 0, [1.0])
        logger.write_status(status)
    else:
        (logger.output_dir / "status.json").unlink()
    logger.release()
    logger = start(tmp_path, resume=True)
    assert logger.load_state({}) == 0 and not logger.finished
    assert not logger.output_path.exists() and read_status(logger.output_dir)["epoch"] == 0


def test_a_stopped_run_whose_checkpoints_are_gone_is_refused(tmp_path):
    """It did not fail in its first save: starting anew would lose its table."""
    logger = start(tmp_path, epochs=9)
    epochs(logger, 1)
    assert not logger.close() and read_status(logger.output_dir)["status"] == "interrupted"
    shutil.rmtree(logger.checkpoints)
    before = contents(tmp_path)
    with pytest.raises(UsageError, match="1 epochs are done, and their checkpoints are gone"):
        start(tmp_path, resume=True, epochs=9)
    assert contents(tmp_path) == before


def test_a_full_disk_does_not_keep_the_lock(tmp_path):
    logger = start(tmp_path)
    one_epoch(logger, 0, [1.0])
    logger.events.close = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    logger.release()
    start(tmp_path, resume=True).release()


def test_a_full_disk_has_room_for_the_status(tmp_path, monkeypatch):
    """Where no new file can be written, the old status.json is written over."""
    logger = start(tmp_path, epochs=1234567)
    full = OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(files, "write_atomically", mock.Mock(side_effect=full))
    run.abandon("failed", str(full))
    state = read_status(logger.output_dir)
    assert (state["status"], state["error"]) == ("failed", str(full))


@pytest.mark.parametrize("key", ["LossV", "DeltaLossPi", "TestEpRet"])
def test_losses_and_returns_are_finite(tmp_path, key):
    """One that is not stops the run before its row is written; one that nobody stored does not."""
    logger = start(tmp_path)
    logger.log_tabular(key, average_only=True)
    logger.dump_tabular()
    logger.store(**{key: 1.0})
    logger.store(**{key: np.array([0.5, -np.inf])})
    with pytest.raises(FloatingPointError, match=f"{key} is NaN or infinite on rank 0 in epoch 1"):
        logger.log_tabular(key, average_only=True)
    assert pd.read_csv(logger.output_path, sep="\t")[key].isna().tolist() == [True]
    logger.close()


def test_bad_numbers_are_not_saved(tmp_path):
    logger = start(tmp_path)
    one_epoch(logger, 0, [1.0])
    with pytest.raises(FloatingPointError, match="parameter is NaN or infinite on rank 0"):
        logger.save_state({"ac": Part(np.array([1, np.inf]))}, {})
    logger.close()
    assert not (logger.output_dir / "policy.npz").exists()


def test_no_episode_ended(tmp_path, capsys):
    """EpRet is nan then; a line says so once, and what to do."""
    logger = EpochLogger(tmp_path / "run")
    for returns in ([1.0], [], [], [2.0]):
        one_epoch(logger, logger.epoch, returns)
    out = capsys.readouterr().out
    assert out.count("WARNING: no episode ended in epoch 1, so EpRet is nan") == 1
    assert out.count("WARNING") == 1 and "raise --steps-per-epoch" in out


# Snapshots ----------------------------------------------------------------------------------------

RETURNS = [1.0, 5.0, 3.0, 9.0, 4.0, 2.0, 6.0]


def snapshots(tmp_path, kills=(), test=None):
    """{file name: epoch in it} of a run that saves every other epoch, killed after some epochs."""
    for kill in [*kills, None]:
        logger = start(tmp_path, resume=True, exp_name=f"{kills} {test}", epochs=7)
        logger.save_freq, logger.snapshots = 2, True
        for epoch in range(logger.load_state({}), 7):
            if test:
                logger.log_tabular("AverageTestEpRet", test * RETURNS[epoch])
            one_epoch(logger, epoch, [RETURNS[epoch]])
            if logger.save_due():
                save(logger)
            if epoch == kill:
                break
        logger.release()
    paths = logger.output_dir.glob("policy_*.npz")
    return {path.name: int(np.load(path)["epoch"]) for path in paths}


def test_snapshots(tmp_path):
    """The policy of every save, and the best by return, whether the run is killed or not."""
    kept = {f"policy_{epoch}.npz": epoch for epoch in (2, 4, 6, 7)}
    assert snapshots(tmp_path) == kept | {"policy_best.npz": 4}
    assert snapshots(tmp_path, test=-1) == kept | {"policy_best.npz": 6}
    assert snapshots(tmp_path, test=np.nan) == kept | {"policy_best.npz": 4}  # no test episodes
    for kills in ([0], [3], [4], [3, 5], [5, 5]):
        assert snapshots(tmp_path, kills) == kept | {"policy_best.npz": 4}, kills


@pytest.mark.parametrize("script, best", [("vpg_torch", 2), ("ppo_tf1", 2), ("ddpg_torch", 3)])
def test_the_best_is_the_policy_that_earned_it(tmp_path, script, best):
    """Returns rise all the time. Those of the last epoch of three were earned by the policy after
    two updates; where policies are tested, by the one after all."""
    module = load_script(script)
    args = {"env_id": "odd_env:Odd-v0", "env_kwargs": {"kind": "rising"}, "hidden_sizes": (8,)}
    args |= {"steps_per_epoch": 60, "epochs": 3, "snapshots": True, "save_freq": 1}
    more = {"compile": False, "start_steps": 50, "update_after": 50}
    args |= more if script in OFF_POLICY else {}
    assert module.train(module.Args(**args, data_dir=str(tmp_path), exp_name="run"))
    saved = [np.load(run_dir(tmp_path, "run") / f"policy_{name}.npz") for name in ("best", best)]
    assert sorted(saved[0]) == sorted(saved[1]) and int(saved[0]["epoch"]) == best
    assert all((saved[0][key] == saved[1][key]).all() for key in saved[0])


def test_a_stop_adds_no_snapshot(tmp_path):
    """Nor can the policy that is saved there become the best: a run that is left alone has none."""
    logger = start(tmp_path, epochs=9)
    logger.save_freq, logger.snapshots = 2, True
    for epoch in range(3):
        one_epoch(logger, epoch, [RETURNS[epoch] if epoch < 2 else 100.0])
        if epoch == 2 or logger.save_due():
            save(logger)
    assert not logger.close() and read_status(logger.output_dir)["status"] == "interrupted"
    names = {path.name for path in logger.output_dir.glob("policy*")}
    assert names == {"policy.npz", "policy_2.npz", "policy_best.npz"}
    start(tmp_path, overwrite=True).close()
    assert not list(logger.output_dir.glob("policy*"))


# In one's own program -----------------------------------------------------------------------------


def test_spinning_ups_methods(tmp_path, monkeypatch):
    """Without arguments, Args or a script: a new directory each time."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first, logger = EpochLogger(), EpochLogger()
    assert first.output_dir.parent == logger.output_dir.parent == tmp_path / "experiments"
    assert first.output_dir != logger.output_dir
    logger.save_config({"lr": 1e-3, "net": object, "self": logger})
    logger.store(Ret=1.0, V=np.arange(4.0))
    logger.store(Ret=3.0)
    assert logger.get_stats("Ret") == (2.0, 1.0)
    logger.log_tabular(key="Epoch", val=0)
    logger.log_tabular("Ret", None, True)
    logger.log_tabular("V", average_only=True)
    logger.dump_tabular()
    logger.save_state({}, {"w": np.eye(2), "name": "mine"})
    assert logger.close()
    text = "Epoch AverageRet StdRet MaxRet MinRet V 0 2.0 1.0 3.0 1.0 1.5"
    assert (logger.output_dir / "progress.txt").read_text().split() == text.split()
    assert read_json(logger.output_dir / "config.json")["lr"] == 1e-3
    with np.load(logger.output_dir / "policy.npz", allow_pickle=False) as policy:
        assert policy["w"].tolist() == [[1, 0], [0, 1]] and str(policy["name"]) == "mine"
    with pytest.raises(ValueError, match="allow_pickle"):
        logger.save_state({}, {"w": object()})


X = np.float32([[1, 2], [3, 4]])


def in_torch(logger):
    """A network, a number and their optimizer: how to take a step, their values, their state."""
    import torch

    from common import mpi_pytorch

    net, alpha = torch.nn.Linear(2, 1), torch.zeros((), requires_grad=True)
    optimizer = mpi_pytorch.Adam([*net.parameters(), alpha], 0.1)
    logger.setup_pytorch_saver(net)
    loss = lambda: ((net(torch.tensor(X)) - alpha) ** 2).mean()  # noqa: E731
    values = lambda: [x.detach().clone() for x in (*net.parameters(), alpha)]  # noqa: E731
    state = mpi_pytorch.State(net=net, alpha=alpha, optimizer=optimizer)
    return lambda: optimizer.minimize(loss()), values, state


def in_tf1(logger):
    """The same as a graph."""
    from common import mpi_tf1
    from common.mpi_tf1 import tf

    sess = mpi_tf1.setup()
    net = [tf.get_variable("w", [2, 1]), tf.get_variable("b", []), tf.get_variable("alpha", [])]
    x = tf.placeholder(tf.float32, [None, 2])
    y = x @ net[0] + net[1]
    step = mpi_tf1.Adam(0.1).minimize(tf.reduce_mean((y - net[2]) ** 2), net)
    sess.run(tf.global_variables_initializer())
    logger.setup_tf_saver(sess, {"x": x}, {"y": y})
    return lambda: sess.run(step, {x: X}), lambda: sess.run(net), mpi_tf1.State(sess)


@pytest.mark.parametrize("program", [in_torch, in_tf1])
def test_networks_of_ones_own(tmp_path, program):
    """A resumed program has the values of the save, in its optimizer too; so has the model."""
    logger = EpochLogger(tmp_path / "run", resume=True)
    logger.save_config({"epochs": 2})
    step, values, state = program(logger)
    assert logger.load_state({"networks": state}) == 0
    step()
    one_epoch(logger, 0, [1.0])
    saved = values()
    logger.save_state({"networks": state})
    step()
    after = values()
    logger.release()

    logger = EpochLogger(tmp_path / "run", resume=True)
    with pytest.raises(RuntimeError, match="save_config comes before load_state"):
        logger.load_state({"networks": state})
    logger.save_config({"epochs": 2})
    step, values, state = program(logger)
    assert logger.load_state({"networks": state}) == 1
    assert all((x == y).all() for x, y in zip(values(), saved, strict=True))
    if program is in_tf1:
        y = saved_model(logger.output_dir, x=X)["y"]
        np.testing.assert_allclose(y, X @ saved[0] + saved[1], rtol=1e-5)
    else:
        model = sys.modules["torch"].load(tmp_path / "run/torch_save/model.pt", weights_only=True)
        assert all((x == y).all() for x, y in zip(model.values(), saved[:2], strict=True))
    step()
    assert all((x == y).all() for x, y in zip(values(), after, strict=True))
    logger.close()


def test_what_killed_processes_half_wrote_is_deleted(tmp_path):
    logger = start(tmp_path)
    epochs(logger, 1)
    logger.release()
    names = [".policy.npz.7.tmp", "torch_save/.model.pt.7.tmp", "checkpoint/.epoch_000002.7.tmp"]
    for path in (logger.output_dir / name for name in names):
        path.parent.mkdir(exist_ok=True)
        path.touch()
    start(tmp_path, resume=True).release()
    assert not list(tmp_path.rglob(".*.tmp"))


def test_the_last_rank_is_waited_for_before_checkpoints_are_deleted(tmp_path):
    source = """
import time
from pathlib import Path
from common import mpi
from common.logger import EpochLogger

def unlink(*args, real=Path.unlink, **kwargs):
    time.sleep(0.2 * mpi.proc_id())
    real(*args, **kwargs)

Path.unlink = unlink
logger = EpochLogger("run")
logger.save_config({"epochs": 3})
for epoch in range(3):
    logger.log_tabular("Epoch", epoch)
    logger.dump_tabular()
    logger.save_state({})
logger.close(clear=True)
"""
    mpi(tmp_path, source, 2, cwd=tmp_path)
    assert not (tmp_path / "run" / "checkpoint").exists()
