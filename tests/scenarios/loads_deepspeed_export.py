"""One rank of the DeepSpeed example that goes on from a checkpoint of DeepSpeed's own, without protection.

--load <folder> --samples <how many all replicas had read> <flags of the DeepSpeed example>
"""

import argparse

import deepspeed
import deepspeed_gpt
from byte_text import Sampler


def main(argv):
    parser = argparse.ArgumentParser()
    parser.add_argument("--load", required=True)
    parser.add_argument("--samples", type=int, required=True)
    own, words = parser.parse_known_args(argv)
    initialize = deepspeed.initialize

    def loaded(*args, **kwargs):
        built = initialize(*args, **kwargs)
        found, _ = built[0].load_checkpoint(own.load)
        assert found is not None, "DeepSpeed has found nothing to load"
        return built

    class Started(Sampler):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.position = own.samples

    deepspeed.initialize, deepspeed_gpt.Sampler = loaded, Started
    deepspeed_gpt.main(words)
