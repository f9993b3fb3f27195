"""The DeepSpeed example as a script with the one line."""

import sys
from pathlib import Path

import ft_plugins.deepspeed  # noqa: F401

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "launch" / "examples"))

from deepspeed_gpt import main  # noqa: E402

if __name__ == "__main__":
    main(sys.argv[1:])
