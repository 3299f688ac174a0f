"""Make the animated picture at the top of README.md: trained robots, side by side.

    python benchmark/picture.py    # takes about a minute

It needs a way to render without a display, as `test_policy.py --video` does.
"""

import contextlib
import sys
from pathlib import Path

import numpy as np
from PIL import Image
from pydantic.dataclasses import dataclass
from tyro.conf import Positional

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run from any directory
from benchmark import test_policy
from benchmark.reading import printable
from common import UsageError
from common.args import PosFloat, parse_args

FOLDER = Path(__file__).resolve().parent / "policies"
NAMES = "ppo_swimmer", "ppo_hopper", "ppo_walker2d", "ppo_halfcheetah", "ppo_ant"
START = 2.0  # seconds of an episode that are not shown: the robot has to get going
FPS = 20  # pictures a second, at the robots' own speed
CROP, SIZE, GAP = (0, 120, 480, 480), (200, 150), 6  # of a picture of 480 x 480; pixels


@dataclass
class Args:
    policies: Positional[tuple[Path, ...]] = tuple(FOLDER / f"{name}.npz" for name in NAMES)
    out: Path = FOLDER / "robots.webp"
    seconds: PosFloat = 4.5


def film(path, seconds):
    """Pictures of a MuJoCo robot under a policy without noise: uint8 RGBA [T, height, width, 4].

    A clear column of GAP pixels is on the right.
    """
    pictures, get_action = [], test_policy.load_policy(path, deterministic=True)
    with contextlib.closing(test_policy.load_env(path, "rgb_array")) as env:
        o, _ = env.reset(seed=1)
        env.unwrapped.model.cam_fovy[:] = 50  # degrees; 45 would cut the legs of Ant
        for i in range(max(1, round(seconds * FPS))):
            while env.unwrapped.data.time < START + i / FPS:
                o, *_ = env.step(get_action(o))
            picture = Image.fromarray(env.render()).resize(SIZE, Image.LANCZOS, CROP)
            pictures.append(picture.convert("RGBA"))
    return np.pad(pictures, ((0, 0), (0, 0), (0, GAP), (0, 0)))


def main(argv=None):
    try:
        args = parse_args(Args, argv)
        frames = np.concatenate([film(path, args.seconds) for path in args.policies], axis=2)
    except (OSError, UsageError) as e:
        sys.exit(f"picture.py: error: {printable(e, 1000)}")
    first, *others = [Image.fromarray(frame) for frame in frames[:, :, :-GAP]]
    how = {"save_all": True, "append_images": others, "duration": 1000 // FPS, "loop": 0}
    first.save(args.out, quality=50, method=6, **how)


if __name__ == "__main__":
    main()
