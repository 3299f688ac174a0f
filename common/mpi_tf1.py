"""TensorFlow 1's half of the MPI helpers: set-up, averaged gradients, Adam, state for checkpoints.

Importing this module loads TensorFlow without its start-up messages and switches it to graph mode:
import it before `tensorflow.compat.v1`.
"""

import importlib.util
import os
import shutil
import sys
import tempfile
from pathlib import Path

import numpy as np

from common import mpi


def _load_tensorflow():
    """Import TensorFlow, whose libraries write to stderr as they load, whatever its settings."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # its exceptions say what matters
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        import tensorflow.compat.v1 as tf
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)
    tf.logging.set_verbosity(tf.logging.ERROR)
    tf.disable_eager_execution()
    return tf


if importlib.util.find_spec("tensorflow") is None:
    if mpi.proc_id() == 0:
        print("TensorFlow is missing: pip install -r requirements.txt", file=sys.stderr)
    sys.exit(2)
tf = _load_tensorflow()


def setup(parallel_ops=False):
    """A session on a new default graph, with this rank's share of the cores.

    It runs on the CPU: where there are GPUs, every rank would otherwise take all of their memory.

    Args:
        parallel_ops: run independent operations (Q and its target, say) side by side.
    """
    tf.reset_default_graph()
    config = tf.ConfigProto(
        intra_op_parallelism_threads=mpi.threads_per_rank(),
        inter_op_parallelism_threads=mpi.threads_per_rank() if parallel_ops else 1,
        device_count={"GPU": 0},
    )
    return tf.Session(config=config)


def flat_concat(xs):
    """Concatenate tensors of any shapes: [...], [...], ... -> [N]."""
    return tf.concat([tf.reshape(x, [-1]) for x in xs], axis=0)


def split_flat(flat, like):
    """The inverse of `flat_concat`: tensor [N] -> list of tensors shaped like those in `like`."""
    parts = tf.split(flat, [int(np.prod(x.shape)) for x in like])
    return [tf.reshape(part, x.shape) for part, x in zip(parts, like, strict=True)]


def assign_params_from_flat(x, params):
    """An op that gives variables the values in a flat tensor [N], in the order of `params`."""
    pairs = zip(params, split_flat(x, params), strict=True)
    return tf.group([tf.assign(p, value) for p, value in pairs])


def sync_all_params():
    """An op that gives every rank rank 0's values of all float32 variables."""
    params = [p for p in tf.global_variables() if p.dtype.base_dtype == tf.float32]
    synced = tf.numpy_function(mpi.broadcast, [flat_concat(params)], tf.float32)
    return assign_params_from_flat(tf.reshape(synced, [-1]), params)


def avg_tensor(x):
    """Average a float32 tensor of known shape over all ranks, with one message."""
    if mpi.num_procs() == 1:
        return x
    return tf.ensure_shape(tf.numpy_function(mpi.avg_float32, [x], tf.float32), x.shape)


class Adam:
    """Adam (Kingma and Ba 2015, arXiv:1412.6980) on gradients averaged over all ranks.

    It gives the numbers of torch.optim.Adam: epsilon is added to the square root of the
    bias-corrected second moment, where TensorFlow's own Adam adds it to the uncorrected one.

    Args:
        lr, beta1, beta2, epsilon: as in the paper: floats, or for `lr` a float64 tensor.
        name: scope of the optimizer's variables: one that is used twice needs two names.
    """

    def __init__(self, lr, beta1=0.9, beta2=0.999, epsilon=1e-8, name="adam"):
        self.lr, self.epsilon, self.name = lr, epsilon, name
        self.beta1, self.beta2 = np.float32(beta1), np.float32(beta2)  # as the kernel computes

    def compute_gradients(self, loss, var_list):
        """Returns [(gradient, variable), ...], the gradients averaged over all ranks."""
        flat = avg_tensor(flat_concat(tf.gradients(loss, var_list)))
        return list(zip(split_flat(flat, var_list), var_list, strict=True))

    def apply_gradients(self, grads_and_vars):
        """An op that takes one step. Call this once per optimizer."""
        zeros = lambda name, x: tf.get_variable(name, initializer=x, trainable=False)  # noqa: E731
        with tf.variable_scope(self.name):
            self.steps = zeros("step", np.zeros((), np.int64))
        with tf.control_dependencies([tf.assign_add(self.steps, 1)]):
            t = tf.cast(self.steps.read_value(), tf.float64)
        correction1, correction2 = (1 - np.float64(b) ** t for b in (self.beta1, self.beta2))
        # Beta powers of 0 switch off the kernel's own bias correction. It then computes
        # var -= step_size m / (sqrt(v) + epsilon sqrt(correction2)), which is torch's step.
        step_size = tf.cast(self.lr * tf.sqrt(correction2) / correction1, tf.float32)
        epsilon = tf.cast(self.epsilon * tf.sqrt(correction2), tf.float32)
        steps_taken = []
        for grad, var in grads_and_vars:
            with tf.variable_scope(f"{self.name}/{var.op.name}"):
                m, v = (zeros(name, np.zeros(var.shape, np.float32)) for name in ("m", "v"))
            step = tf.raw_ops.ResourceApplyAdam(
                var=var.handle, m=m.handle, v=v.handle, beta1_power=0.0, beta2_power=0.0,
                lr=step_size, beta1=self.beta1, beta2=self.beta2, epsilon=epsilon, grad=grad,
            )  # fmt: skip
            steps_taken.append(step)
        return tf.group(steps_taken)

    def minimize(self, loss, var_list):
        """An op that takes one step down the gradient of `loss`, averaged over all ranks."""
        return self.apply_gradients(self.compute_gradients(loss, var_list))


class State:
    """All variables of a session's graph, for `EpochLogger.save_state` and `load_state`."""

    def __init__(self, sess):
        self.sess, self.variables = sess, {v.op.name: v for v in tf.global_variables()}

    def state_dict(self):
        """The variables as arrays, {name: array}."""
        return self.sess.run(self.variables)

    def load_state_dict(self, arrays):
        """Give the variables the values that `state_dict` once returned."""
        for name, variable in self.variables.items():
            variable.load(arrays[name], self.sess)


def save_model(sess, inputs, outputs, output_dir):
    """Write tf1_save/ in a run directory: a SavedModel, its signature named as given here.

    Args:
        inputs, outputs: dicts of tensors by name.
    """
    if not tf.get_collection("saver"):  # made once: each new one would add its ops to the graph
        tf.add_to_collection("saver", tf.train.Saver())
    signature = tf.saved_model.predict_signature_def(inputs, outputs)
    signatures = {tf.saved_model.DEFAULT_SERVING_SIGNATURE_DEF_KEY: signature}
    (saver,), tags = tf.get_collection("saver"), [tf.saved_model.SERVING]
    # The directory of a save that fails is deleted, and leaves room to say so on a full disk.
    with tempfile.TemporaryDirectory(".tmp", ".", output_dir) as temporary:
        builder = tf.saved_model.Builder(f"{temporary}/tf1_save")
        builder.add_meta_graph_and_variables(sess, tags, signatures, saver=saver)
        builder.save()
        path = Path(output_dir, "tf1_save")
        shutil.rmtree(path, ignore_errors=True)
        os.rename(f"{temporary}/tf1_save", path)
