"""TRPO's parts against what they approximate: dense matrices, direct solvers, other libraries."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from conftest import load_script, progress, run, run_dir, slow

trpo = load_script("trpo_torch")
SPACES = {"box": gym.spaces.Box(-1, 1, (2,)), "discrete": gym.spaces.Discrete(3)}


def network(space):
    """A small policy and observations [20, 4]."""
    ac = trpo.actor_critic(4, SPACES[space], (6, 5), "tanh", np.random.default_rng(0))
    obs = torch.as_tensor(np.random.default_rng(1).normal(size=(20, 4)), dtype=torch.float32)
    return ac.pi, obs


@pytest.mark.parametrize("space", SPACES)
def test_kl_against_torch_distributions(space):
    """KL(old || new), not the other way round, in both frameworks."""
    old, new = torch.randn(2, 20, 2, generator=torch.Generator().manual_seed(0))
    if space == "box":  # mean [20, 2] and log_std [2]
        old, new = (old, old[0]), (new, new[0])
        p, q = (torch.distributions.Normal(mu, log_std.exp()) for mu, log_std in (old, new))
        wanted = torch.distributions.kl_divergence(p, q).sum(-1).mean().item()
        name = "GaussianActor"
    else:
        old, new = (torch.log_softmax(old, -1),), (torch.log_softmax(new, -1),)
        p, q = (torch.distributions.Categorical(logits=logits) for (logits,) in (old, new))
        wanted = torch.distributions.kl_divergence(p, q).mean().item()
        name = "CategoricalActor"
    assert getattr(trpo, name).kl(None, old, new).item() == pytest.approx(wanted, rel=1e-5)
    from common import mpi_tf1

    sess, actor = mpi_tf1.setup(), getattr(load_script("trpo_tf1"), name)
    old, new = ([mpi_tf1.tf.constant(x.numpy()) for x in dist] for dist in (old, new))
    assert sess.run(actor.kl(None, old, new)) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("space", SPACES)
def test_fisher_product_against_dense_matrices(space):
    """Against the KL's Hessian, written out row by row, and the Fisher matrix by its definition.

    The definition, E over actions of grad log pi grad log pi^T, knows nothing of the KL: for a
    Gaussian it is J^T diag(1 / sigma^2) J for the mean's Jacobian J and 2 for each log_std; for a
    categorical distribution J^T (diag(p) - p p^T) J for the logits' Jacobian.
    """
    pi, obs = network(space)
    params = list(pi.parameters())
    with torch.no_grad():
        old = [x.clone() for x in pi.dist(obs)]
    grad_kl = trpo.flat_grad(pi.kl(old, pi.dist(obs)), params, create_graph=True)
    N = len(grad_kl)
    hessian = torch.stack([trpo.flat_grad(g, params, retain_graph=True) for g in grad_kl]).numpy()

    by_definition = np.zeros((N, N))
    for o in obs:
        out = pi.net(o)
        J = torch.stack([flat_jacobian_row(y, params) for y in out]).numpy().astype(np.float64)
        if space == "box":
            C = np.diag(np.exp(-2 * pi.log_std.detach().numpy()))
        else:
            p = torch.softmax(out, -1).detach().numpy()
            C = np.diag(p) - np.outer(p, p)
        by_definition += J.T @ C @ J / len(obs)
    if space == "box":
        by_definition[:2, :2] += 2 * np.eye(2)  # log_std comes first among the parameters
    np.testing.assert_allclose(hessian, by_definition, rtol=0, atol=1e-5 * np.abs(hessian).max())

    rng = np.random.default_rng(2)
    for _ in range(5):
        x = rng.normal(size=N)
        product = trpo.fisher_product(grad_kl, params, torch.as_tensor(x, dtype=torch.float32))
        wanted = by_definition @ x
        np.testing.assert_allclose(product, wanted, rtol=0, atol=1e-5 * np.abs(wanted).max())


def flat_jacobian_row(y, params):
    grads = torch.autograd.grad(y, params, retain_graph=True, materialize_grads=True)
    return torch.cat([g.ravel() for g in grads])


@pytest.mark.parametrize("n", [1, 7, 30])
@pytest.mark.parametrize("form, precision", [("any", 1e-3), ("ours", 1e-7)])
def test_conjugate_gradient_against_a_direct_solve(form, precision, n):
    """It solves A x = b, also with more iterations than it needs; and each comes closer to x, in
    the norm of A. Other forms stop at a small residual, or add 1e-8 to what they divide by."""
    rng = np.random.default_rng(n)
    root = rng.normal(size=(n, n))
    A, b = root @ root.T + np.eye(n), rng.normal(size=n)
    exact = np.linalg.solve(A, b)
    x = trpo.conjugate_gradient(lambda v: A @ v, b.copy(), 2 * n)
    np.testing.assert_allclose(x, exact, rtol=0, atol=precision * np.linalg.norm(exact))
    errors = [trpo.conjugate_gradient(lambda v: A @ v, b.copy(), k) - exact for k in range(n)]
    norms = [e @ A @ e for e in errors]
    assert norms == sorted(norms, reverse=True)


NO_STEP = [
    (lambda v: v, np.zeros(3)),  # product, gradient
    (lambda v: -v, np.ones(3)),
    (lambda v: v * np.nan, np.ones(3)),
    (lambda v: v, np.full(3, np.nan)),
]


@pytest.mark.parametrize("product, g", NO_STEP)
def test_a_step_of_zeros_where_the_product_is_not_positive_and_finite(product, g):
    """For a zero gradient, a direction of negative curvature, and NaN."""
    with np.errstate(all="ignore"):
        assert (trpo.natural_step(product, g, 0.01, 10) == 0).all()


def test_there_is_always_a_step():
    """Nothing raises or warns meanwhile, and conjugate gradient returns numbers for any matrix."""
    indefinite = np.diag([1.0, -1.0, 0.0])
    with np.errstate(all="raise"):
        for product, g in NO_STEP:
            trpo.natural_step(product, g, 0.01, 10)
        x = trpo.conjugate_gradient(lambda v: indefinite @ v, np.array([1.0, 2, 3]), 10)
    assert np.isfinite(x).all()


def test_natural_step_uses_up_the_kl():
    """1/2 s^T H s is delta, and s points along H^-1 g: the maximum of g^T s within that KL."""
    rng = np.random.default_rng(0)
    root, g = rng.normal(size=(6, 6)), rng.normal(size=6)
    H = root @ root.T + np.eye(6)
    step = trpo.natural_step(lambda v: H @ v, g, 0.01, 20)
    assert 0.5 * step @ H @ step == pytest.approx(0.01)
    x = np.linalg.solve(H, g)
    assert step @ x == pytest.approx(np.linalg.norm(step) * np.linalg.norm(x))
    others = rng.normal(size=(1000, 6))
    others *= np.sqrt(0.02 / np.einsum("ni,ij,nj->n", others, H, others))[:, None]
    assert (others @ g <= step @ g).all()


def train(tmp_path, script, *flags, ranks=1):
    """The table of a few short epochs."""
    name = "_".join(map(str, [script, ranks, *flags]))
    flags = ["--env-id", "CartPole-v1", "--epochs", 4, "--steps-per-epoch", 600, *flags]
    flags += ["--train-v-iters", 5, "--data-dir", tmp_path, "--exp-name", name]
    run(script, *flags, ranks=ranks)
    return progress(run_dir(tmp_path, name))


@pytest.mark.parametrize("script, ranks", [("trpo_torch", 1), slow("trpo_tf1", 2)])
def test_line_search(tmp_path, script, ranks):
    """Where the quadratic model overshoots, shorter steps are tried until one is in bounds."""
    overshoots = ["--damping-coeff", 0.001, "--delta", 1]
    table = train(tmp_path, script, *overshoots, ranks=ranks)
    taken = table.BacktrackIters < 10
    assert ((table.BacktrackIters > 0) & taken).any(), "no step was tried again, shorter"
    assert table.KL.max() <= 1, f"KL is {table.KL.max():.4g}, should be at most 1"
    assert (table.DeltaLossPi[taken] < 0).all(), "a step was taken that raised the loss"

    # Where one try is not enough, the old policy stays, to the last bit.
    table = train(tmp_path, script, *overshoots, "--backtrack-iters", 1, ranks=ranks)
    failed = table.BacktrackIters == 1
    assert failed.any()
    kl = table.KL[failed].max()
    assert kl == 0, f"KL is {kl:.4g} where no step was good enough, should be 0"
    assert (table.DeltaLossPi[failed] == 0).all()

    # The natural policy gradient takes the step as it is.
    table = train(tmp_path, script, *overshoots, "--algo", "npg", ranks=ranks)
    assert (table.BacktrackIters == 0).all() and (table.KL > 1).any()
