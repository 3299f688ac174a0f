"""The PyTorch scripts on a GPU, where there is one."""

import pytest
import torch
from conftest import OFF_POLICY, ON_POLICY, assert_same_run, load_script, progress, run, run_dir

from common import UsageError, mpi_pytorch
from common import run as run_of_script

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

SHORT = {"env_id": "Pendulum-v1", "max_ep_len": 100, "steps_per_epoch": 400}
LATE = {"start_steps": 400, "update_after": 350}  # a hundred gradient steps in the first epoch
TORCH = [name for name in ON_POLICY + OFF_POLICY if name.endswith("torch")]


@pytest.mark.parametrize("name", [*TORCH, "sac_torch auto"])
def test_starts_as_on_the_cpu_and_resumes_exactly(name, tmp_path, monkeypatch):
    """The update is compiled on the GPU only, and its CUDA graph is captured anew on resume."""
    name, *auto = name.split()
    module, flags = load_script(name), SHORT | {"data_dir": str(tmp_path), "epochs": 3}
    if name in OFF_POLICY:
        flags |= LATE | ({"alpha": "auto"} if auto else {})
    train = lambda **more: module.train(module.Args(**flags | {"device": "cuda"} | more))  # noqa: E731
    assert train(exp_name="whole")
    with monkeypatch.context() as patch:
        patch.setattr(run_of_script, "stop_requested", lambda: True)
        assert not train(exp_name="parts")  # one epoch
    assert train(exp_name="parts", resume=True)
    whole, parts, cpu = (run_dir(tmp_path, x) for x in ("whole", "parts", "cpu"))
    assert_same_run(whole, parts)
    model = torch.load(parts / "torch_save" / "model.pt", weights_only=True)
    assert {x.device.type for x in model.values()} == {"cpu"}  # for machines without a GPU

    slowly = {"compile": False} if name in OFF_POLICY else {}
    assert train(exp_name="cpu", device="cpu", **{"epochs": 1} | slowly)
    ours, theirs = progress(whole).loc[0], progress(cpu).loc[0]
    assert ours.EpLen == theirs.EpLen and ours.AverageEpRet == theirs.AverageEpRet
    for key in ("LossV", "KL", "LossQ", "LossPi"):
        if key in ours:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-2, abs=1e-5)


@pytest.mark.parametrize("name", ["ppo_torch", "sac_torch"])
def test_ranks_agree(name, tmp_path):
    """A warning would name what differs between them."""
    flags = [x for key, x in SHORT.items() for x in (f"--{key.replace('_', '-')}", x)]
    flags += ["--start-steps", 400, "--update-after", 200] if name in OFF_POLICY else []
    flags += ["--epochs", 2, "--device", "cuda", "--exp-name", "two", "--data-dir", tmp_path]
    assert "the ranks have different" not in run(name, *flags, ranks=2).stdout
    assert len(progress(run_dir(tmp_path, "two"))) == 2


def test_a_gpu_too_many():
    assert mpi_pytorch.setup("cuda") == torch.device("cuda", 0)
    with pytest.raises(UsageError, match="cannot be used"):
        mpi_pytorch.setup(f"cuda:{torch.cuda.device_count()}")
