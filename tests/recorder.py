"""An environment that writes down all that is asked of it; it registers itself as Recorder-v0.

What it returns depends on seeds and the number of steps, rewards on actions too. So a run that does
the right thing can be foretold, see reference.py, and its rounding does not build up.
"""

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete

# Steps of an episode, and whether its end is terminal and truncated; the third goes on and on.
ENDS = [(5, True, False), (4, False, True), (99, False, False), (3, True, True), (7, True, False)]

events = []  # of all environments of this process: ["reset", seed] and ["step", action]
at_event = {}  # number of such an event: a function that is called then


class Recorder(gym.Env):
    observation_space = Box(-np.inf, np.inf, (3,), np.float32)

    def __init__(self, discrete=False, mean=1, events=events):
        box = Box(np.float32([-1, 0]), np.float32([1, 5]))
        self.action_space = Discrete(3, start=-1) if discrete else box
        self.mean, self.events, self.episode = mean, events, 0

    def note(self, kind, what):
        self.events.append([kind, what])
        if self.events is events:
            at_event.get(len(events), int)()

    def observe(self):
        self.o = np.float32(self.np_random.normal([self.mean, -3, self.t], [2, 0.5, 0.1]))
        return self.o.copy()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.note("reset", seed)
        self.t, self.episode = 0, self.episode + 1 if seed is None else seed
        return self.observe(), {}

    def step(self, action):
        assert self.action_space.contains(action), f"{action} is not in {self.action_space}"
        self.note("step", np.asarray(action).tolist())
        o, self.t = self.o, self.t + 1
        steps, *ends = ENDS[self.episode % len(ENDS)]
        ends = [end and self.t == steps for end in ends]
        return self.observe(), float(np.dot(np.ravel(action), o[: np.size(action)])), *ends, {}


gym.register("Recorder-v0", Recorder)
