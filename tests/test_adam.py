"""Adam of PyTorch, of TensorFlow 1 and of the paper. Whole runs are compared in test_replay.py."""

import numpy as np
import torch

from common import mpi_tf1
from common.mpi_tf1 import tf


def test_adam():
    """Fifty steps on given gradients, tiny ones and zeros among them, where epsilon matters."""
    rng = np.random.default_rng(0)
    start = rng.normal(size=(3, 4)).astype(np.float32)
    scale = np.float32([1e3, 1, 1e-8, 0])
    grads = rng.normal(size=(50, 3, 4)).astype(np.float32) * scale
    sess = mpi_tf1.setup()
    variable = tf.get_variable("x", initializer=start)
    optimizer, ph = mpi_tf1.Adam(1e-2), tf.placeholder(tf.float32, [3, 4])
    # The gradient of sum(x ph) is ph.
    step = optimizer.minimize(tf.reduce_sum(variable * ph), [variable])
    sess.run(tf.global_variables_initializer())
    param = torch.nn.Parameter(torch.tensor(start))
    torch_optimizer = torch.optim.Adam([param], lr=1e-2)
    m, v, exact = 0.0, 0.0, start.astype(np.float64)
    for t, g in enumerate(grads, 1):
        sess.run(step, {ph: g})
        param.grad = torch.tensor(g)
        torch_optimizer.step()
        g = g.astype(np.float64)
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
        exact -= 1e-2 * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)
        np.testing.assert_allclose(sess.run(variable), exact, rtol=0, atol=5e-6)
        np.testing.assert_allclose(sess.run(variable), param.detach().numpy(), rtol=0, atol=5e-6)
    assert sess.run(optimizer.steps) == 50
    assert np.abs(exact - start)[:, :3].min() > 1e-3
