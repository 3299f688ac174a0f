"""The logger and its run directory: who may write there, and whether others can read it."""

import errno
import os
import re
import shutil
import subprocess
import sys
from unittest import mock

import numpy as np
import pandas as pd
import pytest
from conftest import ROOT, Args, contents, mpi, read_status, saved_model
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmark.reading import read_json
from common import UsageError, cpu, files, run
from common import mpi as helpers
from common.logger import EpochLogger, _tag, setup_logger_kwargs


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
    logger = run.start(Args(data_dir=str(tmp_path), **kwargs), "algos/some_script.py")
    try:
        logger.load_state({})
    except UsageError:
        logger.release()
        raise
    return logger


def test_directories(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    kwargs = {"output_dir": "d/name/name_s7", "exp_name": "name"}
    assert setup_logger_kwargs("name", 7, "d") == kwargs
    assert setup_logger_kwargs("name", data_dir="d")["output_dir"] == "d/name"
    assert setup_logger_kwargs("~", data_dir="~/d")["output_dir"] == f"{tmp_path}/d/~"
    monkeypatch.setenv("SWEEP_DATESTAMP", "")  # of a sweep without datestamps
    stamped = setup_logger_kwargs("name", 7, "d", datestamp=True)["output_dir"]
    date, time = r"\d{4}-\d\d-\d\d", r"\d\d-\d\d-\d\d"
    assert pd.Series([stamped]).str.fullmatch(rf"d/{date}_name/{date}_{time}-name_s7").all()
    logger = start(tmp_path, env_id="my_package:sub/Env-v0")
    name = "some_script_my_package_sub_Env-v0"
    assert logger.output_dir == tmp_path / name / f"{name}_s3"
    logger.close()


def test_files_of_a_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the commit is that of the project
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
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    assert (config["git_commit"] or "").rstrip("+") == head.stdout.strip()
    status = {"status": "finished", "epoch": 2, "epochs": 2, "error": None}
    assert read_status(logger.output_dir) == status
    with np.load(logger.output_dir / "policy.npz", allow_pickle=False) as policy:
        assert policy["weight_0"].shape == (2, 3) and str(policy["activation"]) == "tanh"
        assert int(policy["epoch"]) == 2
    out = capsys.readouterr().out
    assert re.search(r"^\| +AverageEpRet \| +2 \|$", out, re.MULTILINE)
    assert f"Finished after 2 epochs: {logger.output_dir} (to watch it, " in out.splitlines()[-1]
    assert EpochLogger(tmp_path / "no_policy").close()
    assert "watch" not in capsys.readouterr().out


def test_tensorboard_reads_the_events(tmp_path):
    logger = start(tmp_path)
    one_epoch(logger, 0, [1.0])
    (seen,) = EventAccumulator(str(logger.output_dir)).Reload().Scalars("charts/episodic_return")
    assert seen.value == 1 and seen.wall_time >= logger.start_time  # during the run
    assert _tag("AverageTestEpRet") == "eval/episodic_return"
    save(logger)
    one_epoch(logger, 1, [5.0])  # no checkpoint after this row: a resumed run makes it again
    logger.release()
    logger = start(tmp_path, resume=True)
    assert logger.epoch == 1
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
    assert resumed.epoch == 2 and resumed.close()  # a no-op
    with pytest.raises(UsageError, match="2 epochs are done, --epochs is 1"):
        start(tmp_path, resume=True, epochs=1)
    with pytest.raises(UsageError, match="exclude each other"):
        start(tmp_path, resume=True, overwrite=True)
    assert before == contents(tmp_path)
    start(tmp_path, overwrite=True).close()
    names = {path.name for path in logger.output_dir.iterdir()}
    assert names == {".lock", "config.json", "status.json", "checkpoint.npz", "notes.md"}


def test_a_directory_that_cannot_be_locked_or_is_elsewhere(tmp_path, monkeypatch):
    (tmp_path / "scratch").mkdir()
    (tmp_path / "run").mkdir()
    (tmp_path / "run/checkpoint").symlink_to(tmp_path / "scratch")
    for name in ("torch_save", "tf1_save"):
        (tmp_path / "run" / name / "x").mkdir(parents=True)
    files.claim(tmp_path / "run", False, True).close()  # --overwrite takes the link and both away
    assert os.listdir(tmp_path / "run") == [".lock"] and (tmp_path / "scratch").exists()
    no_flock = mock.Mock(side_effect=OSError(errno.ENOLCK, "No locks available"))
    monkeypatch.setattr(files.fcntl, "flock", no_flock)
    with pytest.raises(UsageError, match=r"cannot write to .*run: .*No locks available"):
        files.claim(tmp_path / "run", False, False)


def test_another_process_that_took_the_directory(tmp_path):
    """Once its lock is removed, a process that is still at work writes no more."""
    logger = start(tmp_path)
    (logger.output_dir / ".lock").unlink()
    with mock.patch.object(run, "_logger", None):  # as in another process
        second = start(tmp_path, resume=True)
    epochs(second, 1)
    before = contents(tmp_path)
    with pytest.raises(UsageError, match=r"\.lock was removed or replaced: another process may"):
        epochs(logger, 1)
    assert before == contents(tmp_path)
    shutil.rmtree(logger.output_dir)
    with pytest.raises(UsageError, match="removed or replaced"):
        epochs(second, 1)
    assert not contents(tmp_path)
    logger.release()
    second.release()


def test_a_full_disk_leaves_nothing_behind(tmp_path, monkeypatch):
    full = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    with monkeypatch.context() as m:
        m.setattr(files, "print", full, raising=False)
        with pytest.raises(UsageError, match=r"cannot write to .*No space left"):
            files.claim(tmp_path / "new" / "run", False, False)
    assert list(tmp_path.iterdir()) == [] and full.call_args.kwargs["flush"]


def test_what_may_change_on_resume(tmp_path, monkeypatch, capsys):
    """Not the arguments; versions and threads with a warning; epochs."""
    logger = start(tmp_path)
    epochs(logger, 2)
    logger.close()
    with pytest.raises(UsageError, match=r"cannot resume .*: lr was 0.1, is 0.2"):
        start(tmp_path, resume=True, lr=0.2)
    monkeypatch.setattr(cpu, "name", lambda: "another")
    monkeypatch.setattr(helpers, "threads_per_rank", lambda: 9)
    logger = start(tmp_path, resume=True, epochs=3)
    assert logger.epoch == 2 and read_json(logger.output_dir / "config.json")["epochs"] == 3
    said = r"with cpu another; the run began with .+\s.*with threads 9; the run began with \d+\s"
    assert re.search(said, capsys.readouterr().out)
    epochs(logger, 1)
    assert logger.close() and start(tmp_path, resume=True, epochs=3).close()


def test_annealing_fixes_the_number_of_epochs(tmp_path):
    start(tmp_path, anneal_lr=True).close()
    with pytest.raises(UsageError, match=r"cannot resume .*: epochs was 2, is 3"):
        start(tmp_path, anneal_lr=True, resume=True, epochs=3)


def test_resume_drops_rows_without_checkpoint(tmp_path):
    logger = start(tmp_path, epochs=9)
    one_epoch(logger, 0, [1.0])
    save(logger)
    one_epoch(logger, 1, [2.0])
    before = logger.table_path.read_text()
    logger.table_path.write_text(before + "2\t3.0\t")  # killed in the middle of a row
    logger.release()
    logger = start(tmp_path, epochs=9, resume=True)
    assert logger.epoch == 1
    assert logger.table_path.read_text() == "".join(before.splitlines(keepends=True)[:2])
    one_epoch(logger, 1, [2.0])
    assert not logger.close() and read_status(logger.output_dir)["status"] == "interrupted"
    assert pd.read_csv(logger.table_path, sep="\t").Epoch.tolist() == [0, 1]
    assert start(tmp_path, epochs=1, resume=True).close()  # now the checkpoint is its end
    assert pd.read_csv(logger.table_path, sep="\t").Epoch.tolist() == [0]
    assert read_json(logger.output_dir / "config.json")["epochs"] == 1


@pytest.mark.parametrize("rows", [None, 0, 2])
def test_ended_before_the_first_save(tmp_path, rows):
    """Before its networks were made, too: it starts anew; its table goes with the first row."""
    if rows is None:
        run.start(Args(data_dir=str(tmp_path)), "algos/some_script.py").release()
    logger = start(tmp_path, resume=rows is None)
    for i in range(rows or 0):
        one_epoch(logger, i, [1.0])
    logger.release()
    logger = start(tmp_path, resume=True)
    assert logger.epoch == 0
    one_epoch(logger, 0, [2.0])
    assert pd.read_csv(logger.table_path, sep="\t").AverageEpRet.tolist() == [2.0]
    logger.release()


def test_a_full_disk_does_not_keep_the_lock(tmp_path):
    logger = start(tmp_path)
    one_epoch(logger, 0, [1.0])
    logger.events.close = mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device"))
    logger.release()
    start(tmp_path, resume=True).release()


@pytest.mark.parametrize("key", ["LossV", "DeltaLossPi", "TestEpRet"])
def test_losses_and_returns_are_finite(tmp_path, key):
    """One that is not stops the run before its row is written; one that nobody stored does not."""
    logger = start(tmp_path)
    logger.log_tabular(key, average_only=True)
    logger.dump_tabular()
    logger.store(**{key: 1.0})
    logger.store(**{key: np.array([0.5, -np.inf])})
    with pytest.raises(FloatingPointError, match=f"{key} is NaN or infinite on rank 0, after"):
        logger.log_tabular(key, average_only=True)
    assert pd.read_csv(logger.table_path, sep="\t")[key].isna().tolist() == [True]
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
    assert out.count("WARNING: no episode ended in an epoch, so EpRet is nan") == 1
    assert out.count("WARNING") == 1 and "raise --steps-per-epoch" in out


def test_what_is_stored_and_not_logged(tmp_path, capsys):
    """A line names it, once; it is not in the next epoch's statistics."""
    logger = EpochLogger(tmp_path / "run")
    for i in range(3):
        logger.store(Bonus=i)
        if i == 2:
            logger.log_tabular("Bonus", average_only=True)
        else:
            logger.row["Bonus"] = 0
        logger.dump_tabular()
    assert capsys.readouterr().out.count("Bonus was stored, and log_tabular('Bonus') was not") == 1
    assert pd.read_csv(logger.table_path, sep="\t").Bonus.tolist() == [0, 0, 2]


@pytest.mark.parametrize("kills", [[], [0], [3], [4], [3, 5], [5, 5]])
def test_snapshots(tmp_path, kills):
    """The policy of every save, whether the run is killed or not; a stop adds none."""
    for kill in [*kills, None]:
        logger = start(tmp_path, resume=True, epochs=7, save_freq=2, snapshots=True)
        for i in range(logger.epoch, 7):
            one_epoch(logger, i, [1.0])
            if logger.save_due() or i == kill:
                save(logger)
            if i == kill:
                break
        logger.release()
    paths = logger.output_dir.glob("policy_*.npz")
    kept = {path.name: int(np.load(path)["epoch"]) for path in paths}
    assert kept == {f"policy_{epoch}.npz": epoch for epoch in (2, 4, 6, 7)}
    start(tmp_path, overwrite=True).close()
    assert not list(logger.output_dir.glob("policy*"))


# In one's own program -----------------------------------------------------------------------------


def test_spinning_ups_methods(tmp_path):
    """Without Args or a script."""
    logger = EpochLogger(tmp_path)
    logger.save_config({"lr": 1e-3, "net": object, "self": logger})
    logger.store(Ret=1.0, V=np.arange(4.0))
    logger.store(Ret=3.0)
    assert logger.get_stats("Ret") == (2.0, 1.0)
    logger.log_tabular(key="Epoch", val=mock.Mock(item=lambda: 0))  # as a tensor
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

    def step():
        optimizer.minimize(loss())
        optimizer.lr.mul_(0.5)

    return step, values, state


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
    """A resumed program has the values of the save, in its optimizer too; so has the model.

    Whatever the part of the state is called: replay buffers are buffer/0, buffer/1 and so on.
    """
    logger = EpochLogger(tmp_path / "run", resume=True)
    logger.save_config({"epochs": 2})
    step, values, state = program(logger)
    assert logger.load_state({"buffer": state}) == 0
    step()
    one_epoch(logger, 0, [1.0])
    saved = values()
    logger.save_state({"buffer": state})
    step()
    after = values()
    logger.release()

    logger = EpochLogger(tmp_path / "run", resume=True)
    with pytest.raises(UsageError, match=r"ranks was 1, is None, script was \S+, is None"):
        logger.load_state({"buffer": state})
    logger.save_config({"epochs": 2})
    step, values, state = program(logger)
    assert logger.load_state({"buffer": state}) == 1
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
