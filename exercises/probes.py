"""Environments so small that theory says what a critic or a policy has to learn in them.

    PYTHONPATH=exercises python algos/ppo_torch.py --env-id probes:TwoSteps-v0 --gamma 0.5

A Gymnasium id each, `probes:NAME-v0`, usable by any library that finds this file on its path;
probes.toml says what comes out, and `python exercises/exercise.py probe FILE` looks at it. Actions
are a Box, or with `discrete=True` Discrete(3, start=5), whose three actions count as -1, 0 and 1.
"""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete


class Probe(gym.Env):
    """A small task. Its children say where an episode begins and what a step does.

    All observations come in one array, which the next one overwrites, as some environments do it.

    Args:
        discrete: whether actions are Discrete.
        limit: steps after which an episode is truncated; 0: none.
        reward: that of a task with one.
    """

    low, high = [-1.0], [1.0]  # bounds of the actions

    def __init_subclass__(cls):
        gym.register(f"{cls.__name__}-v0", cls)

    def __init__(self, discrete=False, limit=0, reward=1):
        self.limit, self.reward, self.steps = limit, reward, 0  # steps ever taken
        self.o = np.float32(self.begin())
        self.observation_space = Box(-np.inf, np.inf, self.o.shape, np.float32)
        self.action_space = Box(np.float32(self.low), np.float32(self.high))
        if discrete:
            self.action_space = Discrete(3, start=5)

    def begin(self):
        """The first observation of an episode."""
        return [0.0]

    def move(self, o, a):
        """Observation and action, arrays -> reward, next observation; None where it is terminal."""
        raise NotImplementedError

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.o[:] = 0, self.begin()
        return self.o, {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action} is not in {self.action_space}"
        discrete = isinstance(self.action_space, Discrete)
        a = np.array([float(action) - 6]) if discrete else np.float64(action)
        self.t, self.steps = self.t + 1, self.steps + 1
        r, o2 = self.move(self.o, a)
        terminated = o2 is None
        self.o[:] = 0 if terminated else o2
        return self.o, float(r), terminated, self.t == self.limit, {}


class OneStep(Probe):
    """A reward of 1, and the end; actions are two numbers."""

    low, high = [-1.0, -1.0], [1.0, 1.0]

    def move(self, o, a):
        return 1, None


class Sees(Probe):
    """The observation, 1 or -1, is the reward, up to noise that cannot be foreseen."""

    def begin(self):
        return [self.np_random.choice([-1.0, 1.0])]

    def move(self, o, a):
        return o[0] + self.np_random.uniform(-0.1, 0.1), None


class TwoSteps(Probe):
    """No reward in the first step, `reward` in the second."""

    def begin(self):
        return [-1.0]

    def move(self, o, a):
        return (0, [1.0]) if o[0] < 0 else (self.reward, None)


class Acts(Probe):
    """The best action is 0.6, or the last of three."""

    def move(self, o, a):
        return -np.sum((a - 0.6) ** 2), None


class SeesAndActs(Sees):
    """The best action is 0.6 times the first number of the observation, 1 or -1."""

    def move(self, o, a):
        return -np.sum((a - 0.6 * o[0]) ** 2), None


class NowOrLater(TwoSteps):
    """A negative action is worth 2 at once, any other 3 in the second step: 1.5 if gamma is 0.5."""

    def move(self, o, a):
        return (3, None) if o[0] > 0 else (2, None) if a[0] < 0 else (0, [1.0])


class ThenActs(Acts):
    """A reward of 5, then the task of `Acts`: with the best action nothing is lost there."""

    def begin(self):
        return [-1.0]

    def move(self, o, a):
        return (5, [1.0]) if o[0] < 0 else super().move(o, a)


class Blind(Probe):
    """What the first action gains in its step, it costs twice in the next, which looks the same."""

    def move(self, o, a):
        if self.t == 1:
            self.first = a[0]
            return a[0], o
        return -2 * self.first, None


class Apart(Probe):
    """A negative action is worth 1 at once, a positive one 2 in the next episode, in vain."""

    before = 0.0

    def move(self, o, a):
        r, self.before = (a[0] < 0) + 2 * self.before, float(a[0] > 0)
        return r, None


class Endless(TwoSteps):
    """No reward in the first step, 1 in every other, and no end but for the time limit."""

    def move(self, o, a):
        return float(o[0] > 0), [1.0]


class Far(Probe):
    """No reward and no end, at an observation so large that untrained networks differ much."""

    def begin(self):
        return [100.0]

    def move(self, o, a):
        return 0, o


class Bounds(Probe):
    """The best actions are 2 and -3, within unequal bounds."""

    low, high = [-1.0, -4.0], [3.0, 1.0]

    def move(self, o, a):
        return -np.sum(((a - [2, -3]) / [2, 2.5]) ** 2), None


class Edges(Probe):
    """Actions beyond either bound are the best."""

    low, high = [-0.5], [0.5]

    def move(self, o, a):
        return abs(a[0]), None


class Scales(SeesAndActs):
    """As `SeesAndActs`, beside an observation of no meaning that is a thousand times as large."""

    def begin(self):
        return [*super().begin(), self.np_random.normal(3000, 1000)]


class Changes(Probe):
    """A reward of -1 in the first 300 steps ever taken, then 1."""

    def move(self, o, a):
        return 1 if self.steps > 300 else -1, None
